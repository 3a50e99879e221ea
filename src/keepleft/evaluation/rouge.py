"""How good summaries are beside references: ROUGE, by rouge-score, over words of any script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepleft.evaluation.word_split import split_words

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


class ScriptTokenizer:
    """Our words as rouge-score wants them; its own tokenizer drops all that is not ASCII.

    With a stemmer, English ones cut.
    """

    def __init__(self, stemmer: Any = None) -> None:
        self.stemmer = stemmer

    def tokenize(self, text: str) -> list[str]:
        if self.stemmer is None:
            return split_words(text)
        # as rouge-score does
        return [self.stemmer.stem(word) if len(word) > 3 else word for word in split_words(text)]


def scorer(stem: bool = False) -> Any:
    """rouge-score's scorer, with our words."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE needs rouge-score: pip install 'keepleft[metrics]'") from error
    if not stem:
        return RougeScorer(list(ROUGE_TYPES), tokenizer=ScriptTokenizer())
    from nltk.stem.porter import PorterStemmer

    return RougeScorer(list(ROUGE_TYPES), tokenizer=ScriptTokenizer(PorterStemmer()))


def rouge(
    predictions: Sequence[str], references: Sequence[str], *, stem: bool = False
) -> dict[str, list[float]]:
    """The F1 of each text, from 0 to 1, under rouge1, rouge2, rougeL and rougeLsum.

    For Lsum each line is a sentence.
    """
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"{len(predictions)} texts beside {len(references)} references: there must be as many, and at least one"
        )
    rouge_scorer = scorer(stem)
    scores = [
        rouge_scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)
    ]
    return {rouge_type: [float(score[rouge_type].fmeasure) for score in scores] for rouge_type in ROUGE_TYPES}


def mean_rouge(
    predictions: Sequence[str], references: Sequence[str], *, stem: bool = False
) -> dict[str, float]:
    """The mean F1 over all texts, from 0 to 1, of each kind of ROUGE."""
    return {
        rouge_type: sum(values) / len(values)
        for rouge_type, values in rouge(predictions, references, stem=stem).items()
    }


def signature(*, stem: bool = False) -> str:
    """What to print beside the numbers, so that others can repeat them."""
    from importlib.metadata import version

    return f"f1|mean|words:unicode|stem:{'porter' if stem else 'no'}|lsum:lines|rouge-score:{version('rouge-score')}"
