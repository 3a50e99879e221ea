"""The commands that a run suggests at its end."""

from __future__ import annotations

import pytest

from keepleft.runs.next_commands import line_beginning


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("new cat is here .\nthe sea is calm and the ship sails\nmore", "the sea is calm and"),
        ("rest of a line\n\nword\nthe black cat sl", "the black cat"),  # of the last line only whole words
        ("rest of a line\nthe black cat sleeps\n", "the black cat sleeps"),
        ("t of a text without any line bre", "of a text without any"),
        ("", ""),
    ],
)
def test_a_language_model_is_asked_to_continue_the_beginning_of_a_line(text, expected):
    assert line_beginning(text) == expected
