"""The text of a token is shown, and never executed."""

from __future__ import annotations

import pytest

from serving.fake_answers import HTML_INJECTIONS
from serving.fake_explorer import FakeExplorer

pytestmark = pytest.mark.slow


def test_tokens_are_text_and_nothing_else(visit):
    text = " ".join(HTML_INJECTIONS)
    explorer = FakeExplorer("decoder", {"text": text})
    page = visit(explorer)
    page.locator(".token").nth(1).hover()
    assert HTML_INJECTIONS[0] in page.locator(".token-strip").inner_text()
    page.keyboard.press("2")
    page.wait_for_selector(".bars li")
    page.get_by_label("Beam search").check()
    page.wait_for_selector(".tree .node")
    page.goto(page.url.partition("#")[0] + "#view=masks&mask=" + HTML_INJECTIONS[0])
    page.wait_for_selector("text=is not a mask")
    visit.console_errors.clear()
    page.goto(page.url.partition("#")[0] + "#view=leaks")
    page.wait_for_selector(".losses li")
    assert page.evaluate("window.broken") is None
    assert page.locator("img, script:not([src]), #keepleft svg[onload]").count() == 0


def test_tokens_that_inject_html_can_be_chosen(visit):
    class InjectingExplorer(FakeExplorer):
        def next_token(self, **params):
            answer = super().next_token(**params)
            return {
                **answer,
                "new_tokens": [{"id": 5, "text": text, "special": False} for text in HTML_INJECTIONS],
            }

        def vocabulary(self):
            return {"tokens": [HTML_INJECTIONS[n % 3] for n in range(5_000)]}

    page = visit(InjectingExplorer("decoder"), "#view=decoding", wait=".bars li")
    assert HTML_INJECTIONS[1] in page.locator(".generated-text").inner_text()
    assert HTML_INJECTIONS[0] in page.locator(".bars").inner_text()
    assert page.evaluate("window.broken") is None
