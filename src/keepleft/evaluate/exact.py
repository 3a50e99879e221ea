"""Is it the reference, to the letter: exact match, with case and punctuation left out of it where asked."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def matches(written: Sequence[str], references: Sequence[str], *, fold_case: bool = False,
            fold_punctuation: bool = False) -> list[bool]:
    """For each text whether it is its reference; white space around it never counts.

    Folding case takes "Straße" for "STRASSE"; folding punctuation leaves out every mark that Unicode calls punctuation,
    and takes any run of white space for one space.
    """
    if len(written) != len(references) or not written:
        raise ValueError(f"{len(written)} texts beside {len(references)} references: there must be as many, and at least one")
    fold = lambda text: folded(text, case=fold_case, punctuation=fold_punctuation)
    return [fold(a) == fold(b) for a, b in zip(written, references, strict=True)]


def exact(written: Sequence[str], references: Sequence[str], *, fold_case: bool = False,
          fold_punctuation: bool = False) -> float:
    """The share of texts that are their reference."""
    found = matches(written, references, fold_case=fold_case, fold_punctuation=fold_punctuation)
    return sum(found) / len(found)


def folded(text: str, *, case: bool = False, punctuation: bool = False) -> str:
    """What is compared."""
    if case:
        text = text.casefold()
    if punctuation:
        text = " ".join("".join(c for c in text if not unicodedata.category(c).startswith("P")).split())
    return text.strip()
