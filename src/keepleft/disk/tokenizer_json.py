"""A tokenizer as a file has it, but for padding and truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def parse_tokenizer(content: bytes, source_name: object) -> Tokenizer:
    """Of the content of a tokenizer.json; `name` is what an error speaks of.

    Some files ask for padding and a length: every text would be read with padding behind it, or cut off
    without a word.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{source_name} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
