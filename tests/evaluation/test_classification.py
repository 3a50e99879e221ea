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
    predicted, true = zip(*pairs, strict=True)
    metrics = classification_metrics(predicted, true)
    names = sorted(set(predicted) | set(true))
    assert list(metrics.per_label) == names
    assert metrics.accuracy == pytest.approx(theirs.accuracy_score(true, predicted))
    assert metrics.macro_f1 == pytest.approx(
        theirs.f1_score(true, predicted, average="macro", zero_division=0)
    )
    expected = theirs.precision_recall_fscore_support(true, predicted, labels=names, zero_division=0)
    for label_metrics, precision, recall, f1, count in zip(
        metrics.per_label.values(), *expected, strict=True
    ):
        assert (
            label_metrics.precision,
            label_metrics.recall,
            label_metrics.f1,
            label_metrics.support,
        ) == pytest.approx((precision, recall, f1, count))
    if len(names) > 1:  # scikit-learn warns of a single label
        assert np.array_equal(metrics.confusion, theirs.confusion_matrix(true, predicted, labels=names))


def test_a_named_label_that_nobody_has_counts_in_the_mean():
    metrics = classification_metrics([0, 1, 1], [0, 1, 0], names=[0, 1, 2])
    assert metrics.per_label[2].f1 == 0.0
    assert metrics.macro_f1 == pytest.approx(
        theirs.f1_score([0, 1, 0], [0, 1, 1], labels=[0, 1, 2], average="macro", zero_division=0)
    )
    with pytest.raises(ValueError, match="2 is not among the labels 0, 1"):
        classification_metrics([2], [0], names=[0, 1])
    with pytest.raises(ValueError, match="1 labels beside 2 true ones"):
        classification_metrics(["a"], ["a", "b"])


@given(st.integers(1, 40), st.integers(2, 5), st.integers(1, 12), st.integers(0, 999))
def test_calibration_is_its_definition_and_brier_scikit_learns(count, labels, bins, seed):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(labels, 0.7), size=count)
    true = rng.integers(labels, size=count)
    result = calibration(torch.from_numpy(probabilities), true.tolist(), bins=bins)
    error = 0.0
    for n in range(bins):
        in_bin = [
            (max(row), int(np.argmax(row)) == t)
            for row, t in zip(probabilities, true, strict=True)
            if n / bins < max(row) <= (n + 1) / bins
        ]
        if in_bin:
            error += abs(sum(p - correct for p, correct in in_bin)) / count
    assert result.error == pytest.approx(error, abs=1e-9)
    assert sum(stats.count for stats in result.bins) == count
    assert result.brier == pytest.approx(
        theirs.brier_score_loss(true, probabilities, labels=range(labels), scale_by_half=False)
    )


def test_the_sure_and_right_are_calibrated_and_the_sure_and_wrong_are_not():
    assert calibration([[1.0, 0.0], [0.0, 1.0]], [0, 1]).error == 0.0
    worst = calibration([[1.0, 0.0], [0.0, 1.0]], [1, 0])
    assert (worst.error, worst.brier) == (1.0, 2.0)
    edge = calibration([[0.75, 0.25]] * 4, [0, 0, 0, 1], bins=4)
    assert edge.error == 0.0
    assert [stats.count for stats in edge.bins] == [0, 0, 4, 0]  # on an edge is in the bin below


@pytest.mark.parametrize(
    ("probabilities", "true", "message"),
    [
        ([[2.0, -1.0]], [0], "Take their softmax"),
        ([[0.5, 0.5]], [2], "column numbers from 0 to 1"),
        ([[0.5, 0.5]], [0, 1], "beside 2 labels"),
        ([[0.5, 0.5]], [0.5], "column numbers"),
    ],
)
def test_wrong_use_raises(probabilities, true, message):
    with pytest.raises(ValueError, match=message):
        calibration(probabilities, true)
