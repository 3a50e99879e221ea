"""How good summaries are beside references: ROUGE, by rouge-score, over words of any script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepleft.evaluate.words import words

KINDS = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class Words:
    """Our words as rouge-score wants them; its own tokenizer drops all that is not ASCII. With a stemmer, English ones cut."""

    def __init__(self, stemmer: Any = None) -> None:
        self.stemmer = stemmer

    def tokenize(self, text: str) -> list[str]:
        if self.stemmer is None:
            return words(text)
        return [self.stemmer.stem(word) if len(word) > 3 else word for word in words(text)]  # as rouge-score does


def scorer(stem: bool = False) -> Any:
    """rouge-score's scorer, with our words."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE needs rouge-score: pip install 'keepleft[metrics]'") from error
    if not stem:
        return RougeScorer(list(KINDS), tokenizer=Words())
    from nltk.stem.porter import PorterStemmer

    return RougeScorer(list(KINDS), tokenizer=Words(PorterStemmer()))


def rouge(written: Sequence[str], references: Sequence[str], *, stem: bool = False) -> dict[str, list[float]]:
    """The F1 of each text, from 0 to 1, under rouge1, rouge2, rougeL and rougeLsum. For Lsum each line is a sentence."""
    if len(written) != len(references) or not written:
        raise ValueError(f"{len(written)} texts beside {len(references)} references: there must be as many, and at least one")
    by = scorer(stem)
    found = [by.score(reference, text) for text, reference in zip(written, references, strict=True)]
    return {kind: [float(one[kind].fmeasure) for one in found] for kind in KINDS}


def summary(written: Sequence[str], references: Sequence[str], *, stem: bool = False) -> dict[str, float]:
    """The mean F1 over all texts, from 0 to 1, of each kind of ROUGE."""
    return {kind: sum(each) / len(each) for kind, each in rouge(written, references, stem=stem).items()}


def signature(*, stem: bool = False) -> str:
    """What to print beside the numbers, so that others can repeat them."""
    from importlib.metadata import version

    return f"f1|mean|words:unicode|stem:{'porter' if stem else 'no'}|lsum:lines|rouge-score:{version('rouge-score')}"
