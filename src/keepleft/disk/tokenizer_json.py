"""Parse tokenizer.json, without its padding and truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def parse_tokenizer(content: bytes, source_name: object) -> Tokenizer:
    """Parse the content of a tokenizer.json. Raises ValueError, naming `source_name`, if it is none.

    Some files ask for padding and truncation: every text would be encoded with padding behind it, or silently
    cut. Both are switched off.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{source_name} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
