"""Calibration of class probabilities: expected calibration error and Brier score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Bin:
    """The examples whose highest probability lies above `low` and not above `high`."""

    low: float
    high: float
    count: int
    confidence: float  # their mean highest probability; 0 in an empty bin
    accuracy: float  # the share of them that is right; 0 in an empty bin


@dataclass(frozen=True)
class Calibration:
    error: float  # mean |confidence - accuracy| over bins, weighted by their counts; 0 is best, 1 worst
    brier: float  # mean squared distance of the probabilities from the one-hot truth; 0 is best, 2 worst
    bins: tuple[Bin, ...]


def calibration(probabilities: ArrayLike, true: Sequence[int], *, bins: int = 15) -> Calibration:
    """Calibration of (N, labels) probabilities, given the N true labels as column numbers.

    Each row sums to 1. Raises ValueError if the shapes differ, a row is no distribution, or a label is no
    column.
    """
    probs = np.asarray(probabilities, dtype=np.float64)
    targets = np.asarray(true)
    if probs.ndim != 2 or len(probs) != len(targets) or not len(probs):
        raise ValueError(
            f"probabilities of shape {probs.shape} beside {len(targets)} labels: a row for each label is "
            "needed, and at least one"
        )
    if probs.min() < 0 or np.abs(probs.sum(1) - 1).max() > 1e-3:
        raise ValueError(
            "a row of probabilities does not sum to 1, or has one below 0: are these logits? Take their "
            "softmax"
        )
    if targets.dtype.kind not in "iu" or targets.min() < 0 or targets.max() >= probs.shape[1]:
        raise ValueError(f"the true labels must be column numbers from 0 to {probs.shape[1] - 1}")
    if bins < 1:
        raise ValueError(f"{bins} bins: at least one is needed")
    confidences = probs.max(1)
    correct = probs.argmax(1) == targets
    edges = np.linspace(0.0, 1.0, bins + 1)
    # side="left": a probability on an edge belongs to the bin below it
    bin_index = np.clip(np.searchsorted(edges, confidences, side="left") - 1, 0, bins - 1)
    bin_stats = []
    for n in range(bins):
        in_bin = bin_index == n
        count = int(in_bin.sum())
        confidence = float(confidences[in_bin].mean()) if count else 0.0
        accuracy = float(correct[in_bin].mean()) if count else 0.0
        bin_stats.append(Bin(float(edges[n]), float(edges[n + 1]), count, confidence, accuracy))
    error = sum(stats.count * abs(stats.confidence - stats.accuracy) for stats in bin_stats) / len(probs)
    residuals = probs.copy()
    residuals[np.arange(len(probs)), targets] -= 1.0
    return Calibration(error, float((residuals**2).sum(1).mean()), tuple(bin_stats))
