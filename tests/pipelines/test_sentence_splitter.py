"""Sentences end where a reader of English, French, German or Hindi would say so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.pipelines.sentence_splitter import split_clauses, split_in_two, split_sentences

TEXTS = st.text(st.sampled_from("aAbZ .!?,;\n\"'(»। 3éÉ—")) | st.text(max_size=60)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Hello.", "How are you?", "I'm fine!"],
        ["Dr. Smith met J. R. Tolkien at 3 p.m.", "He left."],
        ["Er kam am 3. Mai nach Berlin.", "Das ist z. B. gut.", "Und d. h. ja."],
        ["« Bonjour ! » dit-il.", "Elle rit."],
        ["“Stop!” he said.", "“Why?” she asked."],
        ["यह किताब है।", "वह घर है।", "क्या?"],
        ["It costs 3.5 dollars.", "Yes... no. Well…", "OK."],
        ["M. Dupont est là.", "Mme. Roy aussi."],
        ["We met in 2013.", "He came later."],
        ["The U.S. Army is there."],
        ["Was?!", "Ja."],
        ["Visit https://example.org/a.B for more.", "It is free."],
        ["no end"],
    ],
)
def test_sentences_are_those_of_a_reader(sentences):
    assert [sentence.text for sentence in split_sentences(" ".join(sentences))] == sentences


@given(TEXTS)
def test_put_together_they_are_the_text(text):
    assert "".join(sentence.text + sentence.space for sentence in split_sentences(text)) == text


@given(TEXTS)
def test_no_sentence_ends_in_white_space(text):
    assert all(sentence.text == sentence.text.rstrip() for sentence in split_sentences(text))


@given(TEXTS, st.integers(1, 7))
def test_clauses_are_short_and_put_together_the_sentence(text, max_words):
    text = text.strip()
    clauses = split_clauses(text, max_words)
    assert "".join(clause.text + clause.space for clause in clauses) == text
    assert all(len(clause.text.split()) <= max_words for clause in clauses)


def test_clauses_end_at_commas_where_there_are_some():
    text = "When the rain stopped in the evening, we went down to the harbour with the children."
    assert [clause.text for clause in split_clauses(text, 12)] == [
        "When the rain stopped in the evening,",
        "we went down to the harbour with the children.",
    ]


def test_a_long_sentence_without_commas_is_cut_before_a_conjunction():
    first, second = split_clauses("we walked to the hotel by the sea because there were no taxis at all", 10)
    assert (first.text, second.text.split()[0]) == ("we walked to the hotel by the sea", "because")


@pytest.mark.parametrize(
    ("sentence", "clauses"),
    [
        ("I was born in May, and my name is Tom.", ["I was born in May,", "and my name is Tom."]),
        ("I was born in May and my name is Tom.", ["I was born in May", "and my name is Tom."]),
        ("Go to page 42 now.", ["Go to page 42 now."]),
        ("Yes, and my name is Tom Brown.", ["Yes, and my name is Tom Brown."]),
    ],
)
def test_a_sentence_is_cut_in_two_where_something_separates(sentence, clauses):
    parts = split_in_two(sentence, 3)
    assert [part.text for part in parts] == clauses
    assert "".join(part.text + part.space for part in parts) == sentence
