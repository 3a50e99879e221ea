"""To torch.compile a model is one graph, with and without padding."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vaswani", "gpt2", "gpt3_small", "llama3_1", "t5", "bart", "bert_masked"])
def test_a_model_is_one_graph_and_computes_the_same(name):
    model = kl.build(
        kl.presets.small(kl.presets.ALL[name]), generator=torch.Generator().manual_seed(0)
    ).eval()
    tokens = torch.randint(512, (2, 9))
    given = (tokens, tokens) if isinstance(model, kl.EncoderDecoder) else (tokens,)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    segments = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 2, 2, 2, 2, 2]])
    with torch.no_grad():
        assert torch.equal(compiled(*given), model(*given))
        assert torch.equal(compiled(*given, segments=segments), model(*given, segments=segments))
