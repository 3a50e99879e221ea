"""What a token says is shown, and never run."""

from __future__ import annotations

import pytest

from serving.fake_answers import EVIL
from serving.fake_explorer import FakeExplorer

pytestmark = pytest.mark.slow


def test_tokens_are_text_and_nothing_else(visit):
    evil = " ".join(EVIL)
    explorer = FakeExplorer("decoder", {"text": evil})
    page = visit(explorer)
    page.locator(".token").nth(1).hover()
    assert EVIL[0] in page.locator(".strip").inner_text()
    page.keyboard.press("2")
    page.wait_for_selector(".bars li")
    page.get_by_label("Beam search").check()
    page.wait_for_selector(".tree .node")
    page.goto(page.url.partition("#")[0] + "#view=masks&mask=" + EVIL[0])
    page.wait_for_selector("text=is not a mask")
    visit.troubles.clear()
    page.goto(page.url.partition("#")[0] + "#view=leaks")
    page.wait_for_selector(".losses li")
    assert page.evaluate("window.broken") is None
    assert page.locator("img, script:not([src]), #keepleft svg[onload]").count() == 0


def test_evil_tokens_can_be_chosen(visit):
    class Evil(FakeExplorer):
        def next(self, **given):
            answer = super().next(**given)
            return {**answer, "written": [{"id": 5, "text": text, "special": False} for text in EVIL]}

        def vocabulary(self):
            return {"words": [EVIL[n % 3] for n in range(5_000)]}

    page = visit(Evil("decoder"), "#view=decoding", wait=".bars li")
    assert EVIL[1] in page.locator(".written").inner_text()
    assert EVIL[0] in page.locator(".bars").inner_text()
    assert page.evaluate("window.broken") is None
