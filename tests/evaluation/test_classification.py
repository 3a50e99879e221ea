"""Labels and probabilities are measured as scikit-learn measures them, calibration as its definition says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keepleft.evaluation.calibration import calibration
from keepleft.evaluation.classification import classification_metrics

theirs = pytest.importorskip("sklearn.metrics")


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), min_size=1, max_size=30))
def test_every_number_is_scikit_learns(pairs):
    said, true = zip(*pairs, strict=True)
    found = classification_metrics(said, true)
    names = sorted(set(said) | set(true))
    assert list(found.per_label) == names
    assert found.accuracy == pytest.approx(theirs.accuracy_score(true, said))
    assert found.macro_f1 == pytest.approx(theirs.f1_score(true, said, average="macro", zero_division=0))
    each = theirs.precision_recall_fscore_support(true, said, labels=names, zero_division=0)
    for one, precision, recall, f1, count in zip(found.per_label.values(), *each, strict=True):
        assert (one.precision, one.recall, one.f1, one.support) == pytest.approx(
            (precision, recall, f1, count)
        )
    if len(names) > 1:  # scikit-learn warns of a single one
        assert np.array_equal(found.confusion, theirs.confusion_matrix(true, said, labels=names))


def test_a_named_label_that_nobody_has_counts_in_the_mean():
    found = classification_metrics([0, 1, 1], [0, 1, 0], names=[0, 1, 2])
    assert found.per_label[2].f1 == 0.0
    assert found.macro_f1 == pytest.approx(
        theirs.f1_score([0, 1, 0], [0, 1, 1], labels=[0, 1, 2], average="macro", zero_division=0)
    )
    with pytest.raises(ValueError, match="2 is not among the labels 0, 1"):
        classification_metrics([2], [0], names=[0, 1])
    with pytest.raises(ValueError, match="1 labels beside 2 true ones"):
        classification_metrics(["a"], ["a", "b"])


@given(st.integers(1, 40), st.integers(2, 5), st.integers(1, 12), st.integers(0, 999))
def test_calibration_is_its_definition_and_brier_scikit_learns(count, kinds, bins, seed):
    chance = np.random.default_rng(seed)
    given_ = chance.dirichlet(np.full(kinds, 0.7), size=count)
    true = chance.integers(kinds, size=count)
    found = calibration(torch.from_numpy(given_), true.tolist(), bins=bins)
    error = 0.0
    for n in range(bins):
        inside = [
            (max(row), int(np.argmax(row)) == t)
            for row, t in zip(given_, true, strict=True)
            if n / bins < max(row) <= (n + 1) / bins
        ]
        if inside:
            error += abs(sum(p - right for p, right in inside)) / count
    assert found.error == pytest.approx(error, abs=1e-9)
    assert sum(one.count for one in found.bins) == count
    assert found.brier == pytest.approx(
        theirs.brier_score_loss(true, given_, labels=range(kinds), scale_by_half=False)
    )


def test_the_sure_and_right_are_calibrated_and_the_sure_and_wrong_are_not():
    assert calibration([[1.0, 0.0], [0.0, 1.0]], [0, 1]).error == 0.0
    worst = calibration([[1.0, 0.0], [0.0, 1.0]], [1, 0])
    assert (worst.error, worst.brier) == (1.0, 2.0)
    edge = calibration([[0.75, 0.25]] * 4, [0, 0, 0, 1], bins=4)
    assert edge.error == 0.0
    assert [one.count for one in edge.bins] == [0, 0, 4, 0]  # on an edge is in the bin below


@pytest.mark.parametrize(
    ("given_", "true", "said"),
    [
        ([[2.0, -1.0]], [0], "Take their softmax"),
        ([[0.5, 0.5]], [2], "column numbers from 0 to 1"),
        ([[0.5, 0.5]], [0, 1], "beside 2 labels"),
        ([[0.5, 0.5]], [0.5], "column numbers"),
    ],
)
def test_wrong_use_is_told(given_, true, said):
    with pytest.raises(ValueError, match=said):
        calibration(given_, true)
