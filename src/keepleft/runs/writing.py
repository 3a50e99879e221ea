"""Write targets for sources with a model that has no directory yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from keepleft.data.encoding import encoder
from keepleft.data.ragged import Ragged
from keepleft.data.tokenizer import marks
from keepleft.decoding.generate import generate

AT_ONCE = 128


def write(model: nn.Module, tokenizer: Any, texts: Sequence[str], *, source_tokenizer: Any = None, tag: str | None = None,
          **said: Any) -> list[str]:
    """The target of each source text; options as in generate."""
    kind = np.dtype(np.int64)
    source_tokenizer = source_tokenizer or tokenizer
    stop, = marks(source_tokenizer).need("end")
    before = [] if tag is None else [source_tokenizer.token_to_id(tag)]
    rows = [np.frombuffer(row, kind) for row in encoder(source_tokenizer, kind, before=before, after=[stop])(texts)]
    return _written(model, tokenizer, [row.tolist() for row in rows], said)


def write_from(model: nn.Module, tokenizer: Any, sources: Ragged, **said: Any) -> list[str]:
    """The same for sources that are integers already."""
    return _written(model, tokenizer, sources.texts(), said)


def _written(model: nn.Module, tokenizer: Any, rows: Sequence[Sequence[int]], said: dict[str, Any]) -> list[str]:
    start, end = marks(tokenizer).need("start", "end")
    return generate(model, tokenizer, [list(map(int, row)) for row in rows], decoder_start_token_id=start, eos_token_id=end,
                    at_once=AT_ONCE, **said)
