"""Capacity planning by the memory available, and how many threads a model is worth."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.serving.engine import capacity
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.encoder import EncoderEngine


def build_model(name: str, **changes):
    return kl.build(kl.presets.small(getattr(kl.presets, name)).but(vocab=53, **changes))


@pytest.mark.parametrize(("name", "pools"), [("gpt2", 1), ("llama3", 1), ("bart", 2)])
def test_pages_fill_the_memory_that_is_given_and_no_more_than_rows_can_use(name, pools):
    model = build_model(name)
    config = model.design.attention
    kv_numbers = 2 * len(model.decoder.layers) * config.kv_heads * config.head_dim
    assert capacity.kv_bytes_per_token(model) == 4 * kv_numbers
    page_bytes = 128 * capacity.kv_bytes_per_token(model)
    planned = capacity.plan_capacity(
        model, max_num_seqs=8, kv_cache_memory=20 * page_bytes / capacity.GIB, max_model_len=100_000
    )
    assert planned.max_num_seqs == 8
    assert planned.pages == min(20 // pools, 8 * -(-min(100_000, model.design.max_positions or 4096) // 128))
    assert planned.source_pages == (planned.pages if pools == 2 else 0)
    assert capacity.plan_capacity(
        model, max_num_seqs=2, kv_cache_memory=4.0, max_model_len=300
    ).pages == 2 * -(-min(300, model.design.max_positions or 300) // 128)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0: it must be more than nothing"),
        ({"kv_cache_memory": -1.0}, "kv_cache_memory is -1.0"),
        ({"kv_cache_memory": 1e-7}, "do not hold one page of 128 tokens"),
    ],
)
def test_what_cannot_hold_anything_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        capacity.plan_capacity(build_model("llama3"), **sizes)


def test_an_encoder_gets_an_engine_of_its_own():
    assert isinstance(capacity.make_engine(build_model("bert")), EncoderEngine)
    assert isinstance(
        capacity.make_engine(build_model("llama3"), kv_cache_memory=0.01), ContinuousBatchingEngine
    )


def test_a_small_model_gets_one_thread():
    assert capacity.best_threads(build_model("llama3")) == 1
    with torch.device("meta"):
        large = kl.build(kl.presets.gpt2, device="meta")
    large.token.weight = torch.nn.Parameter(torch.empty(1))  # a device that computes
    assert 1 <= capacity.best_threads(large) <= torch.get_num_threads()
