"""The page in a real browser: views draw, react to pointer and keys, and report errors in one line."""

from __future__ import annotations

import re

import pytest

from serving.browser import params_of, wait_until, wait_until_js
from serving.fake_explorer import FakeExplorer

pytestmark = pytest.mark.slow
VIEWS = {
    "attention": "canvas[aria-label*=attention]",
    "decoding": ".bars li",
    "masks": "canvas[aria-label^=Mask]",
    "leaks": "canvas[aria-label^='Attention with']",
    "training": ".chart .curve",
}


@pytest.mark.parametrize("family", ["encoder-decoder", "decoder", "encoder"])
def test_every_view_draws(visit, family):
    page = visit(FakeExplorer(family))
    names = page.locator("[role=tab]").all_inner_texts()
    assert len(names) == (4 if family == "encoder" else 5)
    for n in range(len(names)):
        page.keyboard.press(str(n + 1))
        view = page.locator("[role=tabpanel]").get_attribute("aria-labelledby").removeprefix("keepleft-tab-")
        if view == "leaks" and family == "encoder":
            page.wait_for_selector("text=Audit this model")
        else:
            page.wait_for_selector(VIEWS[view])
        assert page.locator("[role=alert]").count() == 0


def test_an_encoder_decoder_shows_its_three_attentions_side_by_side(visit):
    explorer = FakeExplorer()
    page = visit(explorer)
    for title in ("Encoder self-attention", "Masked self-attention", "Cross-attention"):
        page.wait_for_selector(f"section[aria-label='{title}'] canvas")
    wait_until(lambda: len(params_of(explorer, "tile")) == 3)
    page.get_by_label("Arcs").check()
    assert "plot=arcs" in page.url
    page.get_by_label("Attention", exact=True).select_option("decoder.cross")
    assert page.locator(".panel").count() == 1


def test_a_token_lights_up_what_it_reads_and_who_reads_it(visit):
    page = visit(FakeExplorer("decoder"), "#head=0")
    page.locator(".token").nth(5).hover()
    wait_until_js(
        page,
        "getComputedStyle(document.querySelectorAll('.token')[4]).getPropertyValue('--attends-to') > 0.5",
    )
    wait_until_js(
        page,
        "getComputedStyle(document.querySelectorAll('.token')[6]).getPropertyValue('--attended-by') > 0.5",
    )
    assert re.search(r"attends most to “.+” \(4\)", page.locator(".readout").inner_text())


def test_a_head_is_chosen_from_the_small_pictures(visit):
    explorer = FakeExplorer("decoder")
    page = visit(explorer)
    page.get_by_label(re.compile("Layer 1, head 3")).click()
    page.wait_for_selector("canvas[aria-label*='layer 1, head 3']")
    assert "layer=1" in page.url
    assert "head=3" in page.url
    page.wait_for_selector("dl.head-stats dd.alert")  # this one reads outside its claim


def test_hindi_is_not_torn_apart(visit):
    page = visit(FakeExplorer("decoder", {"text": "नमस्ते"}), wait=".token")
    texts = page.locator(".token").all_inner_texts()
    assert texts == ["<s>", "न", "म", "स्ते"]
    assert page.locator(".token-strip").get_attribute("lang") == "hi"


def test_keys_alone_are_enough(visit):
    page = visit(FakeExplorer("decoder"))
    page.get_by_role("tab", name="Attention").focus()
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab", name="Decoding").get_attribute("aria-selected") == "true"
    page.keyboard.press("End")
    assert page.get_by_role("tab", name="Training").get_attribute("aria-selected") == "true"
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("1")
    page.get_by_role("listbox", name="Tokens of Text").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator(".token.hovered").get_attribute("data-first") == "2"
    page.keyboard.press("2")
    page.get_by_role("listbox", name="Most likely tokens").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".generated-text .token")
    page.get_by_role("listbox", name="Most likely tokens").focus()
    page.keyboard.press("Backspace")
    page.wait_for_selector(".generated-text .token", state="detached")
    page.keyboard.press("d")
    assert page.locator("#keepleft").get_attribute("data-theme") == "dark"


def test_digits_in_a_text_are_digits(visit):
    page = visit(FakeExplorer("decoder"))
    page.locator("textarea").fill("")
    page.locator("textarea").type("12 3?")
    assert page.locator("textarea").input_value() == "12 3?"
    assert page.get_by_role("tab", name="Attention").get_attribute("aria-selected") == "true"


def test_sliders_narrow_the_distribution_without_asking(visit):
    explorer = FakeExplorer("decoder")
    page = visit(explorer, "#view=decoding", wait=".bars li")
    before = len(explorer.questions)
    page.get_by_label("top-k").fill("1")
    wait_until_js(page, "document.querySelectorAll('.bars li.filtered').length === 18")
    page.get_by_label("temperature").fill("0.05")
    wait_until_js(page, "document.querySelector('.bars .value').textContent === '100.0 %'")
    assert len(explorer.questions) == before


def test_a_text_is_written_token_by_token_and_taken_back(visit):
    explorer = FakeExplorer()
    page = visit(explorer, "#view=decoding", wait=".bars li")
    page.locator(".bars li").nth(1).click()
    page.wait_for_selector(".generated-text .token")
    page.wait_for_selector("canvas[aria-label^=Alignment]")
    page.get_by_role("button", name="Continue").click()
    wait_until(lambda: len(params_of(explorer, "next_token")[-1]["tokens"]) == 13)
    page.get_by_role("button", name="Start over").click()
    page.wait_for_selector(".generated-text .token", state="detached")
    assert params_of(explorer, "next_token")[0] == {
        "text": "",
        "source": explorer.example["source"],
        "tokens": [],
        "unmasked": False,
    }


def test_the_beam_grows_step_by_step(visit):
    page = visit(FakeExplorer(), "#view=decoding&decoding=beam", wait=".tree .node")
    assert page.locator(".tree .node").count() == 4
    page.get_by_label("Next step").click()
    wait_until_js(page, "document.querySelectorAll('.tree .node').length === 8")
    page.get_by_label("step", exact=True).fill("8")
    page.wait_for_selector(".finished li")
    assert page.locator(".tree .node.pruned").count() > 0


def test_a_mask_is_drawn_as_it_is_typed_and_a_wrong_one_is_told(visit):
    explorer = FakeExplorer()
    page = visit(
        explorer, "#view=masks&mask=causal", wait="canvas[aria-label='Mask causal: 16 rows, 16 columns']"
    )
    field = page.get_by_label("Mask expression")
    field.fill("causal & lookahead(2)")
    page.wait_for_selector("text=is not a mask")
    visit.console_errors.clear()  # the browser itself logs a refused question
    field.fill("~causal")
    page.wait_for_selector(".faults li")
    page.get_by_label("Left padding").fill("3")
    wait_until(lambda: params_of(explorer, "mask")[-1]["padding"] == {"left": 3, "right": 0})
    page.get_by_label("Packed sequences").fill("6, 7")
    wait_until(lambda: params_of(explorer, "mask")[-1]["packing"] == [6, 7])


def test_the_audit_is_waited_for_and_told_in_words(visit):
    page = visit(FakeExplorer("decoder"), "#view=leaks")
    page.get_by_role("button", name="Audit this model").click()
    page.wait_for_selector("text=One leak found")
    assert "put the mask back" in page.locator(".findings").inner_text()
    assert page.locator(".check").count() == 7
    assert "not applicable" in page.locator(".check", has_text="labels").inner_text()
    assert "train, a mask of ones" in page.locator("text=Not tried:").first.locator("..").inner_text()
    assert page.locator("summary").all_inner_texts() == [
        "Reproduce",
        "Tried: 2",
        "Not tried: 2",
        "Not checked: 1",
    ]
    page.get_by_role("switch", name="Causal mask").click()
    page.wait_for_selector("canvas[aria-label^='Attention without the mask']")


def test_an_audit_shows_its_checks_as_they_come_in_and_can_be_stopped(visit):
    explorer = FakeExplorer("decoder")
    explorer.num_polls_until_done = 1_000
    page = visit(explorer, "#view=leaks")
    page.get_by_role("radio", name="Full").check()
    page.get_by_role("button", name="Audit this model").click()
    page.wait_for_selector("text=pass 1 of 2")
    assert page.get_by_role("progressbar", name="Audit").get_attribute("aria-valuenow") == "47"
    assert "train, no mask, batch 2, length 13" in page.locator(".trying").inner_text()
    assert "put the mask back" in page.locator(".findings").inner_text()  # as it is found
    assert page.locator(".check.clean, .check.leak").count() == 2
    assert page.get_by_role("radio", name="Quick").is_disabled()
    page.get_by_role("tab", name="Masks").click()
    asked = len(params_of(explorer, "audit"))
    wait_until(lambda: len(params_of(explorer, "audit")) > asked + 1)  # it goes on
    page.get_by_role("tab", name="Leaks").click()
    page.get_by_role("button", name="Stop").click()
    page.wait_for_selector("text=there is no verdict")
    assert "not reached" in page.locator(".check", has_text="cache").inner_text()
    wait_until(lambda: params_of(explorer, "audit")[-1]["action"] == "stop")
    first, *_, last = params_of(explorer, "audit")
    assert (first["action"], first["budget"]) == ("start", "full")
    assert last["client"] == first["client"] != ""


def test_an_audit_waits_for_another_and_is_started_when_that_ends(visit):
    class BusyExplorer(FakeExplorer):
        def audit(self, **params):
            if len(params_of(self, "audit")) < 3:
                return {"state": "waiting", "budget": "quick", "seconds": 0.0, "running_budget": "full"}
            return super().audit(**params)

    explorer = BusyExplorer("decoder")
    page = visit(explorer, "#view=leaks")
    page.get_by_role("button", name="Audit this model").click()
    page.wait_for_selector("text=This one is next")
    page.wait_for_selector("text=One leak found")
    actions = [params["action"] for params in params_of(explorer, "audit")]
    assert actions == ["start", "start", "start", "poll", "poll"]


def test_an_audit_whose_process_has_died_is_not_started_again_by_itself(visit):
    class DyingExplorer(FakeExplorer):
        def audit(self, **params):
            if params["action"] == "poll":
                return {"state": "none", "budget": "quick", "seconds": 0.0}
            return super().audit(**params)

    explorer = DyingExplorer("decoder")
    page = visit(explorer, "#view=leaks")
    page.get_by_role("button", name="Audit this model").click()
    page.wait_for_selector("[role=alert]:has-text('The process of the audit has ended')")
    assert [params["action"] for params in params_of(explorer, "audit")] == ["start", "poll"]
    assert page.get_by_role("button", name="Audit this model").is_enabled()


def test_a_script_is_copied(visit):
    page = visit(FakeExplorer("decoder"), "#view=leaks", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Audit this model").click()
    page.locator("summary", has_text="Reproduce").click()
    page.get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "import keepleft as kl\nkl.audit(model)"


def test_a_run_that_goes_on_is_followed(visit):
    explorer = FakeExplorer()
    page = visit(explorer, "#view=training&run=stories", wait=".chart .curve")
    wait_until(lambda: len(params_of(explorer, "run")) >= 2)
    assert [params["from_line"] for params in params_of(explorer, "run")[:2]] == [0, 10]
    assert "running" in page.locator("[role=status]").first.inner_text()


def test_an_error_is_one_line_where_it_belongs(visit):
    page = visit(FakeExplorer("decoder"))
    page.locator("textarea").fill(" ")
    page.get_by_role("button", name="Show attention").click()
    assert "the text is empty" in page.locator("[role=alert]").inner_text()
    visit.console_errors.clear()


@pytest.mark.parametrize("view", VIEWS)
def test_a_narrow_window_is_wide_enough(visit, view):
    page = visit(FakeExplorer(), f"#view={view}", width=360, wait=VIEWS[view])
    assert page.evaluate("document.scrollingElement.scrollWidth") <= 360


def test_a_translator_says_what_it_thinks_of_the_language_of_the_text(visit):
    explorer = FakeExplorer(languages={"de": "German", "fr": "French"})
    explorer.warnings = ["'Ich bin da' looks like German"]
    page = visit(explorer)
    page.wait_for_selector("[role=status].note:text-is(\"'Ich bin da' looks like German\")")


def test_a_translator_translates_as_one_types_and_opens_a_sentence_in_the_other_views(visit):
    explorer = FakeExplorer(languages={"de": "German", "fr": "French"})
    page = visit(explorer)
    assert page.locator("[role=tab]").first.inner_text().startswith("Translate")
    page.get_by_label("Text").fill("the sea")
    page.wait_for_selector("output:text-is('THE SEA')")
    page.get_by_role("button", name="French").click()
    wait_until(lambda: params_of(explorer, "translate")[-1] == {"text": "the sea", "to": "fr"})
    assert page.locator(".note").count() == 0
    page.get_by_role("button", name="Attention").click()
    wait_until(lambda: "<2fr> the sea" in [params["source"] for params in params_of(explorer, "attention")])
