"""Tokens as text to look at: what each of them adds to the text before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

REACH = 16  # tokens before it that can matter for how a token reads
HALF = "\ufffd"  # a character of which bytes are missing


def spelled(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What each of these tokens would add after `before`; bytes of a character that is not whole yet as \\xe0.

    A token that adds nothing to the text goes by its name in the vocabulary; without a tokenizer all go by their number.
    """
    if tokenizer is None:
        return [f"#{token}" for token in tokens]
    near = [int(token) for token in before[-REACH:]]
    base, *longer = tokenizer.decode_batch([near, *([*near, int(token)] for token in tokens)], skip_special_tokens=False)
    base = base.rstrip(HALF)  # the next token may make these characters whole
    return [_added(tokenizer, base, text, int(token)) for text, token in zip(longer, tokens, strict=True)]


def in_turn(tokenizer: Any, tokens: Sequence[int], begin: int = 0) -> list[str]:
    """What each token from `begin` on adds to those before it."""
    if tokenizer is None:
        return spelled(None, (), tokens[begin:])
    all_ = [int(token) for token in tokens]
    near = [all_[max(0, n - REACH):n] for n in range(begin, len(all_))]
    texts = tokenizer.decode_batch([*near, *([*some, token] for some, token in zip(near, all_[begin:], strict=True))],
                                   skip_special_tokens=False)
    return [_added(tokenizer, base.rstrip(HALF), longer, token)
            for base, longer, token in zip(texts[:len(near)], texts[len(near):], all_[begin:], strict=True)]


def read(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    if tokenizer is None:
        return " ".join(f"#{token}" for token in tokens)
    return str(tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))


def _added(tokenizer: Any, base: str, longer: str, token: int) -> str:
    text = longer[len(base):] if longer.startswith(base) else tokenizer.decode([token], skip_special_tokens=False)
    name = tokenizer.id_to_token(token)
    if name is None:
        return f"#{token}"
    if text and HALF not in text:
        return str(name if text.strip(" ") == name else text)  # a space that stands between all words is no token's own
    letters = _bytes()
    if not text or any(letter not in letters for letter in name):
        return str(name)
    raw, whole = bytes(letters[letter] for letter in name), text.rstrip(HALF)
    begun = max((n for n, byte in enumerate(raw) if byte >= 0xC0), default=-1)  # where a character begins that is not whole yet
    if HALF in whole or begun < 0:
        return raw.decode("utf-8", "backslashreplace")
    return str(whole) + "".join(f"\\x{byte:02x}" for byte in raw[begun:])


@cache
def _bytes() -> dict[str, int]:
    """The letter that byte-level vocabularies write for each byte: itself where it can be seen, else one beyond the 256."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(rest)}
