"""Significance tests of two systems: paired bootstrap for any score, McNemar's test for right and wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CHUNK_VALUES = 1 << 22  # values resampled at a time: all samples at once would fill the memory


@dataclass(frozen=True)
class Verdict:
    """The first system compared with the second, on the same examples."""

    difference: float  # mean of the first minus mean of the second
    low: float  # confidence interval of the difference, at the requested level
    high: float
    p: float  # probability of a difference as large, either way, if the systems were equal
    sentence: str


def bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    *,
    names: tuple[str, str] = ("the first", "the second"),
    level: float = 0.95,
    samples: int = 10_000,
    seed: int = 0,
    lower_is_better: bool = False,
) -> Verdict:
    """A paired bootstrap over examples: scores of two systems on the same examples, in the same order.

    Examples are resampled with replacement, `samples` times. The interval is the percentile interval, and p
    is twice the share of samples on the far side of zero, so the interval excludes zero where p is below 1 -
    level. Raises ValueError for scores that are not paired or not finite.
    """
    _validate(first, second, level, samples)
    differences = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not np.isfinite(differences).all():
        raise ValueError("a score is not a finite number: leave such examples out on both sides")
    resampled = _resampled_means(differences, samples, np.random.default_rng(seed))
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2]).tolist()
    tail_count = min(int((resampled <= 0).sum()), int((resampled >= 0).sum()))
    p = min(1.0, 2 * (tail_count + 1) / (samples + 1))  # + 1: so many samples cannot show a smaller p
    difference = float(differences.mean())
    details = (
        f"{level:.0%} interval {low:.4g} to {high:.4g}, p = {p:.2g}, {len(differences)} examples, "
        "paired bootstrap"
    )
    sentence = verdict_sentence(
        names, difference, p, level=level, lower_is_better=lower_is_better, details=details
    )
    return Verdict(difference, low, high, p, sentence)


def mcnemar(
    first: Sequence[bool],
    second: Sequence[bool],
    *,
    names: tuple[str, str] = ("the first", "the second"),
    level: float = 0.95,
) -> Verdict:
    """McNemar's exact test of two classifiers: was each right, on the same examples, in the same order.

    Only examples that one of them alone got right tell them apart; if they were equal, each would win such an
    example with probability 1/2. The interval of the difference in accuracy is Agresti and Min's (2005):
    Wald's, with half an example more in each of the four cells. It is close, not exact, so near the level it
    may touch zero where p says otherwise; the verdict goes by p. Raises ValueError for examples that are not
    paired.
    """
    _validate(first, second, level)
    only_first = sum(bool(a) and not b for a, b in zip(first, second, strict=True))
    only_second = sum(bool(b) and not a for a, b in zip(first, second, strict=True))
    discordant = only_first + only_second
    count = len(first)
    p = min(1.0, 2 * _binomial_cdf(min(only_first, only_second), discordant))
    difference = (only_first - only_second) / count
    center = (only_first - only_second) / (count + 2)
    half_width = math.sqrt((discordant + 1) / (count + 2) - center**2) / math.sqrt(count + 2)
    half_width *= NormalDist().inv_cdf((1 + level) / 2)
    low = max(-1.0, center - half_width)
    high = min(1.0, center + half_width)
    details = (
        f"{level:.0%} interval {low:.4g} to {high:.4g}, p = {p:.2g}; alone right: {only_first} and "
        f"{only_second} of {count} examples, McNemar's exact test"
    )
    sentence = verdict_sentence(names, difference, p, level=level, details=details)
    return Verdict(difference, low, high, p, sentence)


def verdict_sentence(
    names: tuple[str, str],
    difference: float,
    p: float,
    *,
    details: str,
    level: float = 0.95,
    unit: str = "",
    lower_is_better: bool = False,
) -> str:
    """The verdict in plain words; `unit` follows the difference, `details` stand in brackets."""
    amount = f"{abs(difference):.4g}{unit and ' ' + unit}"
    if p >= 1 - level or difference == 0:
        return f"{names[0]} and {names[1]} cannot be told apart: a difference of {amount} ({details})"
    better, worse = names if (difference > 0) != lower_is_better else names[::-1]
    return f"{better} is better than {worse} by {amount} ({details})"


def _validate(first: Sequence[object], second: Sequence[object], level: float, samples: int = 1) -> None:
    if len(first) != len(second) or not len(first):
        raise ValueError(
            f"{len(first)} examples beside {len(second)}: two systems are compared on the same ones, at "
            "least one"
        )
    if not 0 < level < 1:
        raise ValueError(f"a level of {level}: it lies between 0 and 1, such as 0.95")
    if samples < 1:
        raise ValueError(f"{samples} samples: at least one is needed, and some thousands are usual")


def _resampled_means(differences: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
    """(samples,) means of examples resampled with replacement."""
    count = len(differences)
    chunk_size = max(1, CHUNK_VALUES // count)
    chunks = []
    for start in range(0, samples, chunk_size):
        indices = rng.integers(count, size=(min(chunk_size, samples - start), count))
        chunks.append(differences[indices].mean(1))
    return np.concatenate(chunks)


def _binomial_cdf(wins: int, count: int) -> float:
    """The probability of at most so many wins in `count` tosses of a fair coin."""
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    k = np.arange(wins + 1)
    log_choose = log_factorials[count] - log_factorials[k] - log_factorials[count - k]
    return float(np.exp(log_choose - count * math.log(2)).sum())
