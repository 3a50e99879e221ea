"""Any chunking equals one pass, for every kind of cache; a step equals the last row of a full pass."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.models.state import CACHE_KINDS
from strategies import designs, made, padding, segments, tokens

T = 17
KINDS = [kind for kind in CACHE_KINDS if kind != "quantized"]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def full_pass(model, texts, **more):
    if isinstance(model, kl.EncoderDecoder):
        return model(tokens(len(texts), 7), texts, **more)
    return model(texts, **more)


def given_to(model, rows):
    return {"memory": model.encode_memory(tokens(rows, 7))} if isinstance(model, kl.EncoderDecoder) else {}


def go_on(model, texts, state):
    """The scores at each of these tokens, not of the last alone as step() gives them."""
    return model.head(model.extend(texts, state), model.token)


@st.composite
def cuts(draw, first: int = 1):
    """A way to cut a text into chunks, the first of them at least so long: [0, 3, 4, …, T]."""
    prompt = draw(st.integers(first, T - 2))
    return [0, prompt, *sorted(draw(st.sets(st.integers(prompt + 1, T - 1)))), T]


@given(designs("decoder") | designs("both"), cuts(), st.sampled_from(KINDS))
@settings(max_examples=120)
def test_any_chunking_equals_one_pass(design, chunks, kind):
    model, texts = made(design), tokens(2, T)
    want = full_pass(model, texts)
    scores, state = model.start(texts[:, : chunks[1]], cache=kind, capacity=T, **given_to(model, 2))
    same(scores, want[:, chunks[1] - 1])
    for begin, end in pairwise(chunks[1:]):
        same(go_on(model, texts[:, begin:end], state), want[:, begin:end])


@given(designs("decoder") | designs("both"), cuts())
@settings(max_examples=40)
def test_a_step_equals_the_last_row_of_a_full_pass(design, chunks):
    model, texts = made(design), tokens(2, T)
    want = full_pass(model, texts)
    _, state = model.start(texts[:, : chunks[1]], **given_to(model, 2))
    for begin, end in pairwise(chunks[1:]):
        same(model.step(texts[:, begin:end], state), want[:, end - 1])


@given(designs("decoder") | designs("both"), cuts(first=4), st.sampled_from(KINDS), st.data())
@settings(max_examples=100)
def test_prompts_of_unequal_length_padded_on_either_side_equal_each_alone(design, chunks, kind, data):
    model, texts = made(design), tokens(3, T)
    prompt = chunks[1]
    seg = data.draw(padding(3, prompt)) * 4  # any number but 0 is a text
    more = given_to(model, 3)
    places = None
    if data.draw(st.booleans()):  # where padding is said to stand means nothing
        places = torch.where(seg == 0, 29, kl.positions_from_segments(seg))
    scores, state = model.start(
        texts[:, :prompt], positions=places, segments=seg, cache=kind, capacity=T, **more
    )
    steps = [scores] + [go_on(model, texts[:, a:b], state) for a, b in pairwise(chunks[1:])]
    for row in range(3):
        real = texts[row, :prompt][seg[row] != 0][None]
        alone = {"memory": model.encode_memory(tokens(3, 7)[row : row + 1])} if more else {}
        score, own = model.start(real, cache=kind, capacity=T, **alone)
        same(steps[0][row], score[0])
        for step, (a, b) in zip(steps[1:], pairwise(chunks[1:]), strict=True):
            same(step[row], go_on(model, texts[row : row + 1, a:b], own)[0])


@given(
    designs("decoder") | designs("both"),
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 2), min_size=1, max_size=5) | st.permutations([0, 1, 2]),
    st.booleans(),
)
@settings(max_examples=120)
def test_rows_can_be_reordered_dropped_and_repeated(design, kind, rows, padded):
    model, texts = made(design), tokens(3, T)
    seg = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]]) if padded else None
    begin = lambda: model.start(texts[:, :4], segments=seg, cache=kind, capacity=T, **given_to(model, 3))[1]
    state, other = begin(), begin()
    pick = torch.tensor(rows)
    state.reorder(pick)
    for begin, end in ((4, 7), (7, 8)):
        want = go_on(model, texts[:, begin:end], other)
        same(go_on(model, texts[pick, begin:end], state), want[pick])


@given(designs("decoder"), cuts(), st.booleans())
@settings(max_examples=50)
def test_a_static_cache_of_fixed_shapes_equals_one_pass(design, chunks, padded):
    model, texts = made(design), tokens(2, T)
    seg = torch.ones(2, chunks[1], dtype=torch.long) if padded else None
    caches = [kl.StaticCache(T + 3, batch=2, static_shapes=True) for _ in design.decoder.mask]
    want = model(texts)
    scores, state = model.start(texts[:, : chunks[1]], cache=caches, segments=seg)
    same(scores, want[:, chunks[1] - 1])
    addresses = [tensor.data_ptr() for cache in caches for pair in cache.layers.values() for tensor in pair]
    for begin, end in pairwise(chunks[1:]):
        same(model.step(texts[:, begin:end], state), want[:, end - 1])
    state.reorder(torch.tensor([1, 0]))
    assert addresses == [
        tensor.data_ptr() for cache in caches for pair in cache.layers.values() for tensor in pair
    ]


@given(designs("decoder"), cuts(), st.sampled_from(["dynamic", "static"]), st.data())
@settings(max_examples=60)
def test_packed_rows_in_chunks_equal_one_pass(design, chunks, kind, data):
    model, texts = made(design), tokens(2, T)
    seg = data.draw(segments(2, T))
    want = model.hidden_states(texts, segments=seg)
    state = model.start(texts[:, : chunks[1]], segments=seg[:, : chunks[1]], cache=kind, capacity=T)[1]
    for begin, end in pairwise(chunks[1:]):
        got = model.extend(texts[:, begin:end], state, segments=seg[:, begin:end])
        real = seg[:, begin:end] != 0
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
    model, texts = made(design), tokens(2, 97)
    _, state = model.start(texts[:, :40], cache="ring")
    for n in range(40, 97):
        scores = model.step(texts[:, n : n + 1], state)
    same(scores, model(texts)[:, -1])
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
    model, calls = made(design), []
    for layer in model.decoder.layers:
        layer.cross.kv.register_forward_hook(lambda *_: calls.append(1))
    _, state = model.start(tokens(2, 3), memory=model.encode_memory(tokens(2, 7)))
    for n in range(4):
        model.step(tokens(2, 1) + n, state)
    assert len(calls) == 2  # once for each layer


def test_a_full_static_cache_says_so():
    model = made(
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
