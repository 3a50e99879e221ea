"""A verdict is right as often as it says: against scipy, and against chance itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from keepleft.evaluation.significance import bootstrap, mcnemar

PAIRS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40)


@given(PAIRS, st.sampled_from([0.9, 0.95]))
def test_mcnemar_is_the_exact_binomial_test(pairs, level):
    first, second = zip(*pairs, strict=True)
    verdict = mcnemar(first, second, level=level)
    wins, losses = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    assert verdict.difference == pytest.approx((wins - losses) / len(pairs))
    if not wins + losses:
        assert verdict.p == 1.0
        return
    assert verdict.p == pytest.approx(stats.binomtest(wins, wins + losses).pvalue)
    assert (verdict.p < 1 - level) == ("is better than" in verdict.sentence)
    assert -1.0 <= verdict.low < verdict.high <= 1.0


@pytest.mark.parametrize(("count", "cells"), [(30, (0.5, 0.25, 0.1, 0.15)), (200, (0.8, 0.06, 0.02, 0.12))])
def test_mcnemars_interval_holds_the_truth_as_often_as_it_says(count, cells):
    rng = np.random.default_rng(11)
    held = 0
    for _ in range(400):
        cell = rng.choice(4, p=cells, size=count)  # both right, first alone, the second alone, neither
        verdict = mcnemar(cell <= 1, (cell == 0) | (cell == 2))
        held += verdict.low <= cells[1] - cells[2] <= verdict.high
    assert 0.92 <= held / 400 <= 0.985


def test_mcnemar_holds_for_thousands():
    rng = np.random.default_rng(3)
    first, second = rng.random((2, 20_000)) < [[0.72], [0.7]]
    verdict = mcnemar(first, second)
    wins = int((first & ~second).sum())
    losses = int((second & ~first).sum())
    assert verdict.p == pytest.approx(stats.binomtest(wins, wins + losses).pvalue, rel=1e-6)


def test_the_interval_is_scipys():
    rng = np.random.default_rng(5)
    first = rng.normal(0.30, 0.2, 150)
    second = first - rng.normal(0.03, 0.1, 150)
    verdict = bootstrap(first, second, samples=20_000)
    theirs = stats.bootstrap(
        (first - second,), np.mean, method="percentile", n_resamples=20_000, rng=np.random.default_rng(1)
    )
    width = theirs.confidence_interval.high - theirs.confidence_interval.low
    assert verdict.low == pytest.approx(theirs.confidence_interval.low, abs=0.03 * width)
    assert verdict.high == pytest.approx(theirs.confidence_interval.high, abs=0.03 * width)
    assert verdict.p == pytest.approx(stats.ttest_rel(first, second).pvalue, abs=0.01)


def test_equal_systems_are_told_apart_as_rarely_as_the_level_says():
    rng = np.random.default_rng(7)
    wrong = sum(bootstrap(*rng.normal(size=(2, 60)), samples=400, seed=n).p < 0.05 for n in range(400))
    assert 8 <= wrong <= 36  # of 400, 20 are to be expected


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_changing_places_changes_the_sign_and_no_verdict(pairs):
    first, second = zip(*pairs, strict=True)
    there, back = bootstrap(first, second, samples=200), bootstrap(second, first, samples=200)
    assert there.difference == pytest.approx(-back.difference)
    assert (there.low, there.high, there.p) == pytest.approx((-back.high, -back.low, back.p))
    assert there == bootstrap(first, second, samples=200)  # the same seed, the same verdict


def test_the_sentence_names_the_better():
    low, high = [0.2, 0.3, 0.25] * 20, [0.5, 0.6, 0.4] * 20
    assert bootstrap(high, low, names=("new", "old")).sentence.startswith(
        "new is better than old by 0.25 (95% interval 0.2"
    )
    assert bootstrap(low, high, names=("new", "old")).sentence.startswith("old is better than new by 0.25")
    assert bootstrap(low, high, names=("new", "old"), lower_is_better=True).sentence.startswith(
        "new is better than old"
    )
    same = bootstrap(low, low, names=("new", "old"))
    assert same.p == 1.0
    assert same.sentence.startswith("new and old cannot be told apart: a difference of 0 ")


@pytest.mark.parametrize(
    ("first", "second", "options", "message"),
    [
        ([1.0], [1.0, 2.0], {}, "1 examples beside 2"),
        ([], [], {}, "at least one"),
        ([float("nan")], [1.0], {}, "not a finite"),
        ([1.0], [1.0], {"level": 95}, "level of 95"),
        ([1.0], [1.0], {"samples": 0}, "0 samples"),
    ],
)
def test_wrong_use_raises(first, second, options, message):
    with pytest.raises(ValueError, match=message):
        bootstrap(first, second, **options)
