"""Fixtures: a real browser, and the explorer's page open in it."""

from __future__ import annotations

import shutil
import time

import pytest

from serving.fake_explorer_server import PAGE, serve

TIMEOUT_MS = 20_000
NOT_TESTED = "the page is not tested in a browser"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip(
        "playwright.sync_api", reason=f"playwright is not installed: {NOT_TESTED}"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip(f"there is no chromium on the path: {NOT_TESTED}")
    if not (PAGE / "explorer.js").is_file():
        pytest.skip(f"the page is not built (make page): {NOT_TESTED}")
    with playwright.sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield instance
        instance.close()


@pytest.fixture
def visit(browser):
    """Opens the page of an explorer; afterwards the browser's console must be clean."""
    contexts = []
    servers = []
    console_errors = []

    def open_(explorer, fragment: str = "", *, width: int = 1200, wait: str | None = "[role=tab]", **options):
        context = browser.new_context(viewport={"width": width, "height": 860}, **options)
        context.set_default_timeout(TIMEOUT_MS)
        contexts.append(context)
        servers.append(serve(explorer))
        page = context.new_page()
        page.on(
            "console",
            lambda message: (
                console_errors.append(message.text) if message.type in ("error", "warning") else None
            ),
        )
        page.on("pageerror", lambda error: console_errors.append(str(error)))
        page.goto(f"http://127.0.0.1:{servers[-1].server_port}/explore/{fragment}")
        if wait:
            page.wait_for_selector(wait)
        return page

    open_.console_errors = console_errors
    yield open_
    for context in contexts:
        context.close()
    for server in servers:
        server.shutdown()
        server.server_close()
    assert not console_errors, console_errors


def wait_until(check, seconds: float = TIMEOUT_MS / 1000):
    """Wait until a check holds."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.05)


def wait_until_js(page, expression: str) -> None:
    """Wait until a JavaScript expression holds in the page.

    (Playwright's own way evaluates strings in the page, which its security policy forbids.)
    """
    wait_until(lambda: page.evaluate(expression))


def params_of(explorer, question):
    """The parameters of all questions of one kind that the page has asked."""
    return [params for name, params in list(explorer.questions) if name == question]
