"""Steady steps, and steps that are made to be recorded, write what the plain loop writes."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from decoding.models import decoder, pair
from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.graphed_loop import can_capture, decode_graphed
from keepleft.decoding.loop import decode, right_align
from keepleft.inference.decode_layers import unsupported_reason
from keepleft.inference.ops_torch import TorchOps
from keepleft.inference.static_runner import StaticRunner

FAMILIES = (
    "gpt2",
    "llama3",
    "mistral",
    "gpt",
    "bart",
    "t5",
    "t5_v1_1",
    "marian",
    "vaswani",
    "pegasus",
    "windowed",
)
CAPACITY = 17


def built(name: str):
    design = kl.presets.small(kl.presets.mistral if name == "windowed" else getattr(kl.presets, name))
    if name == "windowed":  # a window that texts leave behind, and a layer that has none
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & kl.window(4), kl.causal)))
    design = design.but(vocab=53, dropout=0.0, initial=kl.NormalInit(0.1))
    return kl.build(design, generator=torch.Generator().manual_seed(3)).double().eval()


@pytest.mark.parametrize("whole", [False, True], ids=["filled", "whole"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_steady_step_scores_like_the_models_own(name, padded, whole):
    model, dice = built(name), torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randint(3, 53, shape, generator=dice)
    prompt, segments = draw(3, 5), None
    if padded:
        segments = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 1, 1, 1, 1]])
    source = torch.tensor([[1] * 7, [1, 1, 1, 1, 0, 0, 0], [1] * 7])
    sources = draw(3, 7)
    memory = lambda: (
        {} if model.design.encoder is None else {"memory": model.encode_memory(sources, segments=source)}
    )
    steady = StaticRunner(model, TorchOps(whole))
    first, state = model.start(prompt, segments=segments, **memory())
    also, track = steady.start(prompt, segments=segments, capacity=CAPACITY, **memory())
    assert torch.equal(first, also)
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    state.reorder(rows)
    track.reorder(rows)
    for _ in range(CAPACITY - 5):
        tokens = draw(6, 1)
        torch.testing.assert_close(
            steady.step(tokens, track), model.step(tokens, state), rtol=1e-9, atol=1e-9
        )
        rows = torch.tensor([1, 0, 2, 2, 5, 4])
        state.reorder(rows)
        track.reorder(rows)
    with pytest.raises(ValueError, match="are full"):
        steady.step(draw(6, 1), track)


wishes = st.fixed_dictionaries(
    {},
    optional={
        "num_beams": st.integers(1, 5),
        "do_sample": st.booleans(),
        "top_k": st.integers(1, 9),
        "top_p": st.floats(0.2, 1.0),
        "temperature": st.floats(0.3, 2.0),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-1.0, 1.0),
        "frequency_penalty": st.floats(-1.0, 1.0),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(0, 5),
        "min_length": st.integers(0, 9),
        "bad_words_ids": st.just([[3], [4, 5], [6, 7, 8]]),
        "forced_eos_token_id": st.just(2),
        "length_penalty": st.floats(-1.0, 2.0),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "exponential_decay_length_penalty": st.just((2, 1.3)),
        "suppress_tokens": st.just([7]),
        "begin_suppress_tokens": st.just([2, 9]),
        "encoder_repetition_penalty": st.just(1.7),
        "encoder_no_repeat_ngram_size": st.just(2),
        "eos_token_id": st.sampled_from([2, [2, 4]]),
    },
)


@given(
    wishes=wishes,
    seed=st.integers(0, 5),
    source=st.booleans(),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
@settings(max_examples=120, deadline=None)
def test_a_step_of_fixed_shape_chooses_what_the_plain_loop_chooses(wishes, seed, source, lengths):
    if wishes.get("num_beams", 1) > 1 and wishes.get("do_sample"):
        wishes = wishes | {"top_k": 9, "top_p": 1.0}  # enough to draw from for each beam
    model = (pair if source else decoder)(seed).double()
    options = kl.GenerationConfig(
        max_new_tokens=9, seed=7, decoder_start_token_id=1, **{"eos_token_id": 2, **wishes}
    )
    dice = torch.Generator().manual_seed(seed)
    work = DecodeBatch.build(
        model, [torch.randint(3, 11, (n,), generator=dice).tolist() for n in lengths], options
    )
    strategy = make_strategy(None, options, work)
    assert can_capture(strategy, work.max_length)
    own = decode(
        model,
        work.prompt,
        strategy,
        max_new_tokens=work.max_new_tokens,
        segments=work.segments,
        **work.start_kwargs(model, options),
    )
    plain = strategy.results(deque(own, maxlen=1)[0])
    steady = strategy.results(deque(decode_steps(model, work, strategy, options), maxlen=1)[0])
    assert [[one.tokens for one in several] for several in steady] == [
        [one.tokens for one in several] for several in plain
    ]
    prompt, real = right_align(work.prompt, work.segments)
    for _ in range(2):  # the second time with what was made the first time
        memory = work.start_kwargs(model, options).get("memory")
        again = decode_graphed(
            model, prompt, strategy, max_new_tokens=work.max_new_tokens, prompt_mask=real, memory=memory
        )
        found = strategy.results(deque(again, maxlen=1)[0])
        assert [[one.tokens for one in several] for several in found] == [
            [one.tokens for one in several] for several in plain
        ]
        for mine, theirs in zip(found, plain, strict=True):
            assert [one.score for one in mine] == pytest.approx(
                [one.score for one in theirs], rel=1e-6, abs=1e-6
            )


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama3"])
@torch.no_grad()
def test_weights_that_change_in_place_are_seen(name):
    model = built(name)
    model.notes = {"decoder_start_token_id": 1}
    options = kl.GenerationConfig(max_new_tokens=9, decoder_start_token_id=1)
    for _ in range(2):
        work = DecodeBatch.build(model, [[5, 6, 7, 8]], options)
        strategy = make_strategy(None, options, work)
        plain = decode(model, work.prompt, strategy, max_new_tokens=9, **work.start_kwargs(model, options))
        memory = (
            {} if model.design.encoder is None else {"memory": work.start_kwargs(model, options)["memory"]}
        )
        ways = [
            plain,
            decode_steps(model, work, strategy, options),
            decode_graphed(model, work.prompt, strategy, max_new_tokens=[9], **memory),
        ]
        first, *others = [strategy.results(deque(way, maxlen=1)[0])[0][0] for way in ways]
        for other in others:
            assert other.tokens == first.tokens
            assert other.score == pytest.approx(first.score, rel=1e-9)
        for weight in model.parameters():
            weight.add_(
                0.3
                * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=weight.dtype)
            )


def test_what_steady_steps_cannot_do_is_said():
    assert "mask" in unsupported_reason(
        kl.build(
            kl.presets.small(kl.presets.gpt2).but(decoder=kl.StackDesign(2, (kl.causal | kl.prefix(3),)))
        )
    )
    assert "not a decoder" in unsupported_reason(torch.nn.Linear(2, 2))
    model = decoder()
    with kl.watch(model):
        assert "being watched" in unsupported_reason(model)
    with pytest.raises(ValueError, match="does not serve this model"):
        StaticRunner(torch.nn.Linear(2, 2))
