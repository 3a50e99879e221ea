"""In which scripts a text is written."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping

OTHERS = {"CJK": "Han", "IDEOGRAPHIC": "Han", "FEMININE": "Latin", "MASCULINE": "Latin", "MICRO": "Greek", "MODIFIER": "Other",
          "ANGSTROM": "Latin", "KELVIN": "Latin"}  # characters whose name does not begin with that of their script


def script(letter: str) -> str:
    """The script of one letter, by the first word of its Unicode name."""
    words = unicodedata.name(letter, "OTHER").split()
    first = words[1] if words[0] in ("FULLWIDTH", "HALFWIDTH") and len(words) > 1 else words[0]
    return OTHERS.get(first.split("-")[0], first.capitalize())


def mix(characters: Mapping[str, int]) -> dict[str, float]:
    """The share of each script among the letters, largest first, from how often each character occurs."""
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            counts[script(character)] += count
    letters = counts.total()
    return {name: count / letters for name, count in counts.most_common()}
