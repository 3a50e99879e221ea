"""Any chunking equals one pass, for every kind of cache; a step equals the last row of a full pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.models.state import CACHE_KINDS
from strategies import designs, padding, random_model, segments, tokens

T = 17
KINDS = [kind for kind in CACHE_KINDS if kind != "quantized"]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def full_pass(model, sequences, **more):
    if isinstance(model, kl.EncoderDecoder):
        return model(tokens(len(sequences), 7), sequences, **more)
    return model(sequences, **more)


def memory_for(model, rows):
    return {"memory": model.encode_memory(tokens(rows, 7))} if isinstance(model, kl.EncoderDecoder) else {}


def extend_logits(model, sequences, state):
    """The logits at each of these tokens, not of the last alone as step() returns them."""
    return model.head(model.extend(sequences, state), model.token)


@st.composite
def cuts(draw, first: int = 1):
    """A way to cut a sequence into chunks, the first of them at least so long: [0, 3, 4, …, T]."""
    prompt = draw(st.integers(first, T - 2))
    return [0, prompt, *sorted(draw(st.sets(st.integers(prompt + 1, T - 1)))), T]


@given(designs("decoder") | designs("both"), cuts(), st.sampled_from(KINDS))
@settings(max_examples=120)
def test_any_chunking_equals_one_pass(design, chunks, kind):
    model, sequences = random_model(design), tokens(2, T)
    want = full_pass(model, sequences)
    logits, state = model.start(sequences[:, : chunks[1]], cache=kind, capacity=T, **memory_for(model, 2))
    same(logits, want[:, chunks[1] - 1])
    for begin, end in pairwise(chunks[1:]):
        same(extend_logits(model, sequences[:, begin:end], state), want[:, begin:end])


@given(designs("decoder") | designs("both"), cuts())
@settings(max_examples=40)
def test_a_step_equals_the_last_row_of_a_full_pass(design, chunks):
    model, sequences = random_model(design), tokens(2, T)
    want = full_pass(model, sequences)
    _, state = model.start(sequences[:, : chunks[1]], **memory_for(model, 2))
    for begin, end in pairwise(chunks[1:]):
        same(model.step(sequences[:, begin:end], state), want[:, end - 1])


@given(designs("decoder") | designs("both"), cuts(first=4), st.sampled_from(KINDS), st.data())
@settings(max_examples=100)
def test_prompts_of_unequal_length_padded_on_either_side_equal_each_alone(design, chunks, kind, data):
    model, sequences = random_model(design), tokens(3, T)
    prompt = chunks[1]
    segment_ids = data.draw(padding(3, prompt)) * 4  # any number but 0 is a sequence
    more = memory_for(model, 3)
    positions = None
    if data.draw(st.booleans()):  # the position given to padding means nothing
        positions = torch.where(segment_ids == 0, 29, kl.positions_from_segments(segment_ids))
    logits, state = model.start(
        sequences[:, :prompt], positions=positions, segments=segment_ids, cache=kind, capacity=T, **more
    )
    steps = [logits] + [extend_logits(model, sequences[:, a:b], state) for a, b in pairwise(chunks[1:])]
    for row in range(3):
        real = sequences[row, :prompt][segment_ids[row] != 0][None]
        alone = {"memory": model.encode_memory(tokens(3, 7)[row : row + 1])} if more else {}
        score, own = model.start(real, cache=kind, capacity=T, **alone)
        same(steps[0][row], score[0])
        for step, (a, b) in zip(steps[1:], pairwise(chunks[1:]), strict=True):
            same(step[row], extend_logits(model, sequences[row : row + 1, a:b], own)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
@given(
    design=designs("decoder") | designs("both"),
    rows=st.lists(st.integers(0, 2), min_size=1, max_size=5) | st.permutations([0, 1, 2]),
)
@settings(max_examples=25)
def test_rows_can_be_reordered_dropped_and_repeated(design, kind, rows, padded):
    model, sequences = random_model(design), tokens(3, T)
    segment_ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]) if padded else None
    begin = lambda: model.start(
        sequences[:, :4], segments=segment_ids, cache=kind, capacity=T, **memory_for(model, 3)
    )[1]
    state, other = begin(), begin()
    pick = torch.tensor(rows)
    state.reorder(pick)
    for begin, end in ((4, 7), (7, 8)):
        want = extend_logits(model, sequences[:, begin:end], other)
        same(extend_logits(model, sequences[pick, begin:end], state), want[pick])


@given(designs("decoder"), cuts(), st.booleans())
@settings(max_examples=50)
def test_a_static_cache_of_fixed_shapes_equals_one_pass(design, chunks, padded):
    model, sequences = random_model(design), tokens(2, T)
    segment_ids = torch.ones(2, chunks[1], dtype=torch.long) if padded else None
    caches = [kl.StaticCache(T + 3, batch=2, static_shapes=True) for _ in design.decoder.mask]
    want = model(sequences)
    logits, state = model.start(sequences[:, : chunks[1]], cache=caches, segments=segment_ids)
    same(logits, want[:, chunks[1] - 1])
    addresses = [tensor.data_ptr() for cache in caches for pair in cache.layers.values() for tensor in pair]
    for begin, end in pairwise(chunks[1:]):
        same(model.step(sequences[:, begin:end], state), want[:, end - 1])
    state.reorder(torch.tensor([1, 0]))
    assert addresses == [
        tensor.data_ptr() for cache in caches for pair in cache.layers.values() for tensor in pair
    ]


@given(designs("decoder"), cuts(), st.sampled_from(["dynamic", "static"]), st.data())
@settings(max_examples=60)
def test_packed_rows_in_chunks_equal_one_pass(design, chunks, kind, data):
    model, sequences = random_model(design), tokens(2, T)
    segment_ids = data.draw(segments(2, T))
    want = model.hidden_states(sequences, segments=segment_ids)
    state = model.start(
        sequences[:, : chunks[1]], segments=segment_ids[:, : chunks[1]], cache=kind, capacity=T
    )[1]
    for begin, end in pairwise(chunks[1:]):
        got = model.extend(sequences[:, begin:end], state, segments=segment_ids[:, begin:end])
        real = segment_ids[:, begin:end] != 0
        same(got[real], want[:, begin:end][real])


def test_a_ring_keeps_no_more_than_its_window():
    design = kl.presets.gpt2.but(
        vocab=31,
        dim=24,
        heads=6,
        feedforward=kl.FeedForward(29, "gelu"),
        position=kl.Rotary(),
        decoder=kl.StackDesign(2, (kl.causal & kl.window(5),)),
    )
    model, sequences = random_model(design), tokens(2, 97)
    _, state = model.start(sequences[:, :40], cache="ring")
    for n in range(40, 97):
        logits = model.step(sequences[:, n : n + 1], state)
    same(logits, model(sequences)[:, -1])
    assert all(k.shape[2] <= 5 + 1 for k, _ in state.caches[0].layers.values())


def test_a_cross_attention_memory_is_computed_once():
    design = kl.presets.vaswani.but(
        vocab=31,
        dim=24,
        heads=6,
        feedforward=kl.FeedForward(29, "relu"),
        encoder=kl.StackDesign(2, (kl.full,)),
        decoder=kl.StackDesign(2, (kl.causal,)),
    )
    model, calls = random_model(design), []
    for layer in model.decoder.layers:
        layer.cross.kv.register_forward_hook(lambda *_: calls.append(1))
    _, state = model.start(tokens(2, 3), memory=model.encode_memory(tokens(2, 7)))
    for n in range(4):
        model.step(tokens(2, 1) + n, state)
    assert len(calls) == 2  # once for each layer


def test_a_full_static_cache_says_so():
    model = random_model(
        kl.presets.gpt2.but(
            vocab=31,
            dim=24,
            heads=6,
            feedforward=kl.FeedForward(29, "gelu"),
            decoder=kl.StackDesign(1, (kl.causal,)),
        )
    )
    _, state = model.start(tokens(1, 5), cache="static", capacity=6)
    model.step(tokens(1, 1), state)
    with pytest.raises(ValueError, match=r"holds 6 of 6 tokens and cannot take 1 more"):
        model.step(tokens(1, 1), state)
