"""ROUGE by rouge-score, over words of any script."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nltk.stem.porter import PorterStemmer
    from rouge_score.rouge_scorer import RougeScorer

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")

# Scripts written without spaces, in which a character is the nearest thing to a word
# fmt: off
UNSPACED_SCRIPTS = (
    (0x0E00, 0x0EFF),    # Thai, Lao
    (0x1000, 0x109F),    # Myanmar
    (0x1780, 0x17FF),    # Khmer
    (0x3040, 0x30FF),    # Japanese syllables
    (0x3400, 0x4DBF),    # Chinese characters, from here on
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)
# fmt: on


def rouge(
    predictions: Sequence[str], references: Sequence[str], *, stem: bool = False
) -> dict[str, list[float]]:
    """F1 of each text, from 0 to 1, by ROUGE type. For rougeLsum each line is a sentence.

    Raises ValueError if there are not as many texts as references.
    """
    if len(predictions) != len(references) or not predictions:
        raise ValueError(
            f"{len(predictions)} texts beside {len(references)} references: there must be as many, and at "
            "least one"
        )
    scorer = rouge_scorer(stem)
    scores = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
    return {rouge_type: [float(score[rouge_type].fmeasure) for score in scores] for rouge_type in ROUGE_TYPES}


def mean_rouge(
    predictions: Sequence[str], references: Sequence[str], *, stem: bool = False
) -> dict[str, float]:
    """Mean F1 over all texts, from 0 to 1, by ROUGE type."""
    return {
        rouge_type: sum(values) / len(values)
        for rouge_type, values in rouge(predictions, references, stem=stem).items()
    }


def signature(*, stem: bool = False) -> str:
    """What to cite with the numbers, so that others can reproduce them."""
    from importlib.metadata import version

    stemmer = "porter" if stem else "no"
    return f"f1|mean|words:unicode|stem:{stemmer}|lsum:lines|rouge-score:{version('rouge-score')}"


def rouge_scorer(stem: bool = False) -> RougeScorer:
    """rouge-score's scorer with our word splitting; `stem` takes Porter's stemmer, which is for English."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise ImportError("ROUGE needs rouge-score: pip install 'keepleft[metrics]'") from error
    if not stem:
        return RougeScorer(list(ROUGE_TYPES), tokenizer=WordTokenizer())
    from nltk.stem.porter import PorterStemmer

    return RougeScorer(list(ROUGE_TYPES), tokenizer=WordTokenizer(PorterStemmer()))


class WordTokenizer:
    """`split_words` as a tokenizer for rouge-score, whose own drops everything that is not ASCII."""

    def __init__(self, stemmer: PorterStemmer | None = None) -> None:
        self.stemmer = stemmer

    def tokenize(self, text: str) -> list[str]:
        words = split_words(text)
        if self.stemmer is None:
            return words
        return [self.stemmer.stem(word) if len(word) > 3 else word for word in words]  # as rouge-score does


def split_words(text: str) -> list[str]:
    """Case-folded words without punctuation; in scripts without spaces, characters with their marks.

    On ASCII these are the tokens of rouge-score's own tokenizer, which drops everything else. Python's `\\w`
    would not do: it splits at vowel signs, and with them most words of Hindi.
    """
    out: list[str] = []
    previous = (
        ""  # the last character: "spaced" (of a word), "alone" (a word by itself), or "" (no part of a word)
    )
    for c in unicodedata.normalize("NFKC", text).casefold():
        category = unicodedata.category(c)
        if category == "Cf":  # joiners and other invisible characters neither split words nor belong to them
            continue
        if category[0] not in "LMN":
            previous = ""
            continue
        is_unspaced = any(low <= ord(c) <= high for low, high in UNSPACED_SCRIPTS)
        if (previous and category[0] == "M") or (previous == "spaced" and not is_unspaced):
            out[-1] += c
        else:
            out.append(c)
            previous = "alone" if is_unspaced else "spaced"
    return out
