"""ROUGE is rouge-score's on English, and works in every script; exact match folds what it is told to."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.evaluation.exact_match import exact_match, matches
from keepleft.evaluation.rouge import ROUGE_TYPES, mean_rouge, rouge, signature, split_words

pytest.importorskip("rouge_score")
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import DefaultTokenizer


@given(st.text(string.printable, max_size=60))
def test_on_ascii_words_are_rouge_scores_own(text):
    assert split_words(text) == DefaultTokenizer().tokenize(text)


@given(st.text(max_size=40), st.text(max_size=40))
def test_words_never_straddle_a_space(one, other):
    assert split_words(f"{one} {other}") == split_words(one) + split_words(other)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("हिन्दी में, लिखा है।", ["हिन्दी", "में", "लिखा", "है"]),
        ("Die STRASSE; straße", ["die", "strasse", "strasse"]),
        ("l’été cafe\u0301", ["l", "été", "café"]),
        ("我爱GPT2模型。", ["我", "爱", "gpt2", "模", "型"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("می\u200cخواهم", ["میخواهم"]),
        ("Ёлка_дом", ["ёлка", "дом"]),
    ],
)
def test_words_of_other_scripts(text, words):
    assert split_words(text) == words


@pytest.mark.parametrize("stem", [False, True])
def test_scores_on_english_are_rouge_scores_own(stem):
    references = ["The cats were sitting.\nThey watched running dogs.", "Rain fell on the plains all day."]
    predictions = ["A cat sat.\nIt watched the dogs run.", "All day the rain was falling on a plain."]
    theirs = RougeScorer(list(ROUGE_TYPES), use_stemmer=stem)
    scores = rouge(predictions, references, stem=stem)
    for n, (reference, text) in enumerate(zip(references, predictions, strict=True)):
        for rouge_type, score in theirs.score(reference, text).items():
            assert scores[rouge_type][n] == pytest.approx(score.fmeasure)
    assert mean_rouge(predictions, references, stem=stem) == {
        rouge_type: pytest.approx(sum(values) / 2) for rouge_type, values in scores.items()
    }


def test_other_scripts_count():
    assert mean_rouge(["बिल्ली बैठी है"], ["बिल्ली बैठी थी"])["rouge1"] == pytest.approx(2 / 3)
    assert mean_rouge(["猫坐着"], ["猫坐着"]) == dict.fromkeys(ROUGE_TYPES, 1.0)
    default_score = RougeScorer(["rouge1"]).score("猫坐着", "猫坐着")["rouge1"]
    assert default_score.fmeasure == 0.0


def test_the_signature_says_what_was_done():
    assert signature(stem=True).startswith("f1|mean|words:unicode|stem:porter|lsum:lines|rouge-score:")


def test_exact_match_folds_what_it_is_told_to():
    predictions, references = [" Paris\n", "paris", "“Paris!”", "London"], ["Paris"] * 4
    assert matches(predictions, references) == [True, False, False, False]
    assert matches(predictions, references, fold_case=True) == [True, True, False, False]
    assert exact_match(predictions, references, fold_case=True, fold_punctuation=True) == 0.75
    assert exact_match(["a ,  b"], ["a b"], fold_punctuation=True) == 1.0
    assert exact_match(["STRASSE।"], ["straße"], fold_case=True, fold_punctuation=True) == 1.0


def test_as_many_texts_as_references():
    for metric in (exact_match, mean_rouge):
        with pytest.raises(ValueError, match="1 texts beside 2 references"):
            metric(["a"], ["a", "b"])
        with pytest.raises(ValueError, match="at least one"):
            metric([], [])
