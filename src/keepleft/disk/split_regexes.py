"""Regular expressions that published tokenizers and ours split texts by, in time proportional to the text.

They are not plain, but what an alternative has read is part of the match, or is read only a few times again.
"""

from __future__ import annotations

# Letters, digits and punctuation are separate pieces, each with at most one space before it; a line break is
# a piece of its own. Classes are spelt out, so that every regular expression engine reads them alike. Beyond
# ASCII everything is a letter but the punctuation named here, so the vowel signs of Devanagari stay with
# their consonants.
_PUNCTUATION = r"!-/:-@\[-`{-\x7f\x00-\x08\x0b\x0c\x0e-\x1f" "¡«»¿\u0964\u0965\u2010-\u206f\u3000-\u303f"
PIECE_REGEX = (
    rf" ?[A-Za-z]+| ?[^ \t\n\rA-Za-z0-9{_PUNCTUATION}][^ \t\n\r0-9{_PUNCTUATION}]*"
    rf"| ?[0-9]{{1,3}}| ?[{_PUNCTUATION}]+"
    r"|\n|[ \t\r]+(?![^ \t\n\r])|[ \t\r]+"
)

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s+(?!\S)|\s+"
_LINES_AND_SPACES = rf"\s*[\r\n]+|{_SPACES}"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
# the pre-tokenizer "llama-bpe"
LLAMA3_SPLIT_REGEX = (
    rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
)


def _words_by_case(suffix: str, digits: str) -> str:
    """As o200k splits: a word is upper case, then lower case."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{first}[{_UPPER}]*[{_LOWER}]+{suffix}|{first}[{_UPPER}]+[{_LOWER}]*{suffix}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


LINEAR_SPLIT_REGEXES = frozenset(
    {
        PIECE_REGEX,
        LLAMA3_SPLIT_REGEX,
        # GPT-2, as it was published and as tiktoken spells it
        rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",
        rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}",
        # cl100k of GPT-4, with possessive quantifiers
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
        rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{_SPACES}",
        # Qwen 2 and 3, Qwen 3.5
        LLAMA3_SPLIT_REGEX.replace(r"\p{N}{1,3}", r"\p{N}"),
        rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}",
        # o200k of GPT-4o, gpt-oss and LLaMA 4; Mistral's Tekken
        _words_by_case(rf"(?i:{_CONTRACTIONS})?", r"\p{N}{1,3}"),
        _words_by_case("", r"\p{N}"),
        # DeepSeek V3 and DeepSeek Coder; DeepSeek LLM's `\s+$` takes quadratic time
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        # BLOOM
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
    }
)
