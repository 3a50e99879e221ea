"""The language of a text, guessed where its words tell."""

from __future__ import annotations

import pytest

from keepleft.pipelines.language_guess import guess_language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Where is the station?", "en"),
        ("Où est la gare ? Elle est dans la ville.", "fr"),
        ("Wo ist der Bahnhof?", "de"),
        ("स्टेशन कहाँ है?", "hi"),
        ("Tom.", None),
        ("Berlin 1998", None),
        ("Er sagte: the end of der Film.", None),
        ("", None),
    ],
)
def test_function_words_tell(text, language):
    assert guess_language(text) == language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Ich habe Hunger", "de"),
        ("Danke!", "de"),
        ("Straßenbahn", "de"),
        ("Schöne Überraschung", "de"),
        ("J'ai faim", "fr"),
        ("J’ai faim", "fr"),
        ("Merci beaucoup", "fr"),
        ("L'école d'été", "fr"),
        ("I am hungry", "en"),
        ("We'll manage", "en"),
    ],
)
def test_a_short_text_is_told_by_one_function_word_or_by_its_spelling(text, language):
    assert guess_language(text) == language


@pytest.mark.parametrize(
    "text", ["Paris", "Zürich", "Café Müller", "Angela Merkel", "No comment", "Die Hard", "Le Monde", "42 km"]
)
def test_names_and_words_of_two_languages_get_no_guess(text):
    assert guess_language(text) is None


@pytest.mark.parametrize(
    "text",
    [
        *("¿Dónde está la estación?", "La casa de mi madre", "No sé qué hacer", "L'Italia è bella"),
        *("Ik heb honger", "De man is in het huis", "Jestem głodny", "Где вокзал?", "駅はどこですか"),
    ],
)
def test_languages_that_are_not_in_the_table_get_no_guess(text):
    assert guess_language(text) is None


def test_a_quotation_in_another_language_leaves_the_guess_open():
    assert guess_language('What does "Ich liebe dich" mean?') is None
