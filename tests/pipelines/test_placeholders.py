"""What a translation copies is protected by placeholders, and comes back as it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.pipelines.placeholders import PLACEHOLDERS, is_complete, protect, restore


@pytest.mark.parametrize(
    ("text", "copied"),
    [
        ("See https://example.org/a?b=1, please.", ("https://example.org/a?b=1",)),
        ("Mail tom.smith@mail.example.org!", ("tom.smith@mail.example.org",)),
        ("It costs 10,000 dollars at 10:30 on page 42.", ("42",)),
        ("The A380 has 4 engines, since the 21st of May 2013.", ("A380", "2013")),
        ("I'm 30% sure, as in the 1990s.", ()),
        ("room 101 and room 102, not room 101", ("101", "102")),
        ("Go to example.com/path now. @tom #ai", ("example.com/path", "@tom", "#ai")),
        ("मेरा नंबर 12345 है।", ("12345",)),
        ("11 22 33 44 55", ("11", "22", "33", "44")),
        ("Nothing to copy here.", ()),
    ],
)
def test_addresses_numbers_and_codes_are_copied(text, copied):
    assert protect(text).copied == copied


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
