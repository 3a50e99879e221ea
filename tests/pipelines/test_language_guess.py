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
def test_frequent_words_tell(text, language):
    assert guess_language(text) == language
