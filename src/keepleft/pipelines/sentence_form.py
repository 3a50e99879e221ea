"""Bring a text into the form that translators learn from: a capital first, a full stop last, no CAPITALS.

"hello" and "WHERE IS IT" become "Hello." and "Where is it?"; their translations get the form of the text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from keepleft.pipelines.sentence_splitter import PHRASE_OPENERS

_QUESTION = re.compile(
    r"""(?:who|whose|what|where|when|why|how|which
    |(?:is|are|am|was|were|do|does|did|can|could|will|would|shall|should|have|has|may)\s
      (?:i|you|he|she|it|we|they|this|that|there|the|my|your|anyone|anybody)
    |où|qui|quand|comment|pourquoi|combien|quels?|quelles?|qu'|est-ce|\w+-(?:tu|vous|il|elle|nous|ils|elles|ce)
    |wo|wer|wem|wen|was|wann|warum|wieso|wie|woher|wohin|welche[rsnm]?
    |(?:ist|sind|bist|hast|hat|haben|kann|kannst|können|könnte|könnten|wird|willst|darf)\s
      (?:ich|du|er|sie|es|wir|ihr|das|der|die)
    |क्या|कहाँ|कहां|कब|क्यों|कैसे|कौन)\b""",
    re.VERBOSE | re.IGNORECASE,
)
_FIRST_WORD = re.compile(r"[^\W\d_]+")
MAX_FRAGMENT_WORDS = 12  # a longer text without a full stop is a clause of a sentence, and stays as it is
_ENDING = re.compile(r"[ \u00a0\u202f]*[.।]$")


class SentenceForm(NamedTuple):
    """A sentence in the usual form, and what it takes to undo that."""

    text: str
    is_upper: bool = False
    begins_lower: bool = False
    lacks_stop: bool = False

    def undo(self, translation: str) -> str:
        """A translation in the form that the text had; a question mark stays.

        Only conjunctions and prepositions lose their capital: of other words nobody knows whether they are
        names, or nouns of German.
        """
        if self.lacks_stop:
            translation = _ENDING.sub("", translation)
        word = _FIRST_WORD.match(translation) if self.begins_lower and translation[-1:] != "?" else None
        if word and word[0].istitle() and word[0].lower() in PHRASE_OPENERS:
            translation = translation[:1].lower() + translation[1:]
        return translation.upper() if self.is_upper else translation


def usual_form(text: str) -> SentenceForm:
    is_upper = text.isupper() and len(re.findall(r"[^\W\d_]{2,}", text)) > 1
    if is_upper:
        text = text.capitalize()
    begins_lower = text[:1].islower()
    lacks_stop = bool(text) and (text[-1] == "," or text[-1].isalnum() or "\u0900" <= text[-1] <= "\u0963")
    if len(text.split()) <= MAX_FRAGMENT_WORDS:
        text = text[:1].upper() + text[1:]
        if lacks_stop and text[-1] != ",":
            text += "?" if _QUESTION.match(text) else "।" if "\u0900" <= text[-1] <= "\u0963" else "."
    return SentenceForm(text, is_upper, begins_lower, lacks_stop)
