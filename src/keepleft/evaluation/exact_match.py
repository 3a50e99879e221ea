"""Exact match with a reference, optionally ignoring case and punctuation."""

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
    """For each text, whether it equals its reference. Leading and trailing white space never counts.

    Folding case makes "Straße" equal "STRASSE". Folding punctuation drops every character that Unicode calls
    punctuation and collapses each run of white space to one space. Raises ValueError if there are not as many
    texts as references.
    """
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"{len(predictions)} texts beside {len(references)} references: there must be as many, and at "
            "least one"
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
    """The share of texts that equal their reference; options as in `matches`."""
    results = matches(predictions, references, fold_case=fold_case, fold_punctuation=fold_punctuation)
    return sum(results) / len(results)


def normalise(text: str, *, case: bool = False, punctuation: bool = False) -> str:
    """The text in the form in which it is compared; `case` and `punctuation` say what is folded."""
    if case:
        text = text.casefold()
    if punctuation:
        text = " ".join("".join(c for c in text if not unicodedata.category(c).startswith("P")).split())
    return text.strip()
