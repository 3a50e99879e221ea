"""The page's sixth view, in a real browser: only the operator has it, and it follows what the server does."""

from __future__ import annotations

import threading

import httpx
import pytest

from keepleft.serving.http.middleware.auth import APIKey, APIKeys
from serving.browser import wait_until
from serving.fake_explorer import FakeExplorer
from serving.tiny_services import Slow, decoder, running

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
USER, OPERATOR = APIKey("user-key", weight=2), APIKey("operator-key", operator=True)
LONG = {"prompt": "the sea", "max_tokens": 4000, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def server():
    keys = APIKeys([USER, OPERATOR])
    with running(decoder(), Slow, explorer=FakeExplorer("decoder"), keys=keys) as (port, service, _):
        yield f"http://127.0.0.1:{port}", service


@pytest.fixture
def open_page(browser, server):
    """Opens the page with a key; afterwards the browser's console must be clean."""
    contexts = []
    console = []

    def open_(key: APIKey, fragment: str = "", *, width: int = 1200):
        context = browser.new_context(
            viewport={"width": width, "height": 860},
            http_credentials={"username": "anybody", "password": key.secret},
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        page.goto(f"{server[0]}/explore/{fragment}")
        page.wait_for_selector("[role=tab]")
        return page

    open_.console = console
    yield open_
    for context in contexts:
        context.close()
    assert not console, console


def figure(page, title: str) -> float:
    text = page.locator(f"section[aria-label='{title}'] .key-figure").inner_text()
    number = text.split()[0]
    return 0.0 if number == "–" else float(number.replace(",", ""))


def test_only_the_operator_has_the_view(open_page):
    page = open_page(USER, "#view=server")
    page.wait_for_selector("role=tab[name='Training']")
    assert page.locator("[role=tab]").count() == 5
    assert page.get_by_role("tab", name="Attention").get_attribute("aria-selected") == "true"
    asked = page.evaluate("fetch('server').then((response) => response.status, () => 0)")
    assert asked == 403
    open_page.console.clear()  # the browser itself logs a refused request


def test_the_numbers_move_while_a_completion_runs(open_page, server):
    address, service = server
    thread = threading.Thread(
        target=httpx.post,
        args=(f"{address}/v1/completions",),
        kwargs={"json": LONG, "headers": {"authorization": f"Bearer {USER.secret}"}, "timeout": 60},
    )
    thread.start()
    try:
        wait_until(lambda: service.engine_thread.in_flight)
        page = open_page(OPERATOR)
        page.wait_for_selector("role=tab[name='Training']")
        page.keyboard.press("6")
        page.wait_for_selector(".figures")
        assert "Ready" in page.locator(".verdict").inner_text()
        assert figure(page, "Batch") == 1
        generated = page.locator(".tenants tbody tr", has_text=USER.tenant[:8]).locator("td").nth(10)
        before = int(generated.inner_text())
        wait_until(lambda: int(generated.inner_text()) > before)
        wait_until(lambda: figure(page, "Throughput") > 0)
        assert page.locator(".chart .curve").count() == 5
        assert USER.secret not in page.content()
    finally:
        service.abort_all()
        thread.join(30)
    page.keyboard.press("3")  # while another view is open, nobody asks
    page.wait_for_selector("canvas[aria-label^=Mask]")
    urls = []
    page.on("request", lambda request: urls.append(request.url))
    page.wait_for_timeout(1200)
    assert not any("/explore/server" in url for url in urls)


def test_the_tab_stays_where_it_is_when_the_model_has_answered(open_page, server):
    page = open_page(OPERATOR)
    page.wait_for_selector("role=tab[name='Training']")
    server_tab = page.get_by_role("tab", name="Server")
    place = server_tab.bounding_box()
    page.route("**/explore/model_info", lambda route: None)  # the model never answers
    page.reload()
    page.wait_for_selector("[role=tab]")
    assert page.locator("[role=tab]").count() == 1
    assert server_tab.bounding_box()["x"] == pytest.approx(place["x"], abs=20)
    server_tab.click()
    page.wait_for_selector(".figures")


def test_a_phone_is_wide_enough(open_page):
    page = open_page(OPERATOR, "#view=server", width=360)
    page.wait_for_selector(".figures")
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360
    table = page.get_by_role("region", name="Table of tenants")
    table.focus()
    page.keyboard.press("ArrowRight")
    wait_until(lambda: table.evaluate("element => element.scrollLeft") > 0)
