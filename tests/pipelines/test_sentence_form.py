"""Texts are brought into the form that translators learn from, and their translations back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.pipelines.sentence_form import usual_form


@pytest.mark.parametrize(
    ("text", "usual"),
    [
        ("hello", "Hello."),
        ("the red car", "The red car."),
        ("where is the station", "Where is the station?"),
        ("can you help me", "Can you help me?"),
        ("have a nice day", "Have a nice day."),
        ("où est la gare", "Où est la gare?"),
        ("parlez-vous anglais", "Parlez-vous anglais?"),
        ("wo ist der Bahnhof", "Wo ist der Bahnhof?"),
        ("यह किताब बहुत अच्छी है", "यह किताब बहुत अच्छी है।"),
        ("WHERE IS THE STATION?", "Where is the station?"),
        ("NATO", "NATO."),
        ("It rains.", "It rains."),
        ("the rain,", "The rain,"),
        ("", ""),
        ("one two three four five six seven eight nine ten eleven twelve thirteen",) * 2,
    ],
)
def test_a_capital_first_a_full_stop_last(text, usual):
    assert usual_form(text).text == usual


def test_a_translation_gets_the_form_of_the_text():
    assert usual_form("the red car").undo("La voiture rouge.") == "La voiture rouge"
    assert usual_form("where is it").undo("Où est-ce ?") == "Où est-ce ?"
    assert usual_form("WHERE IS IT?").undo("Où est-ce ?") == "OÙ EST-CE ?"
    assert usual_form("It rains.").undo("Il pleut.") == "Il pleut."
    assert usual_form("and it rains,").undo("Und es regnet.") == "und es regnet"
    assert usual_form("berries are red").undo("Beeren sind rot.") == "Beeren sind rot"


@given(st.from_regex(r"[A-Z][a-z]{1,8}( [a-z]{1,8}){0,5}[.!?]", fullmatch=True))
def test_a_sentence_in_the_usual_form_stays_as_it_is(sentence):
    form = usual_form(sentence)
    assert form.text == sentence
    assert form.undo(sentence) == sentence
