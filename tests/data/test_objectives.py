"""Objectives: what is shown and what is asked, in each."""

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
chances = st.integers(0, 1000).map(np.random.default_rng)


@given(texts)
def test_a_target_is_what_follows_its_input(records):
    inputs, targets = shift_right(START, Ragged.from_lists(records))
    for shown, asked, text in zip(inputs.to_lists(), targets.to_lists(), records, strict=True):
        assert asked == text
        assert shown == [START, *text[:-1]]


@given(st.lists(st.lists(st.integers(10, 40), max_size=5), min_size=1, max_size=8))
def test_each_text_may_have_its_own_start_and_empty_texts_have_none(records):
    starts = np.arange(100, 100 + len(records))
    inputs, _ = shift_right(starts, Ragged.from_lists(records))
    assert inputs.to_lists() == [
        [start, *text[:-1]] if text else [] for start, text in zip(starts.tolist(), records, strict=True)
    ]


@given(texts, chances)
def test_the_next_token_and_the_translation_are_forced_alike(records, chance):
    alone = NextToken(START).examples((Ragged.from_lists(records),), chance)
    beside = Translation(START).examples(
        (Ragged.from_lists(records[::-1]), Ragged.from_lists(records)), chance
    )
    assert alone.tokens.to_lists() == beside.tokens.to_lists()
    assert alone.targets.to_lists() == beside.targets.to_lists()
    assert beside.source.to_lists() == records[::-1]


@given(texts, chances)
def test_masked_tokens_are_asked_and_others_shown_as_they_are(records, chance):
    lesson = MaskedToken(MASK, 41, frozenset({PAD, START, END, MASK}), rate=0.4).examples(
        (Ragged.from_lists(records),), chance
    )
    for shown, asked, text in zip(lesson.tokens.to_lists(), lesson.targets.to_lists(), records, strict=True):
        for s, a, t in zip(shown, asked, text, strict=True):
            assert a in (IGNORE_INDEX, t)
            assert s == t if a == IGNORE_INDEX else s not in (PAD, START, END)
        assert asked[-1] == IGNORE_INDEX  # the end is never covered


def test_masking_keeps_to_its_shares():
    text = Ragged(np.full(100_000, 7), np.array([100_000]))
    lesson = MaskedToken(MASK, 1000, frozenset({MASK})).examples((text,), np.random.default_rng(0))
    asked = lesson.targets.flat != IGNORE_INDEX
    shown = lesson.tokens.flat[asked]
    assert abs(asked.mean() - 0.15) < 0.005
    assert abs((shown == MASK).mean() - 0.8) < 0.02
    assert abs((shown == 7).mean() - 0.1) < 0.02


@settings(deadline=None)
@given(texts, chances)
def test_corrupted_spans_can_be_put_back(records, chance):
    goal = SpanCorruption(PAD, END, SENTINELS)
    lesson = goal.examples((Ragged.from_lists(records),), chance)
    sizes = goal.sizes((Ragged.from_lists(records).lengths,))
    told = zip(lesson.source.to_lists(), lesson.tokens.to_lists(), lesson.targets.to_lists(), strict=True)
    for n, (left, shown, taken) in enumerate(told):
        assert shown == [PAD, *taken[:-1]]
        spans, current = {}, None
        for token in taken[:-1]:
            if token in SENTINELS:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        whole = [part for token in left for part in (spans[token] if token in SENTINELS else [token])]
        assert whole == records[n]
        assert len(taken) <= sizes[0][n]
        assert len(left) <= sizes[1][n]


@settings(deadline=None)
@given(texts, chances)
def test_denoising_asks_for_the_text_and_shows_a_spoilt_one(records, chance):
    goal = Denoising(START, MASK, stops=frozenset({15}), special=frozenset({PAD, START, END, MASK}))
    lesson = goal.examples((Ragged.from_lists(records),), chance)
    sizes = goal.sizes((Ragged.from_lists(records).lengths,))
    for n, (spoilt, text) in enumerate(zip(lesson.source.to_lists(), records, strict=True)):
        assert spoilt[-1] == END
        assert not set(spoilt) - set(text) - {MASK}
        assert len(spoilt) <= sizes[1][n]
    assert lesson.targets.to_lists() == records


def test_denoising_covers_about_its_share():
    text = [[*([20] * 2000), END]]
    lesson = Denoising(START, MASK, special=frozenset({END})).examples(
        (Ragged.from_lists(text),), np.random.default_rng(1)
    )
    left = lesson.source.to_lists()[0].count(20)
    assert 0.6 < left / 2000 < 0.9
