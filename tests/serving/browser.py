"""A browser with the page in it."""

from __future__ import annotations

import shutil
import time

import pytest

from serving.fake_explorer_server import PAGE, serve

PATIENCE = 20_000  # milliseconds
UNTRIED = "the page is not tried in a browser"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason=f"playwright is not installed: {UNTRIED}")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip(f"there is no chromium on the path: {UNTRIED}")
    if not (PAGE / "explorer.js").is_file():
        pytest.skip(f"the page is not built (make page): {UNTRIED}")
    with playwright.sync_playwright() as running:
        opened = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Opens the page of a stand-in; afterwards the console must be clean."""
    contexts = []
    servers = []
    troubles = []

    def open_(explorer, words: str = "", *, width: int = 1200, wait: str | None = "[role=tab]", **more):
        context = browser.new_context(viewport={"width": width, "height": 860}, **more)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        servers.append(serve(explorer))
        page = context.new_page()
        page.on(
            "console",
            lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(f"http://127.0.0.1:{servers[-1].server_port}/explore/{words}")
        if wait:
            page.wait_for_selector(wait)
        return page

    open_.troubles = troubles
    yield open_
    for context in contexts:
        context.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    assert not troubles, troubles


def settled(check, seconds: float = PATIENCE / 1000):
    """Waits until it is so."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.05)


def until(page, expression: str) -> None:
    """Waits for something in the page. (playwright's own way to do so evaluates strings there, and the policy forbids that.)"""
    settled(lambda: page.evaluate(expression))


def asked(explorer, question):
    return [given for name, given in list(explorer.asked) if name == question]
