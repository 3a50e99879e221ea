"""Numbers, amounts and times change from one language's notation into another's, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.pipelines.number_notation import convert_number

LANGUAGES = st.sampled_from(["fr", "de", "hi"])


@pytest.mark.parametrize(
    ("english", "french", "german"),
    [
        ("1,250.5", "1 250,5", "1.250,5"),
        ("1,000,000", "1 000 000", "1.000.000"),
        ("3.14", "3,14", "3,14"),
        ("2013", "2013", "2013"),
        ("-12.5", "-12,5", "-12,5"),
        ("37%", "37 %", "37 %"),
        ("$25", "25 $", "25 $"),
        ("€1,250.50", "1 250,50 €", "1.250,50 €"),
        ("18:45", "18 h 45", "18:45"),
        ("2020-05-12", "2020-05-12", "2020-05-12"),
        ("A380", "A380", "A380"),
        ("1.2.3", "1.2.3", "1.2.3"),
        ("0171 5551234", "0171 5551234", "0171 5551234"),
    ],
)
def test_each_language_has_its_notation(english, french, german):
    assert convert_number(english, "en", "fr") == french
    assert convert_number(english, "en", "de") == german
    assert convert_number(french, "fr", "en") == english
    assert convert_number(german, "de", "en") == english
    assert convert_number(english, "en", "hi") == english


@given(st.integers(0, 10**9), st.integers(0, 9999), LANGUAGES)
def test_there_and_back_it_is_the_same_number(whole, fraction, language):
    number = f"{whole:,}.{fraction}"
    assert convert_number(convert_number(number, "en", language), language, "en") == number


@given(st.integers(0, 23), st.integers(0, 59), LANGUAGES)
def test_there_and_back_it_is_the_same_time(hour, minute, language):
    time = f"{hour}:{minute:02}"
    assert convert_number(convert_number(time, "en", language), language, "en") == time


def test_german_and_french_times_are_read():
    assert convert_number("18.30", "de", "en") == "18:30"  # as it stands before Uhr
    assert convert_number("18h30", "fr", "en") == "18:30"


@pytest.mark.parametrize(
    ("english", "french"),
    [("3:45 pm", "15 h 45"), ("3:45 p.m", "15 h 45"), ("12:05 AM", "0 h 05"), ("12:30pm", "12 h 30")],
)
def test_hours_after_noon_are_counted_on(english, french):
    assert convert_number(english, "en", "fr") == french
    assert convert_number(english, "en", "hi") == french.replace(" h ", ":")
    assert convert_number(english, "en", "en") == english
