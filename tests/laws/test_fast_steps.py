"""Whatever the mask: a fast step scores like the model's own step, or says that it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.attention.paged_kv_cache import PageTable
from keepleft.inference.decode_layers import unsupported_reason
from keepleft.inference.ops_torch import TorchOps
from keepleft.inference.paged_runner import PagedRunner
from keepleft.inference.static_runner import StaticRunner
from strategies import CAUSAL_MASKS, MASKS, VOCAB, designs, random_model, tokens

PROMPT, STEPS = 5, 4
MASKS_OF_LAYERS = CAUSAL_MASKS | st.lists(MASKS, min_size=1, max_size=2).map(tuple)
NO_WINDOW = (kl.causal | kl.window(4),)  # looks like a sliding window and is none
TWO_WINDOWS = (kl.window(3) & kl.causal & kl.window(2),)


def model_with(design: kl.Design, masks: tuple[kl.Mask, ...]) -> torch.nn.Module:
    return random_model(design.but(decoder=replace(design.decoder, mask=masks)))


def reference_steps(model, sequences: torch.Tensor, **memory):
    """The model's own logits after the prompt and after each later token."""
    logits, state = model.start(sequences[:, :PROMPT], **memory)
    yield logits
    for n in range(STEPS):
        yield model.step(sequences[:, PROMPT + n : PROMPT + n + 1], state)


def memory_of(model, rows: int):
    return {"memory": model.encode_memory(tokens(rows, 7))} if isinstance(model, kl.EncoderDecoder) else {}


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@given(designs("decoder") | designs("both"), MASKS_OF_LAYERS, st.booleans())
@example(kl.presets.small(kl.presets.llama3).but(vocab=VOCAB), NO_WINDOW, False)
@example(kl.presets.small(kl.presets.gpt2).but(vocab=VOCAB), TWO_WINDOWS, False)
@settings(max_examples=80, deadline=None)
@torch.no_grad()
def test_a_static_step_scores_like_the_models_own_or_is_refused(design, masks, static_shapes):
    model, sequences = model_with(design, masks), tokens(3, PROMPT + STEPS)
    if unsupported_reason(model) is not None:
        with pytest.raises(ValueError, match="its mask is"):
            StaticRunner(model, TorchOps(static_shapes))
        return
    runner = StaticRunner(model, TorchOps(static_shapes))
    want = reference_steps(model, sequences, **memory_of(model, 3))
    logits, cache = runner.start(sequences[:, :PROMPT], capacity=PROMPT + STEPS, **memory_of(model, 3))
    same(logits, next(want))
    for n, expected in enumerate(want):
        same(runner.step(sequences[:, PROMPT + n : PROMPT + n + 1], cache), expected)


@given(designs("decoder") | designs("both"), MASKS_OF_LAYERS, st.integers(2, 5))
@example(kl.presets.small(kl.presets.llama3).but(vocab=VOCAB), NO_WINDOW, 4)
@example(kl.presets.small(kl.presets.gpt2).but(vocab=VOCAB), TWO_WINDOWS, 4)
@settings(max_examples=80, deadline=None)
@torch.no_grad()
def test_a_paged_step_scores_like_the_models_own_whatever_the_mask(design, masks, page_size):
    model, sequences = model_with(design, masks), tokens(2, PROMPT + STEPS)
    is_encoder_decoder = isinstance(model, kl.EncoderDecoder)
    want = reference_steps(model, sequences, **memory_of(model, 2))
    next(want)  # pages are asked for the logits of steps alone
    runner = PagedRunner(
        model, num_pages=40, page_size=page_size, num_source_pages=20 if is_encoder_decoder else 0
    )
    page_tables = [PageTable(width=1) for _ in range(2)]
    for page_table in page_tables:
        assert runner.reserve(page_table, PROMPT + STEPS)
        if is_encoder_decoder:
            assert runner.reserve_source(page_table, 7)
    if is_encoder_decoder:
        runner.encode_sources(page_tables, tokens(2, 7).tolist())
    runner.prefill(page_tables, sequences[:, :PROMPT].tolist())
    for n, expected in enumerate(want):
        same(runner.decode(page_tables, sequences[:, PROMPT + n].tolist()), expected)
