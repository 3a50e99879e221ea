"""One page, three transports: a server with or without an API key, a notebook, a file; and its URL state."""

from __future__ import annotations

import json

import pytest

import keepleft as kl
from serving.browser import params_of, wait_until, wait_until_js
from serving.fake_explorer import FakeExplorer
from serving.fake_explorer_server import PAGE
from serving.test_http_serve import served
from serving.tiny_services import decoder

pytestmark = pytest.mark.slow


def test_a_server_with_a_key_is_opened_by_a_password(browser, tmp_path):
    kl.save(*decoder()[:2], tmp_path / "model")
    with served(tmp_path / "model", "--api-key", "sesame") as (address, _, _):
        for password, fine in (("wrong", False), ("sesame", True)):
            with browser.new_context(
                http_credentials={"username": "anybody", "password": password}
            ) as context:
                page = context.new_page()
                assert page.goto(address).status == (200 if fine else 401)
                if fine:
                    page.wait_for_selector(".token")


def test_what_the_server_forgot_is_read_again(visit):
    explorer = FakeExplorer("decoder")
    page = visit(explorer, wait="dl.head-stats, .thumbnail")
    wait_until(lambda: params_of(explorer, "tile"))
    explorer.texts.clear()
    page.get_by_label("Head", exact=True).select_option("2")
    wait_until(lambda: len(params_of(explorer, "attention")) == 2)
    wait_until_js(page, "!document.querySelector('.panel .busy')")
    assert page.locator("[role=alert]").count() == 0
    visit.console_errors.clear()


def test_a_file_with_its_answers_in_it_needs_no_server(visit, tmp_path):
    explorer = FakeExplorer("decoder", {"text": "a few words"})
    texts = {"text": "a few words"}
    answers = [
        {"question": "model_info", "params": {}, "answer": explorer.ask("model_info", {})},
        {"question": "attention", "params": texts, "answer": explorer.ask("attention", texts)},
    ]
    for head in ["mean", 0, 1, 2, 3]:
        tile = {
            "key": "key-0",
            "name": "decoder.self",
            "layer": 0,
            "head": head,
            "row": 0,
            "column": 0,
            "size": 256,
        }
        answers.append({"question": "tile", "params": tile, "answer": explorer.ask("tile", tile)})
    data = json.dumps(answers).replace("<", "\\u003c")
    script, style = ((PAGE / name).read_text("utf-8") for name in ("explorer.js", "explorer.css"))
    assert "</script" not in script.lower()
    path = tmp_path / "file.html"
    path.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style><div id=keepleft></div>"
        f"<script type='application/json' id='keepleft-snapshot'>{data}</script>"
        f"<script type=module>{script}</script>",
        "utf-8",
    )
    page = visit(FakeExplorer(), wait=None)
    page.goto(path.as_uri())
    page.wait_for_selector(".panel canvas")
    # views that are not in the snapshot are not offered
    assert page.locator("[role=tab]").all_inner_texts() == ["Attention1"]
    wait_until_js(page, "document.querySelector('.panel .legend').textContent.includes('1.00')")
    page.get_by_label("Layer", exact=True).select_option("1")
    page.wait_for_selector("text=precomputed answers only")


def test_a_notebook_carries_it_too(visit):
    explorer = FakeExplorer("decoder")
    # any page of this origin that is not the explorer's
    page = visit(FakeExplorer(), "explorer.css", wait=None)
    page.expose_function("ask", explorer.ask)
    page.evaluate("""async () => {
        const { default: widget } = await import("/explore/explorer.js");
        const el = document.body.appendChild(document.createElement("div"));
        const listeners = [];
        const model = { on: (_, listener) => listeners.push(listener), off: () => listeners.splice(0),
            send: async ({ id, question, params }) => {
                const answer = await ask(question, params);
                listeners.forEach((listener) => listener({ id, answer })); } };
        window.leave = widget.render({ model, el });
    }""")
    page.wait_for_selector(".keepleft .token")
    page.locator(".token").nth(2).hover()
    page.keyboard.press("2")  # outside of the widget keys are not its own
    assert page.get_by_role("tab", name="Attention").get_attribute("aria-selected") == "true"
    assert "view" not in page.url
    page.get_by_role("tab", name="Decoding").click()
    page.wait_for_selector(".bars li")
    page.evaluate("window.leave()")
    assert page.locator(".keepleft .token").count() == 0


def test_what_is_looked_at_is_in_the_address(visit):
    page = visit(FakeExplorer("decoder"), "#view=attention&head=2&layer=1&text=a+short+text&claim=off")
    page.wait_for_selector("canvas[aria-label*='layer 1, head 2']")
    assert page.locator("textarea").input_value() == "a short text"
    assert not page.get_by_label("Claimed mask").is_checked()
    page.keyboard.press("3")
    page.wait_for_selector("canvas[aria-label^=Mask]")
    page.go_back()
    page.wait_for_selector("canvas[aria-label*='layer 1, head 2']")
