"""On a GPU: many at once are told what each would be told alone."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.serving.together import Together
from serving.scenes import alone, asks, run, summed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama3", "mistral", "t5", "bart", "vaswani"])
def test_mixed_requests_by_recorded_steps(name, warm):
    design = kl.presets.small(getattr(kl.presets, name)).but(vocab=53, dropout=0.0, initial=kl.Normal(0.3))
    model = kl.build(design, generator=torch.Generator().manual_seed(3)).eval().cuda()
    some = asks(120, seed=5)
    engine = Together(model, rows=40, pages=64, size=16, chunk=64)
    if warm:
        engine.paged.warm()
    told, right = run(engine, some), alone(model, some)
    same = [summed(a) == summed(b) for a, b in zip(told, right, strict=True)]
    assert sum(same) >= 118, [ask for ask, fine in zip(some, same, strict=True) if not fine]  # sums in another order: near ties
    assert engine.counts()["pages_used"] == engine.counts()["pages_kept"]
