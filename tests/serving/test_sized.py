"""How much an engine may hold, by the memory that there is; and how many threads a model is worth."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.serving import sized
from keepleft.serving.alone import Alone
from keepleft.serving.together import Together


def built(name: str, **changes):
    return kl.build(kl.presets.small(getattr(kl.presets, name)).but(vocab=53, **changes))


@pytest.mark.parametrize(("name", "pools"), [("gpt2", 1), ("llama3", 1), ("bart", 2)])
def test_pages_fill_the_memory_that_is_given_and_no_more_than_rows_can_use(name, pools):
    model = built(name)
    shape = model.design.attention
    assert sized.token_bytes(model) == 2 * len(model.decoder.layers) * shape.kv_heads * shape.width * 4
    page = 128 * sized.token_bytes(model)
    few = sized.sizes(model, rows=8, memory=20 * page / sized.GIB, reach=100_000)
    assert few.rows == 8
    assert few.pages == min(20 // pools, 8 * -(-min(100_000, model.design.longest or 4096) // 128))
    assert few.source_pages == (few.pages if pools == 2 else 0)
    assert sized.sizes(model, rows=2, memory=4.0, reach=300).pages == 2 * -(-min(300, model.design.longest or 300) // 128)


@pytest.mark.parametrize(("given", "said"), [
    ({"rows": 0}, "rows is 0: it must be more than nothing"), ({"memory": -1.0}, "memory is -1.0"),
    ({"memory": 1e-7}, "do not hold one page of 128 tokens")])
def test_what_cannot_hold_anything_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        sized.sizes(built("llama3"), **given)


def test_whoever_writes_nothing_gets_an_engine_with_nothing_to_do():
    assert isinstance(sized.engine(built("bert")), Alone)
    assert isinstance(sized.engine(built("llama3"), memory=0.01), Together)


def test_a_small_model_gets_one_thread():
    assert sized.threads(built("llama3")) == 1
    with torch.device("meta"):
        large = kl.build(kl.presets.gpt2, device="meta")
    large.token.weight = torch.nn.Parameter(torch.empty(1))  # a device that computes
    assert 1 <= sized.threads(large) <= torch.get_num_threads()
