"""Read tokenizer.json, without its padding and truncation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from keepleft.disk.regular_file import read_file_in
from keepleft.disk.tokenizer_growth import check_growth

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
MAX_TOKENIZER_BYTES = 256 << 20


def read_tokenizer(folder: Path, name: str = TOKENIZER_FILE) -> Tokenizer:
    """The tokenizer in a model directory.

    Raises ValueError if the file is unsafe, too large or not one, or if it makes far too much of a text.
    """
    return parse_tokenizer(read_file_in(folder, name, max_bytes=MAX_TOKENIZER_BYTES), folder / name)


def parse_tokenizer(content: bytes, source_name: object) -> Tokenizer:
    """Parse the content of a tokenizer.json.

    Raises ValueError, naming `source_name`, if it is none, or if it makes far too much of a text.

    Some files ask for padding and truncation: every text would be encoded with padding behind it, or silently
    cut. Both are switched off.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(content)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panics are no Exception
        raise ValueError(f"{source_name} is not a tokenizer: {error}") from error
    check_growth(tokenizer, source_name)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
