"""Placeholders for what a translation copies: addresses on the web, e-mail addresses, numbers, codes.

A translator that was trained with placeholders sees one character instead of each, and puts it where it
belongs. The characters are of Unicode's private use area, so no text has them for another reason.
"""

from __future__ import annotations

import re
from typing import NamedTuple

PLACEHOLDERS = "\ue000\ue001\ue002\ue003"
_PLACEHOLDER = re.compile(f"[{PLACEHOLDERS}]")
COPIED = re.compile(
    r"""
    (?:https?://|www\.)[^\s<>"]*[^\s<>"'.,;:!?)\]»”“]   # an address on the web, not the full stop behind it
  | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                       # an e-mail address
  | (?<![\w@#/])[@\#]\w+                                # a handle or a hashtag
  | \b(?:[a-z0-9-]+\.)+(?:com|org|net|edu|io|fr|de|in)\b(?:/\S*[^\s.,;:!?])?   # a host name
  | \b[A-Za-z][A-Za-z_-]*\d[A-Za-z0-9_-]*\b               # a code: A380
  | (?<![\w.,:/-])\d{2,}(?![\w%°€$£/-]|[.,:]\d)         # a number of two digits or more; not 10,000 or 10:30
    """,
    re.VERBOSE | re.ASCII,
)


class ProtectedText(NamedTuple):
    text: str  # with placeholders
    copied: tuple[str, ...]  # what each stands for, in the order of PLACEHOLDERS


def protect(text: str) -> ProtectedText:
    """The text with placeholders; what does not fit into the few that there are stays as it is."""
    if _PLACEHOLDER.search(text):
        return ProtectedText(text, ())
    copied: list[str] = []

    def replace(match: re.Match[str]) -> str:
        if match[0] in copied:
            return PLACEHOLDERS[copied.index(match[0])]
        if len(copied) == len(PLACEHOLDERS):
            return match[0]
        copied.append(match[0])
        return PLACEHOLDERS[len(copied) - 1]

    return ProtectedText(COPIED.sub(replace, text), tuple(copied))


def is_complete(source: ProtectedText, translation: str) -> bool:
    """Whether the translation has each placeholder as often as the source, and no other."""
    return sorted(_PLACEHOLDER.findall(source.text)) == sorted(_PLACEHOLDER.findall(translation))


def restore(source: ProtectedText, translation: str) -> str:
    """The translation with what the placeholders of the source stand for; others are removed."""
    values = dict(zip(PLACEHOLDERS, source.copied, strict=False))
    return _PLACEHOLDER.sub(lambda match: values.get(match[0], ""), translation)
