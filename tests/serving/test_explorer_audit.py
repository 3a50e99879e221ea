"""The audit runs in the background, and taking the mask away changes what it should."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn.functional as F

import keepleft as kl
from keepleft.auditing.progress import AuditProgress
from keepleft.auditing.report import KINDS
from keepleft.serving.explorer import audit
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.unmasked import _verdict, drop_causal
from serving.tiny_explorers import (
    SOURCE,
    TEXT,
    ask,
    bits,
    example_texts,
    f32,
    make_explorer,
    make_model,
    tokenizer,
    u8,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def audit_one_check(monkeypatch, **options):
    """One of the seven checks does for a test."""
    real = audit.audit
    monkeypatch.setattr(
        audit, "audit", lambda model, **kwargs: real(model, checks=["future"], **kwargs, **options)
    )


def finish(explorer, budget="quick"):
    explorer.audit.runs[budget].thread.join(60)
    return ask(explorer, "audit", budget=budget)


def test_a_clean_model_is_found_clean_and_the_model_stays_free(monkeypatch):
    audit_one_check(monkeypatch)
    explorer = make_explorer("decoder")
    assert ask(explorer, "audit")["state"] == "none"
    first = ask(explorer, "audit", action="start")
    assert first["state"] in ("running", "done")
    assert ask(explorer, "next_token", text=TEXT, tokens=[])["prompt"]  # nobody waits
    answer = finish(explorer)
    assert answer["state"] == "done"
    assert answer["report"]["ok"]
    assert answer["report"]["claim"] == "causal"
    assert "measured" not in answer["report"]
    assert answer["report"]["not_tried"]
    assert answer["report"]["not_tried_summary"].endswith("(budget full tries them)")
    rows, columns = answer["rows"], answer["columns"]
    influence = f32(answer["influence_f32"]).reshape(rows, columns)
    claim = bits(answer["claim_bits"], rows, columns)
    assert (claim == kl.mask_table(kl.causal, rows).numpy()).all()
    assert (influence[~claim] == 0).all()
    assert (influence.diagonal() > 0).all()
    assert ask(explorer, "audit", wait=True)["seconds"] == answer["seconds"]
    assert ask(explorer, "audit", action="start")["seconds"] == answer["seconds"]  # it is not made again


def test_progress_says_what_is_done_and_what_is_left(monkeypatch):
    audit_one_check(monkeypatch)
    explorer = make_explorer("decoder")
    ask(explorer, "audit", action="start", budget="standard")
    progress = finish(explorer, "standard")["progress"]
    assert progress["fraction"] == 1.0
    assert progress["calls"] > 100
    status = {check["name"]: check["status"] for check in progress["checks"]}
    assert status == {name: "clean" if name == "future" else "waiting" for name in KINDS}
    (future,) = [check for check in progress["checks"] if check["name"] == "future"]
    assert future["num_paths"] > 10


def test_a_leak_is_found_and_told_before_the_end(monkeypatch):
    release, reached = threading.Event(), threading.Event()
    real = audit.audit

    def held_at_the_end(model, on_progress, **kwargs):
        def hold(progress):
            on_progress(progress)
            if progress.kind == "outcome":
                reached.set()
                release.wait(30)

        return real(model, checks=["future"], on_progress=hold, **kwargs)

    monkeypatch.setattr(audit, "audit", held_at_the_end)
    model = make_model("decoder")
    model.decoder.masks = (kl.full,)  # its design still says causal
    explorer = Explorer(model, tokenizer())
    ask(explorer, "audit", action="start")
    assert reached.wait(60)
    answer = ask(explorer, "audit")
    assert answer["state"] == "running"
    assert 0 < answer["progress"]["fraction"] < 1
    assert answer["progress"]["checks"][0]["status"] == "leak"
    assert answer["progress"]["findings"][0]["kind"] == "future"
    release.set()
    answer = finish(explorer)
    assert not answer["report"]["ok"]
    assert answer["report"]["findings"][0]["kind"] == "future"
    influence = f32(answer["influence_f32"])
    claim = bits(answer["claim_bits"], answer["rows"], answer["columns"])
    assert (influence.reshape(claim.shape)[~claim] > 0).any()


def wait_in_steps(monkeypatch, model_ends=None):
    """An audit that calls back until it is stopped, or `model_ends` is set. Returns the models audited."""
    audited = []

    def endless(model, on_progress, **kwargs):
        audited.append(model)
        while model_ends is None or not model_ends.wait(0.01):
            on_progress(AuditProgress("future", check="future", number=1, num_checks=7))
            time.sleep(0.01)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(audit, "audit", endless)
    return audited


def test_one_audit_at_a_time_and_a_broken_one_is_told(monkeypatch):
    release = threading.Event()
    audited = wait_in_steps(monkeypatch, release)
    explorer = make_explorer("encoder")
    for _ in range(3):
        assert ask(explorer, "audit", action="start")["state"] == "running"
    other = ask(explorer, "audit", action="start", budget="full")
    assert (other["state"], other["running_budget"]) == ("waiting", "quick")
    assert ask(explorer, "audit", budget="full")["state"] == "none"
    release.set()
    with pytest.raises(ValueError, match="the audit broke off: RuntimeError: no more memory"):
        finish(explorer)
    assert len(audited) == 1
    assert audited[0] is not explorer.model
    release.clear()
    assert ask(explorer, "audit", action="start")["state"] == "running"  # again, since it was asked for
    release.set()
    explorer.audit.runs["quick"].thread.join(30)


def test_an_audit_ends_when_the_last_page_that_watches_it_stops_it(monkeypatch):
    wait_in_steps(monkeypatch)
    explorer = make_explorer("encoder")
    ask(explorer, "audit", action="start", client="first")
    ask(explorer, "audit", action="start", client="second")
    assert ask(explorer, "audit", action="stop", client="first")["state"] == "running"
    assert ask(explorer, "audit", action="stop", client="stranger")["state"] == "running"
    assert ask(explorer, "audit", action="stop", client="second")["state"] in ("stopping", "stopped")
    assert finish(explorer)["state"] == "stopped"
    assert explorer.audit.running is None


def test_an_audit_ends_when_nobody_asks_about_it_any_more(monkeypatch):
    wait_in_steps(monkeypatch)
    explorer = make_explorer("encoder")
    run = explorer.audit.start("full", patience=0.3)
    for _ in range(5):
        time.sleep(0.1)
        assert ask(explorer, "audit", budget="full")["state"] == "running"
    run.thread.join(30)
    assert run.state == "stopped"


def test_an_audit_that_takes_too_long_says_what_to_do(monkeypatch):
    monkeypatch.setattr(audit, "MAX_AUDIT_SECONDS", 0.1)
    wait_in_steps(monkeypatch)
    explorer = make_explorer("encoder")
    ask(explorer, "audit", action="start", budget="full")
    with pytest.raises(ValueError, match="run `keepleft audit --budget full` by itself"):
        finish(explorer, "full")


def test_only_so_many_pages_are_remembered(monkeypatch):
    monkeypatch.setattr(audit, "MAX_CLIENTS", 3)
    wait_in_steps(monkeypatch)
    explorer = make_explorer("encoder")
    ask(explorer, "audit", action="start", client="0")
    for n in range(10):
        ask(explorer, "audit", client=str(n))
    run = explorer.audit.runs["quick"]
    assert [name.strip() for name in run.clients] == ["7", "8", "9"]
    run.stopped.set()
    run.thread.join(30)


def test_what_cannot_be_copied_is_not_audited(monkeypatch):
    monkeypatch.setattr(audit, "MAX_PARAMETERS", 1000)
    explorer = make_explorer("decoder")
    with pytest.raises(ValueError, match="run `keepleft audit` by itself"):
        ask(explorer, "audit", action="start")
    assert "leaks" not in ask(explorer, "model_info")["views"]
    packed = Explorer(kl.prepack(make_model("decoder"), "int8"), tokenizer())
    assert "leaks" not in ask(packed, "model_info")["views"]
    assert ask(packed, "attention", text=TEXT)["attentions"]


@pytest.mark.parametrize(
    ("mask", "left"),
    [
        (kl.causal, kl.full),
        (kl.causal & kl.window(3), kl.window(3)),
        (kl.causal | kl.prefix(2), kl.full),
        (kl.causal & kl.window(3) & kl.block(4), kl.window(3) & kl.block(4)),
        (kl.window(3) & kl.block(2), kl.full),
    ],
)
def test_what_is_left_of_a_mask(mask, left):
    assert drop_causal(mask) == left


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_losses_with_the_mask_and_without(family):
    explorer = make_explorer(family)
    answer = ask(explorer, "unmasked", **example_texts(family))
    is_encoder_decoder = explorer.generator.is_encoder_decoder
    ids = [token["id"] for token in answer["tokens"]]
    assert ids == [1, *tokenizer().encode(TEXT).ids, *([2] if is_encoder_decoder else [])]
    unmasked_model = kl.build(explorer.model.design.but(decoder=kl.StackDesign(2, (kl.full,))))
    unmasked_model.load_state_dict(explorer.model.state_dict())
    if is_encoder_decoder:
        # the weights of its relative bias were made for looking left
        unmasked_model.decoder.nearness.bidirectional = False
    source = [torch.tensor([tokenizer().encode(SOURCE).ids])] if is_encoder_decoder else []
    for model, name, map_name in (
        (explorer.model, "masked_loss_f32", "masked_u8"),
        (unmasked_model.eval(), "unmasked_loss_f32", "unmasked_u8"),
    ):
        with torch.no_grad(), kl.watch(model, "decoder.*.self") as maps:
            scores = model(*source, torch.tensor([ids[:-1]]))[0]
        expected = F.cross_entropy(scores, torch.tensor(ids[1:]), reduction="none")
        assert f32(answer[name]) == pytest.approx(expected.numpy(), abs=1e-4)
        mean = torch.stack([map_[0].mean(0) for map_ in maps.values()]).mean(0)
        size = (answer["maps"]["rows"], answer["maps"]["columns"])
        assert mean.shape == size
        assert abs(u8(answer["maps"][map_name], *size) - mean.sqrt().mul(255).round().numpy()).max() <= 1
    assert "nats with the mask" in answer["note"]
    peeking = ask(explorer, "next_token", **example_texts(family), tokens=[70, 71], unmasked=True)
    row = torch.tensor([[1, 70, 71] if is_encoder_decoder else [*tokenizer().encode(TEXT).ids, 70, 71]])
    with torch.no_grad():
        torch.testing.assert_close(
            torch.tensor(f32(peeking["logits_f32"])),
            unmasked_model(*source, row)[0, -1],
            atol=1e-4,
            rtol=1e-4,
        )


@pytest.mark.parametrize(
    ("masked", "unmasked", "message"),
    [(3.0, 1.0, "gives the answer away"), (3.0, 6.0, "only misleads it"), (3.0, 2.9, "much the same")],
)
def test_the_difference_is_told_in_a_sentence(masked, unmasked, message):
    verdict = _verdict(masked, unmasked)
    assert verdict.startswith(
        f"A token costs {masked:.2f} nats with the mask and {unmasked:.2f} without it: "
    )
    assert message in verdict


def test_a_pair_without_a_text_is_asked_for_what_it_wrote_itself():
    explorer = make_explorer("encoder-decoder")
    answer = ask(explorer, "unmasked", text="", source=SOURCE)
    token_ids = [
        token["id"] for token in ask(explorer, "attention", text="", source=SOURCE)["tokens"]["text"]
    ]
    assert [token["id"] for token in answer["tokens"]][: len(token_ids)] == token_ids


def test_a_single_token_cannot_be_foreseen():
    model = make_model("decoder")
    model.notes = {}
    with pytest.raises(ValueError, match="a single token, and there is nothing to foresee"):
        ask(Explorer(model, tokenizer()), "unmasked", text="the")
