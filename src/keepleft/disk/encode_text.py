"""Encode a text with a tokenizer whose library may panic."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class EncodingError(ValueError):
    """The tokenizer cannot encode a text."""

    code = "tokenizer_failed"  # in the responses of the server


def encode_text(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True, release_gil: bool = False
) -> list[int]:
    """The tokens of a text. Raises EncodingError where the library panics.

    It does so where a regular expression backtracks exponentially. Its panics are no Exception.

    `release_gil`: let other threads run meanwhile. The library does so for batches only, in threads of its
    own, and warns if the process is forked after that.
    """
    try:
        if release_gil:
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        tokens: list[int] = encoding.ids
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as panic:
        raise EncodingError(
            f"the model's tokenizer cannot encode this text ({panic}): change the text, or take another "
            "tokenizer"
        ) from panic
    return tokens
