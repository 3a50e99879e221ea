"""A text in words, in any script: letters, marks and digits, folded to one case."""

from __future__ import annotations

import unicodedata

# scripts written without spaces, in which a character is the nearest thing to a word:
# Thai, Lao, Myanmar, Khmer, Japanese syllables, Chinese characters
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF),
            (0xF900, 0xFAFF), (0x20000, 0x323AF))


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation; in scripts without spaces, characters with their marks.

    On ASCII these are the tokens of rouge-score's own tokenizer, which drops everything else. Python's `\\w` would not do: it
    splits at vowel signs, and with them most words of Hindi.
    """
    out: list[str] = []
    last = ""  # what the last character was: of a spaced word, one alone, or no part of a word
    for c in unicodedata.normalize("NFKC", text).casefold():
        kind = unicodedata.category(c)
        if kind == "Cf":  # joiners and other invisible characters neither part words nor belong to them
            continue
        if kind[0] not in "LMN":
            last = ""
            continue
        alone = any(low <= ord(c) <= high for low, high in UNSPACED)
        if (last and kind[0] == "M") or (last == "spaced" and not alone):
            out[-1] += c
        else:
            out.append(c)
            last = "alone" if alone else "spaced"
    return out
