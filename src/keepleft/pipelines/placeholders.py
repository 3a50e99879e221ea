"""Placeholders for what a translation copies: addresses, paths, markup, numbers, codes, emoji.

A translator that was trained with placeholders sees one character instead of each, and puts it where it
belongs. The characters are of Unicode's private use area, so no text has them for another reason. Numbers,
amounts and times come back as the other language writes them.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from keepleft.pipelines.number_notation import ENGLISH, NOTATIONS, convert_number
from keepleft.pipelines.sentence_splitter import PHRASE_OPENERS

PLACEHOLDERS = "\ue000\ue001\ue002\ue003"
_PLACEHOLDER = re.compile(f"[{PLACEHOLDERS}]")
_PICTOGRAM = "[\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff][\ufe0f\U0001f3fb-\U0001f3ff]*"
EMOJI = f"(?:{_PICTOGRAM}(?:\u200d{_PICTOGRAM})*)+"  # pattern of a run of them, with skin tones and joiners
_NAMES_AND_CODES = (
    r"""(?:https?://|www\.)[^\s<>"]*[^\s<>"'.,;:!?)\]»”“]""",  # an address on the web
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",  # an e-mail address
    r"(?<![\w@#/])[@\#]\w+",  # a handle or a hashtag
    r"</?[A-Za-z][^<>]*>",  # a tag of HTML or XML
    r"(?<![\w/.<])(?:~|\.\.?)?(?:/[\w.+-]*\w)+/?",  # the path of a file
    r"\b(?:[a-z0-9-]+\.)+(?:com|org|net|edu|io|fr|de|in)\b(?:/\S*[^\s.,;:!?])?",  # a host name
    r"\b[A-Za-z][A-Za-z_-]*\d[A-Za-z0-9_-]*\b",  # a code: A380
    r"(?<![\w+])\+\d[\d -]{5,}\d\b",  # a telephone number
    EMOJI,
)


class ProtectedText(NamedTuple):
    text: str  # with placeholders
    copied: tuple[str, ...] = ()  # what each stands for, in the order of PLACEHOLDERS
    language: str = "en"
    is_partial: bool = False  # there were more parts to copy than placeholders


@cache
def copied_pattern(language: str) -> re.Pattern[str]:
    """What matches a part of a text in this language that a translation copies."""
    numbers = NOTATIONS.get(language, ENGLISH).pattern
    return re.compile("|".join((*_NAMES_AND_CODES, numbers)), re.ASCII)


def protect(text: str, language: str = "en") -> ProtectedText:
    """The text with placeholders; what does not fit into the few that there are stays as it is."""
    if _PLACEHOLDER.search(text):
        return ProtectedText(text)
    copied: list[str] = []
    is_partial = False

    def replace(match: re.Match[str]) -> str:
        nonlocal is_partial
        if match[0] in copied:
            return PLACEHOLDERS[copied.index(match[0])]
        if len(copied) == len(PLACEHOLDERS):
            is_partial = True
            return match[0]
        copied.append(match[0])
        return PLACEHOLDERS[len(copied) - 1]

    protected = copied_pattern(language).sub(replace, text)
    return ProtectedText(protected, tuple(copied), language, is_partial)


class CutPart(NamedTuple):
    """A part of a sentence that was cut: to translate, or to copy."""

    text: str
    is_copied: bool = False


def cut_around_copied(text: str, language: str = "en") -> list[CutPart]:
    """A sentence cut between two parts that are to be copied; or if there is one, before and behind it.

    Of several gaps the one nearest the middle is chosen in which a phrase begins: "He paid $5 | at 10:30".
    Put together the parts are the sentence, which is the only one if there is nothing to copy.
    """
    spans = [match.span() for match in copied_pattern(language).finditer(text)]
    if not spans:
        return [CutPart(text)]
    if len(spans) == 1:
        (begin, end), *_ = spans
        parts = [CutPart(text[:begin]), CutPart(text[begin:end], True), CutPart(text[end:])]
        return [part for part in parts if part.text]
    cuts = [_cut_in_gap(text, end, begin) for (_, end), (begin, _) in pairwise(spans)]
    _, _, cut = min((not at_phrase, abs(cut - len(text) / 2), cut) for at_phrase, cut in cuts)
    return [CutPart(text[:cut]), CutPart(text[cut:])]


def _cut_in_gap(text: str, begin: int, end: int) -> tuple[bool, int]:
    """Where to cut between two parts that are copied, and whether a phrase begins there."""
    words = list(re.finditer(r"[^\W\d_]+", text[begin:end]))
    starts = [word.start() for word in words if word[0].lower() in PHRASE_OPENERS]
    return (True, begin + starts[-1]) if starts else (False, end)


def is_complete(source: ProtectedText, translation: str) -> bool:
    """Whether the translation has each placeholder as often as the source, and no other."""
    return sorted(_PLACEHOLDER.findall(source.text)) == sorted(_PLACEHOLDER.findall(translation))


def restore(source: ProtectedText, translation: str, language: str | None = None) -> str:
    """The translation into a language with what the placeholders stand for; others are removed.

    Without a language, everything comes back as it was in the source.
    """
    copied = [convert_number(part, source.language, language or source.language) for part in source.copied]
    values = dict(zip(PLACEHOLDERS, copied, strict=False))
    text = _PLACEHOLDER.sub(lambda match: values.get(match[0], ""), translation)
    return NOTATIONS[language].without_hour_word(text) if language in NOTATIONS and copied else text
