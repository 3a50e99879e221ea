"""Does a probability mean what it says: expected calibration error, and the Brier score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Bin:
    """The examples whose highest probability lies above `low` and not above `high`."""

    low: float
    high: float
    count: int
    confidence: float   # their mean highest probability
    accuracy: float     # the share of them that is right; both 0 in an empty bin


@dataclass(frozen=True)
class Calibration:
    error: float            # mean gap of confidence and accuracy, by how many examples a bin has; 0 is best, 1 worst
    brier: float            # mean squared distance of the probabilities from what is true, over all labels; 0 best, 2 worst
    bins: tuple[Bin, ...]


def calibration(probabilities: Any, true: Sequence[int], *, bins: int = 15) -> Calibration:
    """(N, labels) probabilities, each row summing to 1, and the N true labels as column numbers."""
    given, wanted = np.asarray(probabilities, dtype=np.float64), np.asarray(true)
    if given.ndim != 2 or len(given) != len(wanted) or not len(given):
        raise ValueError(f"probabilities of shape {given.shape} beside {len(wanted)} labels: a row for each label is needed, "
                         "and at least one")
    if given.min() < 0 or np.abs(given.sum(1) - 1).max() > 1e-3:
        raise ValueError("a row of probabilities does not sum to 1, or has one below 0: are these scores? Take their softmax")
    if wanted.dtype.kind not in "iu" or wanted.min() < 0 or wanted.max() >= given.shape[1]:
        raise ValueError(f"the true labels must be column numbers from 0 to {given.shape[1] - 1}")
    if bins < 1:
        raise ValueError(f"{bins} bins: at least one is needed")
    sure, right = given.max(1), given.argmax(1) == wanted
    edges = np.linspace(0.0, 1.0, bins + 1)
    place = np.clip(np.searchsorted(edges, sure, side="left") - 1, 0, bins - 1)  # a probability on an edge is in the bin below
    found = []
    for n in range(bins):
        inside = place == n
        count = int(inside.sum())
        found.append(Bin(float(edges[n]), float(edges[n + 1]), count, *(
            (float(sure[inside].mean()), float(right[inside].mean())) if count else (0.0, 0.0))))
    error = sum(one.count * abs(one.confidence - one.accuracy) for one in found) / len(given)
    far = given.copy()
    far[np.arange(len(given)), wanted] -= 1.0
    return Calibration(error, float((far ** 2).sum(1).mean()), tuple(found))
