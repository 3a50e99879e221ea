"""How good written texts are beside references: BLEU and chrF, by sacrebleu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def metrics() -> tuple[Any, Any]:
    """sacrebleu's BLEU and CHRF."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("BLEU needs sacrebleu: pip install 'keepleft[metrics]'") from error
    return BLEU, CHRF


def translation(written: Sequence[str], references: Sequence[str], *, tokenize: str = "13a",
                lowercase: bool = False) -> dict[str, float]:
    """bleu, chrf and exact (the share of texts that are the reference to the letter). For text that is already split into
    words, tokenize="none"."""
    if len(written) != len(references) or not written:
        raise ValueError(f"{len(written)} texts beside {len(references)} references: there must be as many, and at least one")
    of_words, of_letters = metrics()
    bleu = of_words(tokenize=tokenize, lowercase=lowercase, force=True).corpus_score(list(written), [list(references)])
    chrf = of_letters(lowercase=lowercase).corpus_score(list(written), [list(references)])
    same = sum(a == b for a, b in zip(written, references, strict=True))
    return {"bleu": bleu.score, "chrf": chrf.score, "exact": same / len(written)}
