"""In which scripts a text is written."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping

# characters whose name does not begin with that of their script
SCRIPT_ALIASES = {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "FEMININE": "Latin",
    "MASCULINE": "Latin",
    "MICRO": "Greek",
    "MODIFIER": "Other",
    "ANGSTROM": "Latin",
    "KELVIN": "Latin",
}


def script(letter: str) -> str:
    """The script of one letter, by the first word of its Unicode name."""
    name_words = unicodedata.name(letter, "OTHER").split()
    prefix = (
        name_words[1]
        if name_words[0] in ("FULLWIDTH", "HALFWIDTH") and len(name_words) > 1
        else name_words[0]
    )
    return SCRIPT_ALIASES.get(prefix.split("-")[0], prefix.capitalize())


def script_shares(characters: Mapping[str, int]) -> dict[str, float]:
    """The share of each script among the letters, largest first, from how often each character occurs."""
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            counts[script(character)] += count
    num_letters = counts.total()
    return {name: count / num_letters for name, count in counts.most_common()}
