"""ONNX graphs give the model's logits in onnxruntime, at every batch size and length, and stay causal."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnxruntime
import pytest
import torch

import keepleft as kl
from keepleft.runs import parity
from keepleft.weights import to_onnx

pytestmark = pytest.mark.usefixtures("one_thread")
DESIGNS = {
    "gpt2": kl.presets.gpt2,
    "window": kl.presets.gpt3_small,
    "llama": kl.presets.llama3_1,
    "t5": kl.presets.t5_v1_1,
    "bart": kl.presets.bart,
    "two vocabularies": kl.presets.marian.but(source_vocab=31),
    "unequal": kl.presets.marian,
    "masked": kl.presets.bert_masked,
    "classes": kl.presets.bert.but(head=kl.ClassificationHead(5)),
    "last": kl.presets.llama.but(head=kl.ClassificationHead(5, "last")),
    "prefix": kl.presets.gpt2.but(decoder=kl.StackDesign(1, (kl.causal | kl.prefix(3),))),
}


def ours(name: str):
    """A small one with random norms and biases, of as many layers as it has masks."""
    design = kl.presets.small(DESIGNS[name])
    stacks = {
        side: kl.StackDesign(len(stack.mask), stack.mask, stack.final_norm)
        for side in ("encoder", "decoder")
        if (stack := getattr(design, side))
    }
    if name == "unequal":
        stacks["encoder"] = replace(stacks["encoder"], heads=6, feedforward=kl.FeedForward(31, "silu"))
    model = kl.build(design.but(vocab=53, dim=24, heads=2, **stacks)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    return model


def session(model, path):
    to_onnx.write(model, path)
    onnx.checker.check_model(str(path))
    inference = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(**inputs):
        arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
        return torch.from_numpy(inference.run(None, arrays)[0])

    return run


@pytest.mark.parametrize("name", DESIGNS)
def test_every_kind_passes_its_own_check(tmp_path, name):
    model = ours(name)
    to_onnx.write(model, tmp_path / "x.onnx")
    checks = list(parity.onnx(model, tmp_path / "x.onnx"))
    assert all(check.ok is not False for check in checks), checks
    causal = [check.ok for check in checks if "before a changed token" in check.what]
    if model.design.decoder is None or not to_onnx.per_token(model):
        assert causal == []
    else:
        assert causal == [None if name == "prefix" else True]


def test_packed_texts_stay_apart_and_padding_on_either_side_is_unseen(tmp_path):
    model = ours("llama")
    run = session(model, tmp_path / "x.onnx")
    tokens = torch.randint(53, (2, 9))
    segments = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 2, 2, 3, 0, 0]])
    with torch.no_grad():
        want = model(tokens, segments=segments)
    real = segments != 0
    torch.testing.assert_close(run(tokens=tokens, segments=segments)[real], want[real], atol=1e-5, rtol=1e-5)


def test_a_graph_that_peeks_is_found(tmp_path):
    model = ours("gpt2")
    model.decoder.masks = (kl.full,)
    to_onnx.write(model, tmp_path / "x.onnx")
    assert [check.ok for check in parity.onnx(model, tmp_path / "x.onnx")] == [True, True, False]


def test_another_model_is_found(tmp_path):
    model = ours("llama")
    to_onnx.write(model, tmp_path / "x.onnx")
    with torch.no_grad():
        model.decoder.layers[0].feed.down.weight.mul_(1.01)
    assert not next(iter(parity.onnx(model, tmp_path / "x.onnx"))).ok


def test_writing_leaves_the_model_as_it_was(tmp_path):
    model = ours("t5").train()
    to_onnx.write(model, tmp_path / "x.onnx")
    assert model.training
    assert model.decoder.training
    assert model.encoder.backend is None
    assert model.decoder.backend is None


def test_a_file_beyond_2_gib_is_refused_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(to_onnx, "MAX_ONNX_BYTES", 1000)
    with pytest.raises(ValueError, match="2 GiB"):
        to_onnx.write(ours("gpt2"), tmp_path / "x.onnx")
    assert not list(tmp_path.iterdir())
