"""The page with a real explorer: what it asks is answered, and it can draw what is answered."""

from __future__ import annotations

import time

import pytest

from keepleft.serving.explorer.params import error_payload
from serving.browser import wait_until, wait_until_js
from serving.fake_explorer import RefusedError
from serving.tiny_explorers import example_texts, make_explorer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class RecordingExplorer:
    """A real explorer that records the questions it refuses."""

    def __init__(self, family: str, example=None) -> None:
        self.explorer = make_explorer(family, name=family, example=example or example_texts(family))
        self.refused: list[str] = []

    def ask(self, question, params):
        try:
            return self.explorer.ask(question, params)
        except ValueError as error:
            self.refused.append(f"{question} {params}: {error}")
            raise RefusedError(str(error), error_payload(error)["error"].get("code")) from error


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_every_view_of_a_real_model_draws(visit, family):
    explorer = RecordingExplorer(family)
    page = visit(explorer, wait=".panel canvas")
    wait_until(lambda: page.locator(".panel .busy").count() == 0)
    page.get_by_label("Head", exact=True).select_option("rollout")
    page.get_by_label("Arcs").check()
    page.locator(".token").nth(1).hover()
    wait_until(lambda: "attends" in page.locator(".readout").inner_text())
    if family != "encoder":
        page.get_by_role("tab", name="Decoding").click()
        page.locator(".bars li").nth(2).click()
        page.wait_for_selector(".generated-text .token")
        page.get_by_role("button", name="Continue").click()
        wait_until(lambda: page.locator(".generated-text .token").count() > 1)
        page.get_by_label("Beam search").check()
        page.wait_for_selector(".tree .node")
    page.get_by_role("tab", name="Masks").click()
    for chip in page.locator(".chip").all():
        chip.click()
        page.wait_for_selector(f"text=parsed as {chip.inner_text()}")
    page.get_by_role("tab", name="Leaks").click()
    page.get_by_role("button", name="Audit this model").click()
    page.wait_for_selector(".verdict", timeout=90_000)
    assert page.locator(".check.clean").count() >= 3
    if family != "encoder":
        page.get_by_role("switch", name="Causal mask").click()
        page.wait_for_selector("canvas[aria-label^='Attention without the mask']")
    assert not explorer.refused


@pytest.mark.parametrize("fragment", ["#head=2", "#head=2&plot=arcs"])
def test_two_thousand_tokens_of_a_real_model_are_soon_there(visit, fragment, record_property):
    text = " ".join(["the sea is calm, and the ship sails on"] * 250)
    explorer = RecordingExplorer("decoder", {"text": text})
    start = time.monotonic()
    page = visit(explorer, fragment)
    wait_until_js(page, "!document.querySelector('.panel .busy') && document.querySelector('.panel .legend')")
    page.locator(".token").nth(900).hover()
    wait_until(lambda: "attends" in page.locator(".readout").inner_text())
    record_property("seconds until it answers", round(time.monotonic() - start, 2))
    assert page.locator(".token").count() > 2_000
    assert not explorer.refused
