"""Guess which of a few languages a text is in, by its commonest words. Short texts get no guess."""

from __future__ import annotations

import re

MIN_WORDS = 2  # that tell
# words that are frequent in one of the languages, and no words of the others
_FREQUENT_WORDS = {
    "en": "the is are were have has this that with you your we they what where when and of it he she to",
    "fr": "le les une est sont je tu il elle nous vous ils et de que qui dans pour pas avec où mon ma c'est",
    "de": "der das und ist sind ich er sie wir ihr nicht ein eine mit auf zu wo wie den dem für von haben",
}
_LANGUAGES = {word: language for language, words in _FREQUENT_WORDS.items() for word in words.split()}
_DEVANAGARI = re.compile(r"[\u0900-\u097f]")


def guess_language(text: str) -> str | None:
    """Its code (en, fr, de, hi), or None where the text does not tell."""
    if _DEVANAGARI.search(text):
        return "hi"
    counts = dict.fromkeys(_FREQUENT_WORDS, 0)
    for word in re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text.lower()):
        if word in _LANGUAGES:
            counts[_LANGUAGES[word]] += 1
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] >= MIN_WORDS and counts[best] == sum(counts.values()) else None
