"""The audit runs beside the questions, and taking the mask away changes what it should."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

import keepleft as kl
from keepleft.serving.explorer import audit
from keepleft.serving.explorer.explorer import Explorer
from keepleft.serving.explorer.unmasked import _verdict, drop_causal
from serving.tiny_explorers import SOURCE, TEXT, ask, bits, explorer, f32, model, texts, u8, words

pytestmark = pytest.mark.usefixtures("one_thread")


def quick(monkeypatch, **more):
    """One of the seven checks does for a test."""
    real = audit.audit
    monkeypatch.setattr(audit, "audit", lambda net, **said: real(net, checks=["future"], **said, **more))


def test_a_clean_model_is_found_clean_and_the_model_stays_free(monkeypatch):
    quick(monkeypatch)
    asked = explorer("decoder")
    assert asked.audit.state == "none"
    first = ask(asked, "leaks", wait=False)
    assert first["state"] in ("running", "done")
    assert ask(asked, "next", text=TEXT, tokens=[])["prompt"]  # nobody waits
    asked.audit.wait(60)
    found = ask(asked, "leaks", wait=False)
    assert found["state"] == "done"
    assert found["report"]["ok"]
    assert found["report"]["claim"] == "causal"
    assert "measured" not in found["report"]
    rows, columns = found["rows"], found["columns"]
    moved = f32(found["influence_f32"]).reshape(rows, columns)
    claim = bits(found["claim_bits"], rows, columns)
    assert (claim == kl.mask_table(kl.causal, rows).numpy()).all()
    assert (moved[~claim] == 0).all()
    assert (moved.diagonal() > 0).all()
    assert ask(asked, "leaks", wait=True)["seconds"] == found["seconds"]


def test_a_leak_is_found(monkeypatch):
    quick(monkeypatch)
    net = model("decoder")
    net.decoder.masks = (kl.full,)  # its design still says causal
    asked = Explorer(net, words())
    found = ask(asked, "leaks", wait=True)
    asked.audit.wait(60)
    found = ask(asked, "leaks", wait=False)
    assert not found["report"]["ok"]
    assert found["report"]["findings"][0]["kind"] == "future"
    moved, claim = f32(found["influence_f32"]), bits(found["claim_bits"], found["rows"], found["columns"])
    assert (moved.reshape(claim.shape)[~claim] > 0).any()


def test_one_audit_at_a_time_and_a_broken_one_is_told(monkeypatch):
    go, begun = threading.Event(), []

    def broken(net, **said):
        begun.append(net)
        go.wait(30)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(audit, "audit", broken)
    asked = explorer("encoder")
    for _ in range(3):
        assert ask(asked, "leaks", wait=False)["state"] == "running"
    go.set()
    asked.audit.wait(30)
    assert len(begun) == 1
    assert begun[0] is not asked.model
    with pytest.raises(ValueError, match="the audit broke off: RuntimeError: no more memory"):
        ask(asked, "leaks", wait=False)


def test_what_cannot_be_copied_is_not_audited(monkeypatch):
    monkeypatch.setattr(audit, "MAX_PARAMETERS", 1000)
    asked = explorer("decoder")
    with pytest.raises(ValueError, match="run `keepleft audit` by itself"):
        ask(asked, "leaks", wait=False)
    assert "leaks" not in ask(asked, "about")["views"]
    packed = Explorer(kl.prepack(model("decoder"), "int8"), words())
    assert "leaks" not in ask(packed, "about")["views"]
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
    asked = explorer(family)
    found = ask(asked, "unmasked", **texts(family))
    pair = asked.generator.is_encoder_decoder
    ids = [token["id"] for token in found["tokens"]]
    assert ids == [1, *words().encode(TEXT).ids, *([2] if pair else [])]
    bare = kl.build(asked.model.design.but(decoder=kl.StackDesign(2, (kl.full,))))
    bare.load_state_dict(asked.model.state_dict())
    if pair:
        bare.decoder.nearness.bidirectional = False  # the weights of its biases were made for looking left
    source = [torch.tensor([words().encode(SOURCE).ids])] if pair else []
    for net, name, picture in (
        (asked.model, "with_f32", "before_u8"),
        (bare.eval(), "without_f32", "after_u8"),
    ):
        with torch.no_grad(), kl.watch(net, "decoder.*.self") as maps:
            scores = net(*source, torch.tensor([ids[:-1]]))[0]
        want = F.cross_entropy(scores, torch.tensor(ids[1:]), reduction="none")
        assert f32(found[name]) == pytest.approx(want.numpy(), abs=1e-4)
        mean = torch.stack([map_[0].mean(0) for map_ in maps.values()]).mean(0)
        size = (found["reads"]["rows"], found["reads"]["columns"])
        assert mean.shape == size
        assert abs(u8(found["reads"][picture], *size) - mean.sqrt().mul(255).round().numpy()).max() <= 1
    assert "nats with the mask" in found["words"]
    peeking = ask(asked, "next", **texts(family), tokens=[70, 71], unmasked=True)
    row = torch.tensor([[1, 70, 71] if pair else [*words().encode(TEXT).ids, 70, 71]])
    with torch.no_grad():
        torch.testing.assert_close(
            torch.tensor(f32(peeking["scores_f32"])), bare(*source, row)[0, -1], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    ("masked", "bare", "said"),
    [(3.0, 1.0, "gives the answer away"), (3.0, 6.0, "only misleads it"), (3.0, 2.9, "much the same")],
)
def test_the_difference_is_told_in_a_sentence(masked, bare, said):
    told = _verdict(masked, bare)
    assert told.startswith(f"A token costs {masked:.2f} nats with the mask and {bare:.2f} without it: ")
    assert said in told


def test_a_pair_without_a_text_is_asked_for_what_it_wrote_itself():
    asked = explorer("encoder-decoder")
    found = ask(asked, "unmasked", text="", source=SOURCE)
    shown = [token["id"] for token in ask(asked, "attention", text="", source=SOURCE)["tokens"]["text"]]
    assert [token["id"] for token in found["tokens"]][: len(shown)] == shown


def test_a_single_token_cannot_be_foreseen():
    net = model("decoder")
    net.notes = {}
    with pytest.raises(ValueError, match="a single token, and there is nothing to foresee"):
        ask(Explorer(net, words()), "unmasked", text="the")
