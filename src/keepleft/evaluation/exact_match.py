"""Is it the reference, to the letter: exact match, with case and punctuation left out of it where asked."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def matches(
    predictions: Sequence[str],
    references: Sequence[str],
    *,
    fold_case: bool = False,
    fold_punctuation: bool = False,
) -> list[bool]:
    """For each text whether it is its reference; white space around it never counts.

    Folding case takes "Straße" for "STRASSE"; folding punctuation leaves out every mark that Unicode calls
    punctuation, and takes any run of white space for one space.
    """
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"{len(predictions)} texts beside {len(references)} references: there must be as many, and at least one"
        )
    fold = lambda text: normalise(text, case=fold_case, punctuation=fold_punctuation)
    return [fold(a) == fold(b) for a, b in zip(predictions, references, strict=True)]


def exact_match(
    predictions: Sequence[str],
    references: Sequence[str],
    *,
    fold_case: bool = False,
    fold_punctuation: bool = False,
) -> float:
    """The share of texts that are their reference."""
    results = matches(predictions, references, fold_case=fold_case, fold_punctuation=fold_punctuation)
    return sum(results) / len(results)


def normalise(text: str, *, case: bool = False, punctuation: bool = False) -> str:
    """What is compared."""
    if case:
        text = text.casefold()
    if punctuation:
        text = " ".join("".join(c for c in text if not unicodedata.category(c).startswith("P")).split())
    return text.strip()
