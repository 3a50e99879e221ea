"""Tokens as readable text: what each of them adds to the text before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTEXT_TOKENS = 16  # preceding tokens that can change how a token decodes
METASPACE = "\u2581"  # ▁, which SentencePiece writes for a space
REPLACEMENT_CHARACTER = "\ufffd"  # decodes from an incomplete character


def token_texts(tokenizer: Tokenizer | None, prefix: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """What each of these tokens would add after `prefix`; bytes of an incomplete character as \\xe0.

    A token that adds no text, such as the space that a decoder strips from the beginning, is given by what
    its name in the vocabulary stands for; without a tokenizer all are given by their id.
    """
    if tokenizer is None:
        return [f"#{token}" for token in tokens]
    context = [int(token) for token in prefix[-CONTEXT_TOKENS:]]
    context_text, *extended_texts = tokenizer.decode_batch(
        [context, *([*context, int(token)] for token in tokens)], skip_special_tokens=False
    )
    # the next token may complete these characters
    context_text = context_text.rstrip(REPLACEMENT_CHARACTER)
    return [
        _added_text(tokenizer, context_text, text, int(token))
        for text, token in zip(extended_texts, tokens, strict=True)
    ]


def token_pieces(tokenizer: Tokenizer | None, tokens: Sequence[int], begin: int = 0) -> list[str]:
    """What each token from `begin` on adds to those before it."""
    if tokenizer is None:
        return token_texts(None, (), tokens[begin:])
    ids = [int(token) for token in tokens]
    contexts = [ids[max(0, n - CONTEXT_TOKENS) : n] for n in range(begin, len(ids))]
    texts = tokenizer.decode_batch(
        [*contexts, *([*context, token] for context, token in zip(contexts, ids[begin:], strict=True))],
        skip_special_tokens=False,
    )
    return [
        _added_text(tokenizer, context_text.rstrip(REPLACEMENT_CHARACTER), extended_text, token)
        for context_text, extended_text, token in zip(
            texts[: len(contexts)], texts[len(contexts) :], ids[begin:], strict=True
        )
    ]


def decode_with_special(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    """The text of tokens, special ones included."""
    if tokenizer is None:
        return " ".join(f"#{token}" for token in tokens)
    return str(tokenizer.decode([int(token) for token in tokens], skip_special_tokens=False))


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """The bytes of a token of a byte-level vocabulary; None in a vocabulary of characters."""
    name, byte_of_char = tokenizer.id_to_token(token), _byte_alphabet()
    if name is None or "ByteLevel" not in str(tokenizer.decoder):
        return None
    return bytes(byte_of_char[char] for char in name) if all(char in byte_of_char for char in name) else None


def _added_text(tokenizer: Tokenizer, context_text: str, extended_text: str, token: int) -> str:
    text = (
        extended_text[len(context_text) :]
        if extended_text.startswith(context_text)
        else tokenizer.decode([token], skip_special_tokens=False)
    )
    name = tokenizer.id_to_token(token)
    if name is None:
        return f"#{token}"
    if text and REPLACEMENT_CHARACTER not in text:
        # a space that the decoder puts between all words belongs to no token
        return str(name if text.strip(" ") == name else text)
    if not text:
        return _name_text(tokenizer, token)
    byte_of_char = _byte_alphabet()
    if any(char not in byte_of_char for char in name):
        return str(name)
    piece_bytes = bytes(byte_of_char[char] for char in name)
    complete_text = text.rstrip(REPLACEMENT_CHARACTER)
    # where the incomplete character begins
    incomplete_start = max((n for n, byte in enumerate(piece_bytes) if byte >= 0xC0), default=-1)
    if REPLACEMENT_CHARACTER in complete_text or incomplete_start < 0:
        return piece_bytes.decode("utf-8", "backslashreplace")
    return str(complete_text) + "".join(f"\\x{byte:02x}" for byte in piece_bytes[incomplete_start:])


def _name_text(tokenizer: Tokenizer, token: int) -> str:
    """The text of a token's name: byte-level vocabularies write Ġ for a space, SentencePiece's ▁."""
    if (piece_bytes := token_bytes(tokenizer, token)) is not None:
        return piece_bytes.decode("utf-8", "backslashreplace")
    name = str(tokenizer.id_to_token(token))
    return name if token in tokenizer.get_added_tokens_decoder() else name.replace(METASPACE, " ")


@cache
def _byte_alphabet() -> dict[str, int]:
    """From the character that byte-level vocabularies write for each byte, as GPT-2's, to the byte.

    A printable byte stands for itself, the others have characters from U+0100 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + n): byte for n, byte in enumerate(unprintable)
    }
