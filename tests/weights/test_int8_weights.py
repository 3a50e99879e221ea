"""Weights stored as int8: read back near, exact for int8 products, and refused where they are damaged."""

from __future__ import annotations

import json

import pytest
import torch

import keepleft as kl
from keepleft.disk import safetensors
from keepleft.weights.int8_weights import Int8Source
from keepleft.weights.rules import InMemorySource

FAMILIES = ["t5", "bart", "pegasus", "gpt2", "llama", "bert"]


def small_model(family: str):
    model = kl.build(
        kl.presets.small(getattr(kl.presets, family)), generator=torch.Generator().manual_seed(3)
    )
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_weight_is_rounded_by_half_a_level_at_most(family, tmp_path):
    model = small_model(family)
    kl.save(model, None, tmp_path, int8=True)
    reloaded, _ = kl.load(tmp_path)
    assert reloaded.design == kl.load(_float32_copy(model, tmp_path / "float32"))[0].design
    for name, weight in model.state_dict().items():
        largest = torch.zeros(1)
        if weight.dim() == 2:  # GPT-2 stores its matrices transposed
            largest = torch.maximum(*(weight.abs().amax(dim, keepdim=True) for dim in (0, 1)))
        error = (reloaded.state_dict()[name] - weight).abs()
        assert (error <= largest / 254 * (1 + 1e-5)).all(), name


def _float32_copy(model, folder):
    kl.save(model, None, folder)
    return folder


def test_what_was_read_back_is_written_back_to_the_byte(tmp_path):
    kl.save(small_model("pegasus"), None, tmp_path / "first", int8=True)
    kl.save(kl.load(tmp_path / "first")[0], None, tmp_path / "second", int8=True)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second


def test_the_file_has_about_a_quarter_of_the_bytes(tmp_path):
    model = kl.build(kl.presets.small(kl.presets.t5).but(dim=64, heads=4, vocab=1009))
    kl.save(model, None, tmp_path / "float32")
    kl.save(model, None, tmp_path / "int8", int8=True)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("float32", "int8")]
    assert sizes[1] < 0.32 * sizes[0]


def test_other_quantizations_are_refused_by_name(tmp_path):
    kl.save(small_model("gpt2"), None, tmp_path, int8=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config.json: quantization_config is of 'gptq'"):
        kl.load(tmp_path)


def test_scales_must_fit_their_rows():
    source = InMemorySource({"w": torch.ones(3, 5, dtype=torch.int8), "w_scale": torch.ones(2)})
    with pytest.raises(ValueError, match="a number for each of the 3 rows of 'w'"):
        Int8Source(source)


def test_a_name_that_ends_like_a_scale_stays():
    source = Int8Source(InMemorySource({"logit_scale": torch.ones(3), "w": torch.ones(3, 5)}))
    assert source.names() == ["logit_scale", "w"]
    assert safetensors.DTYPES["I8"] == torch.int8
