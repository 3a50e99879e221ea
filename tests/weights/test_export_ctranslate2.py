"""CTranslate2 generates and scores as the model does, where it supports the design; others are refused."""

from __future__ import annotations

import json

import ctranslate2
import pytest
import torch
from tokenizers import Tokenizer, models

import keepleft as kl
import peers
from keepleft.runs.parity_ctranslate2 import compare, compare_generation
from keepleft.weights import to_ctranslate2

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = {**peers.DECODERS, **peers.ENCODER_DECODERS}
REFUSED = {"gpt_neo": "window", "mistral": "window"}


def ours(name: str, tmp_path):
    return kl.load(peers.save(ALL[name](), tmp_path / "hf"))[0]


def assert_ok(checks) -> None:
    checks = list(checks)
    assert len(checks) == 2
    assert all(check.ok for check in checks), checks


@pytest.mark.parametrize("name", sorted(ALL.keys() - REFUSED.keys()))
def test_every_family_scores_and_writes_the_same(tmp_path, name):
    model = ours(name, tmp_path)
    to_ctranslate2.write(model, None, tmp_path / "out")
    assert_ok(compare(model, None, tmp_path / "out", None, [5, 7, 11]))


@pytest.mark.parametrize(
    "changes",
    [
        dict(),
        dict(source_vocab=31),
        dict(norm_first=True, encoder=kl.StackDesign(1, (kl.full,)), decoder=kl.StackDesign(2, (kl.causal,))),
    ],
)
def test_the_2017_transformer_and_variants_do_too(tmp_path, changes):
    design = kl.presets.small(kl.presets.vaswani).but(vocab=53, dim=20, heads=2, **changes)
    model = kl.build(design).eval()
    to_ctranslate2.write(model, None, tmp_path / "out")
    assert_ok(compare(model, None, tmp_path / "out", None, None))


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("quantization", ["int8", "int16", "float16"])
def test_quantised_weights_are_near_and_the_model_is_unchanged(tmp_path, name, quantization):
    model = ours(name, tmp_path)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    to_ctranslate2.write(model, None, tmp_path / "out", quantization=quantization)
    assert all(torch.equal(before[key], tensor) for key, tensor in model.state_dict().items())
    assert_ok(compare(model, None, tmp_path / "out", quantization, None))


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_support_is_refused_by_name(tmp_path, name):
    with pytest.raises(ValueError, match=REFUSED[name]):
        to_ctranslate2.write(ours(name, tmp_path), None, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("design", "why"),
    [
        (kl.presets.bert, "no decoder"),
        (kl.presets.gpt2.but(head=kl.ClassificationHead(3)), "head"),
        (kl.presets.vaswani.but(encoder=kl.StackDesign(1, (kl.full,))), "one more at the end"),
    ],
)
def test_so_are_designs_of_ones_own(tmp_path, design, why):
    with pytest.raises(ValueError, match=why):
        to_ctranslate2.write(kl.build(kl.presets.small(design)), None, tmp_path / "out")


def test_another_model_is_found(tmp_path):
    model = ours("marian", tmp_path)
    to_ctranslate2.write(model, None, tmp_path / "out")
    with torch.no_grad():
        model.encoder.layers[0].self.out.weight.mul_(1.5)
    assert not next(iter(compare(model, None, tmp_path / "out", None, None))).ok


def test_a_token_that_is_clearly_another_is_found_and_a_tie_is_none(tmp_path):
    model = ours("gpt2", tmp_path)
    with torch.no_grad():
        scores = model(torch.tensor([[5, 7]]))[0, -1]
    second = int(scores.topk(2).indices[1])
    gap = float(scores.max() - scores[second])
    assert not compare_generation(model, [[5, 7]], [[second]], 1, None, gap / 3).ok
    assert compare_generation(model, [[5, 7]], [[second]], 1, None, gap).ok


def test_the_vocabulary_and_special_tokens_are_the_tokenizers(tmp_path):
    model = ours("bart", tmp_path)
    words = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{n}" for n in range(40))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    to_ctranslate2.write(model, tokenizer, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "shared_vocabulary.json").read_text())[:45] == [*words, "<44>"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    special_tokens = [config[f"{name}_token"] for name in ("bos", "eos", "unk", "decoder_start")]
    assert special_tokens == ["<s>", "</s>", "<unk>", "</s>"]
    assert config["layer_norm_epsilon"] == model.design.norm.eps
    assert ctranslate2.Translator(str(tmp_path / "out")).score_batch([["w1", "</s>"]], [["w2"]])
    large = Tokenizer(models.WordLevel({f"w{n}": n for n in range(60)}, "w0"))
    with pytest.raises(ValueError, match="60 tokens, the model 53"):
        to_ctranslate2.write(model, large, tmp_path / "out")


def test_a_quantised_file_is_compared_in_float32_and_the_compute_type_of_this_cpu_is_reported(tmp_path):
    model = ours("llama", tmp_path)
    to_ctranslate2.write(model, None, tmp_path / "out", quantization="int16")
    first, _ = compare(model, None, tmp_path / "out", "int16", None)
    default = ctranslate2.Generator(str(tmp_path / "out"), device="cpu").compute_type
    assert first.ok
    assert f"in float32; in {default}" in first.found
