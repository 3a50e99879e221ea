"""How good labels are: accuracy, macro-F1, precision and recall of each label, and which is taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

Label = str | int


@dataclass(frozen=True)
class Of:
    """One label."""

    precision: float    # of the examples said to have it, how many do; 0 where none was said to
    recall: float       # of the examples that have it, how many were said to; 0 where none has
    f1: float           # their harmonic mean
    count: int          # the examples that have it


@dataclass(frozen=True)
class Labels:
    """All of them together."""

    accuracy: float
    macro_f1: float                             # the plain mean over labels, so a rare one counts as much as a common one
    each: dict[Label, Of]
    confusion: tuple[tuple[int, ...], ...]      # a row for each true label, a column for each said one, in the order of `each`


def labels(said: Sequence[Label], true: Sequence[Label], *, names: Sequence[Label] | None = None) -> Labels:
    """What was said beside what is true. The labels are `names`, or all that occur on either side."""
    if len(said) != len(true) or not len(said):
        raise ValueError(f"{len(said)} labels beside {len(true)} true ones: there must be as many, and at least one")
    seen = set(said) | set(true)
    known = list(names) if names is not None else sorted(seen, key=lambda label: (isinstance(label, str), label))
    if strange := sorted(map(str, seen - set(known))):
        raise ValueError(f"{', '.join(strange)} is not among the labels {', '.join(map(str, known))}: name all of them")
    pairs = Counter(zip(true, said, strict=True))
    have, told = Counter(true), Counter(said)
    each = {label: _of(pairs[label, label], told[label], have[label]) for label in known}
    return Labels(accuracy=sum(pairs[label, label] for label in known) / len(true),
                  macro_f1=sum(one.f1 for one in each.values()) / len(each), each=each,
                  confusion=tuple(tuple(pairs[a, b] for b in known) for a in known))


def _of(right: int, told: int, have: int) -> Of:
    share = lambda whole: right / whole if whole else 0.0
    return Of(share(told), share(have), 2 * right / (told + have) if told + have else 0.0, have)
