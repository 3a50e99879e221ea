"""On a GPU: kernels of our own score like the model's own step, and recorded steps write what the plain loop
writes.
"""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft.inference import ops_triton
from keepleft.inference.static_runner import StaticRunner
from keepleft.kernels import decode_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FAMILIES = ("gpt2", "llama3", "mistral", "t5", "bart", "vaswani")
WISHES = (
    {},
    {"num_beams": 3},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    {"do_sample": True, "seed": 3, "top_p": 0.9},
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "num_beams": 2},
)


def built(name: str, spread: float):
    design = kl.presets.small(getattr(kl.presets, name)).but(vocab=53, initial=kl.NormalInit(spread))
    model = kl.build(design, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).eval()
    model.notes = {"decoder_start_token_id": 1}
    return model


@pytest.mark.parametrize(("rows", "split"), [(1, 512), (3, 4), (17, 512), (150, 4)])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_kernels_score_like_the_models_own_step(name, rows, split, monkeypatch):
    monkeypatch.setattr(decode_attention, "TOKENS_PER_SPLIT", split)
    model = built(name, 0.1)
    draw = lambda *shape: torch.randint(3, 53, shape, device="cuda")
    segments = torch.ones(rows, 5, dtype=torch.long, device="cuda")
    segments[-1, :2] = 0
    sources = draw(rows, 7)
    memory = lambda: {} if model.design.encoder is None else {"memory": model.encode_memory(sources)}
    prompt, steady = draw(rows, 5), StaticRunner(model, ops_triton.TritonOps())
    _, state = model.start(prompt, segments=segments, **memory())
    _, track = steady.start(prompt, segments=segments, capacity=16, **memory())
    for _ in range(8):
        tokens = draw(rows, 1)
        torch.testing.assert_close(
            steady.step(tokens, track), model.step(tokens, state), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("wish", WISHES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_steps_write_what_the_plain_loop_writes(name, wish):
    model, prompts = built(name, 0.3), [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    write = lambda **said: [
        several[0].tokens
        for several in kl.completions(model, None, prompts, max_new_tokens=20, eos_token_id=2, **wish, **said)
    ]
    plain = write(prefill_chunk_size=100)
    assert write() == plain
    assert write() == plain  # played again
