"""A text in words, in any script: letters, marks and digits, folded to one case."""

from __future__ import annotations

import unicodedata

# scripts written without spaces, in which a character is the nearest thing to a word:
# Thai, Lao, Myanmar, Khmer, Japanese syllables, Chinese characters
UNSPACED_SCRIPTS = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x323AF),
)


def split_words(text: str) -> list[str]:
    """Words in lower case, without punctuation; in scripts without spaces, characters with their marks.

    On ASCII these are the tokens of rouge-score's own tokenizer, which drops everything else. Python's `\\w`
    would not do: it splits at vowel signs, and with them most words of Hindi.
    """
    out: list[str] = []
    previous = ""  # what the last character was: of a spaced word, one alone, or no part of a word
    for c in unicodedata.normalize("NFKC", text).casefold():
        category = unicodedata.category(c)
        if category == "Cf":  # joiners and other invisible characters neither part words nor belong to them
            continue
        if category[0] not in "LMN":
            previous = ""
            continue
        is_unspaced = any(low <= ord(c) <= high for low, high in UNSPACED_SCRIPTS)
        if (previous and category[0] == "M") or (previous == "spaced" and not is_unspaced):
            out[-1] += c
        else:
            out.append(c)
            previous = "alone" if is_unspaced else "spaced"
    return out
