"""Objectives: inputs and targets of each."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keepleft.data.objectives import Denoising, MaskedToken, NextToken, SpanCorruption, Translation
from keepleft.data.ragged import Ragged
from keepleft.data.teacher_forcing import shift_right
from keepleft.nn.loss import IGNORE_INDEX

PAD = 0
START = 1
END = 2
MASK = 4
SENTINELS = tuple(range(50, 60))
texts = st.lists(
    st.lists(st.integers(10, 40), max_size=30).map(lambda text: [*text, END]), min_size=1, max_size=8
)
rngs = st.integers(0, 1000).map(np.random.default_rng)


@given(texts)
def test_a_target_is_what_follows_its_input(records):
    inputs, targets = shift_right(START, Ragged.from_lists(records))
    for input_tokens, target_tokens, text in zip(inputs.to_lists(), targets.to_lists(), records, strict=True):
        assert target_tokens == text
        assert input_tokens == [START, *text[:-1]]


@given(st.lists(st.lists(st.integers(10, 40), max_size=5), min_size=1, max_size=8))
def test_each_text_may_have_its_own_start_and_empty_texts_have_none(records):
    starts = np.arange(100, 100 + len(records))
    inputs, _ = shift_right(starts, Ragged.from_lists(records))
    assert inputs.to_lists() == [
        [start, *text[:-1]] if text else [] for start, text in zip(starts.tolist(), records, strict=True)
    ]


@given(texts, rngs)
def test_next_token_and_translation_share_teacher_forcing(records, rng):
    next_token = NextToken(START).examples((Ragged.from_lists(records),), rng)
    translation = Translation(START).examples(
        (Ragged.from_lists(records[::-1]), Ragged.from_lists(records)), rng
    )
    assert next_token.tokens.to_lists() == translation.tokens.to_lists()
    assert next_token.targets.to_lists() == translation.targets.to_lists()
    assert translation.source.to_lists() == records[::-1]


@given(texts, rngs)
def test_masked_tokens_are_targets_and_others_inputs_as_they_are(records, rng):
    examples = MaskedToken(MASK, 41, frozenset({PAD, START, END, MASK}), rate=0.4).examples(
        (Ragged.from_lists(records),), rng
    )
    inputs, targets = examples.tokens.to_lists(), examples.targets.to_lists()
    for input_tokens, target_tokens, text in zip(inputs, targets, records, strict=True):
        for shown, target, token in zip(input_tokens, target_tokens, text, strict=True):
            assert target in (IGNORE_INDEX, token)
            assert shown == token if target == IGNORE_INDEX else shown not in (PAD, START, END)
        assert target_tokens[-1] == IGNORE_INDEX  # the end is never masked


def test_masking_keeps_to_its_shares():
    text = Ragged(np.full(100_000, 7), np.array([100_000]))
    examples = MaskedToken(MASK, 1000, frozenset({MASK})).examples((text,), np.random.default_rng(0))
    masked = examples.targets.flat != IGNORE_INDEX
    shown = examples.tokens.flat[masked]
    assert abs(masked.mean() - 0.15) < 0.005
    assert abs((shown == MASK).mean() - 0.8) < 0.02
    assert abs((shown == 7).mean() - 0.1) < 0.02


@settings(deadline=None)
@given(texts, rngs)
def test_corrupted_spans_restore_the_text(records, rng):
    objective = SpanCorruption(PAD, END, SENTINELS)
    examples = objective.examples((Ragged.from_lists(records),), rng)
    sizes = objective.sizes((Ragged.from_lists(records).lengths,))
    lists = [part.to_lists() for part in (examples.source, examples.tokens, examples.targets)]
    for n, (source, inputs, targets) in enumerate(zip(*lists, strict=True)):
        assert inputs == [PAD, *targets[:-1]]
        spans, current = {}, None
        for token in targets[:-1]:
            if token in SENTINELS:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        restored = [part for token in source for part in (spans[token] if token in SENTINELS else [token])]
        assert restored == records[n]
        assert len(targets) <= sizes[0][n]
        assert len(source) <= sizes[1][n]


@settings(deadline=None)
@given(texts, rngs)
def test_denoising_targets_are_the_text_and_its_source_a_noisy_one(records, rng):
    objective = Denoising(START, MASK, stops=frozenset({15}), special=frozenset({PAD, START, END, MASK}))
    examples = objective.examples((Ragged.from_lists(records),), rng)
    sizes = objective.sizes((Ragged.from_lists(records).lengths,))
    for n, (noisy, text) in enumerate(zip(examples.source.to_lists(), records, strict=True)):
        assert noisy[-1] == END
        assert not set(noisy) - set(text) - {MASK}
        assert len(noisy) <= sizes[1][n]
    assert examples.targets.to_lists() == records


def test_denoising_masks_about_its_rate():
    text = [[*([20] * 2000), END]]
    examples = Denoising(START, MASK, special=frozenset({END})).examples(
        (Ragged.from_lists(text),), np.random.default_rng(1)
    )
    kept = examples.source.to_lists()[0].count(20)
    assert 0.6 < kept / 2000 < 0.9
