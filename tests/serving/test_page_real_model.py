"""The page with the real explorer behind it: what it asks is answered, and what is answered it can draw."""

from __future__ import annotations

import time

import pytest

from keepleft.serving.explorer.params import error_payload
from serving.browser import settled, until
from serving.fake_explorer import Refusal
from serving.tiny_explorers import example_texts, make_explorer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


class Behind:
    """An explorer where a stand-in would be."""

    def __init__(self, family: str, example=None) -> None:
        self.explorer = make_explorer(family, name=family, example=example or example_texts(family))
        self.refused: list[str] = []

    def ask(self, question, given):
        try:
            return self.explorer.ask(question, given)
        except ValueError as error:
            self.refused.append(f"{question} {given}: {error}")
            raise Refusal(str(error), error_payload(error)["error"].get("code")) from error


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder-decoder"])
def test_every_view_of_a_real_model_draws(visit, family):
    behind = Behind(family)
    page = visit(behind, wait=".panel canvas")
    settled(lambda: page.locator(".panel .busy").count() == 0)
    page.get_by_label("Head", exact=True).select_option("rollout")
    page.get_by_label("Arcs").check()
    page.locator(".token").nth(1).hover()
    settled(lambda: "reads" in page.locator(".readout").inner_text())
    if family != "encoder":
        page.get_by_role("tab", name="Decoding").click()
        page.locator(".bars li").nth(2).click()
        page.wait_for_selector(".written .token")
        page.get_by_role("button", name="Write on").click()
        settled(lambda: page.locator(".written .token").count() > 1)
        page.get_by_label("Beam search").check()
        page.wait_for_selector(".tree .node")
    page.get_by_role("tab", name="Masks").click()
    for chip in page.locator(".chip").all():
        chip.click()
        page.wait_for_selector(f"text=read as {chip.inner_text()}")
    page.get_by_role("tab", name="Leaks").click()
    page.get_by_role("button", name="Audit this model").click()
    page.wait_for_selector(".verdict", timeout=90_000)
    if family != "encoder":
        page.get_by_role("switch", name="Causal mask").click()
        page.wait_for_selector("canvas[aria-label^='Reading without the mask']")
    assert not behind.refused


@pytest.mark.parametrize("fragment", ["#head=2", "#head=2&as=arcs"])
def test_two_thousand_tokens_of_a_real_model_are_soon_there(visit, fragment, record_property):
    text = " ".join(["the sea is calm, and the ship sails on"] * 250)
    behind = Behind("decoder", {"text": text})
    began = time.monotonic()
    page = visit(behind, fragment)
    until(page, "!document.querySelector('.panel .busy') && document.querySelector('.panel .legend')")
    page.locator(".token").nth(900).hover()
    settled(lambda: "reads" in page.locator(".readout").inner_text())
    record_property("seconds until it answers", round(time.monotonic() - began, 2))
    assert page.locator(".token").count() > 2_000
    assert not behind.refused
