"""What a translation copies is protected by placeholders, and comes back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.pipelines.placeholders import (
    PLACEHOLDERS,
    copied_pattern,
    cut_around_copied,
    is_complete,
    protect,
    restore,
)


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("See https://example.org/a?b=1, please.", ("https://example.org/a?b=1",)),
        ("Mail tom.smith@mail.example.org!", ("tom.smith@mail.example.org",)),
        ("It costs 10,000 dollars at 10:30 on page 42.", ("10,000", "10:30", "42")),
        ("The A380 has 4 engines, since the 21st of May 2013.", ("A380", "2013")),
        ("I'm 30% sure, as in the 1990s.", ("30%",)),
        ("It was -12.5 degrees, and $5.", ("-12.5", "$5")),
        (
            "From 12/05/2020 to 2020-06-01, 10-18 h, version 1.2.3.",
            ("12/05/2020", "2020-06-01", "10-18", "1.2.3"),
        ),
        ("Call +49 30 1234567, the 21st of May has 5 of 10km.", ("+49 30 1234567",)),
        ("room 101 and room 102, not room 101", ("101", "102")),
        ("Go to example.com/path now. @tom #ai", ("example.com/path", "@tom", "#ai")),
        ("मेरा नंबर 12345 है।", ("12345",)),
        ("11 22 33 44 55", ("11", "22", "33", "44")),
        ("Nothing to copy here.", ()),
    ],
)
def test_addresses_numbers_and_codes_are_copied(text, copied):
    assert protect(text).copied == copied


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("Das kostet 1.250,50 € um 18.30 Uhr, also 3,5 %.", ("1.250,50 €", "18.30", "3,5 %")),
        (
            "Il a 10 000 euros à 18 h 45 ou 18h50, le 24.12.2020.",
            ("10 000", "18 h 45", "18h50", "24.12.2020"),
        ),
    ],
)
def test_numbers_are_read_as_their_language_writes_them(text, copied):
    assert protect(text, "de").copied == protect(text, "fr").copied == copied


@given(st.text() | st.from_regex(r"([a-z]+ |\d{2,5} |www\.[a-z]+\.org ){1,6}", fullmatch=True))
def test_restored_it_is_the_text_again(text):
    protected = protect(text)
    if any(mark in text for mark in PLACEHOLDERS):
        assert protected == (text, ())
    else:
        assert restore(protected, protected.text) == text
        assert is_complete(protected, protected.text)


def test_a_placeholder_that_is_lost_or_made_up_is_noticed():
    protected = protect("page 42")
    assert not is_complete(protected, "la page")
    assert not is_complete(protected, f"la page {PLACEHOLDERS[0]} {PLACEHOLDERS[1]}")
    assert restore(protected, f"la page {PLACEHOLDERS[0]}{PLACEHOLDERS[1]}") == "la page 42"


def test_numbers_come_back_as_the_other_language_writes_them():
    protected = protect("$1,250.50 at 6:05")
    assert restore(protected, protected.text, "fr") == "1 250,50 $ at 6 h 05"
    assert restore(protected, protected.text, "de") == "1.250,50 $ at 6:05"


def test_a_french_time_has_no_second_word_for_the_hour():
    source = protect("We meet at 3:45 pm.")
    assert restore(source, f"On se voit à {PLACEHOLDERS[0]} heures.", "fr") == "On se voit à 15 h 45."
    assert restore(protect("page 42"), f"{PLACEHOLDERS[0]} heures", "fr") == "42 heures"


ITEMS = (
    "1,234.56",
    "10:30",
    "2021",
    "a.b@c.org",
    "https://x.org/a",
    "A380",
    "/usr/bin/python",
    "<b>",
    "😀",
    "$5",
)
WORDS = ("he", "paid", "at", "and", "to", "the", "in", "sea", ".", ",")


@given(words=st.lists(st.sampled_from(ITEMS + WORDS), max_size=12))
def test_the_parts_of_a_cut_sentence_are_the_sentence(words):
    text = " ".join(words)
    parts = cut_around_copied(text)
    assert "".join(part.text for part in parts) == text
    found = list(copied_pattern("en").finditer(text))
    if len(found) == 1:
        assert [part.text for part in parts if part.is_copied] == [found[0][0]]
    if len(found) > 1:  # both have something that is copied
        first, second = parts
        assert not first.is_copied
        assert not second.is_copied
        assert copied_pattern("en").search(first.text)
        assert copied_pattern("en").search(second.text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("He paid $5 at 10:30 to Bob.", ["He paid $5 ", "at 10:30 to Bob."]),
        ("on 13 May 2021 at 10:30", ["on 13 May 2021 ", "at 10:30"]),
        ("Room A380, house B12", ["Room A380, house ", "B12"]),
        ("It is 10:30 now.", ["It is ", "10:30", " now."]),
        ("10:30", ["10:30"]),
        ("the sea", ["the sea"]),
    ],
)
def test_a_sentence_is_cut_where_a_phrase_begins(text, parts):
    assert [part.text for part in cut_around_copied(text)] == parts


def test_paths_and_markup_are_copied():
    text = "See /usr/bin/python, ~/notes.txt and <b class='x'>this</b>, and/or 1/2 of it."
    assert protect(text).copied == ("/usr/bin/python", "~/notes.txt", "<b class='x'>", "</b>")


def test_more_than_there_are_placeholders_is_noticed():
    assert not protect("10, 20, 30 and 40").is_partial
    assert protect("10, 20, 30, 40 and 50").is_partial
    assert not protect("10, 20, 30, 40 and 10").is_partial
