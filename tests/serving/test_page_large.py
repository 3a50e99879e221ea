"""Two thousand tokens: the map is fetched as it comes into view, and the tab never freezes."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from serving.browser import params_of, wait_until, wait_until_js
from serving.fake_explorer import FakeExplorer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fragment", ["#head=2", "#head=2&plot=arcs"])
def test_two_thousand_tokens_are_looked_at_piece_by_piece(visit, fragment, record_property):
    explorer = FakeExplorer("decoder", {"text": " ".join(f"w{n % 89}" for n in range(2_000))})
    start = time.monotonic()
    page = visit(explorer, fragment)
    wait_until_js(page, "!document.querySelector('.panel .busy') && document.querySelector('.panel .legend')")
    record_property("seconds until it is drawn", round(time.monotonic() - start, 2))
    assert page.locator(".token").count() == 2_001
    assert page.evaluate("document.querySelectorAll('*').length") < 3_000
    with longest_frame(page) as longest_ms:
        page.locator(".panel canvas").first.scroll_into_view_if_needed()
        page.evaluate("document.querySelector('.panel canvas').scrollIntoView()")
        time.sleep(0.5)  # a map does not take the wheel from a page that is just scrolling
        box = page.locator(".panel canvas").first.bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 300)
        for _ in range(12):
            page.mouse.wheel(0, -120)
        wait_until(lambda: params_of(explorer, "tile"))
        page.mouse.down()
        page.mouse.move(box["x"] + 100, box["y"] + 150, steps=5)
        page.mouse.up()
        page.locator(".panel canvas").first.focus()
        for key in ("ArrowDown", "ArrowRight", "+", "-", "0"):
            page.keyboard.press(key)
    record_property("longest frame in milliseconds", longest_ms())
    tiles = {(params["row"], params["column"]) for params in params_of(explorer, "tile")}
    assert len(tiles) == len(params_of(explorer, "tile")) <= 64
    assert all(row % 256 == 0 and column % 256 == 0 for row, column in tiles)
    page.locator(".token").nth(1000).hover()
    wait_until(
        lambda: {params["incoming"] for params in params_of(explorer, "token_attention")} == {True, False}
    )


def test_a_long_text_that_is_typed_is_read_though_it_does_not_fit_into_the_address(visit):
    explorer = FakeExplorer("decoder")
    page = visit(explorer, wait=".token")
    text = "word " * 600
    page.locator("textarea").fill(text)
    page.get_by_role("button", name="Show attention").click()
    wait_until(lambda: params_of(explorer, "attention")[-1] == {"text": text})
    page.get_by_role("tab", name="Masks").click()
    page.go_back()
    assert page.locator("textarea").input_value() == text
    assert len(page.url) < 200


@contextmanager
def longest_frame(page):
    """The longest time between two frames, in milliseconds."""
    page.evaluate("""() => { let last = performance.now(); window.longest = 0;
        const look = (now) => {
            window.longest = Math.max(window.longest, now - last); last = now; requestAnimationFrame(look); };
        requestAnimationFrame(look); }""")
    yield lambda: round(page.evaluate("window.longest"))
