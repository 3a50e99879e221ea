"""Write targets for sources with a model that has no directory yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keepleft.data.fast_encode import encoder
from keepleft.data.ragged import Ragged
from keepleft.data.tokenizer import special_tokens
from keepleft.decoding.generate import generate
from keepleft.models.transformer import Model

BATCH_SIZE = 128


def generate_targets(
    model: Model,
    tokenizer: Any,
    texts: Sequence[str],
    *,
    source_tokenizer: Any = None,
    tag: str | None = None,
    **options: Any,
) -> list[str]:
    """The target of each source text; options as in generate."""
    dtype = np.dtype(np.int64)
    source_tokenizer = source_tokenizer or tokenizer
    (eos_id,) = special_tokens(source_tokenizer).require("end")
    prefix = [] if tag is None else [source_tokenizer.token_to_id(tag)]
    rows = [
        np.frombuffer(row, dtype)
        for row in encoder(source_tokenizer, dtype, prefix=prefix, suffix=[eos_id])(texts)
    ]
    return _generate_rows(model, tokenizer, [row.tolist() for row in rows], options)


def generate_from_ids(model: Model, tokenizer: Any, sources: Ragged, **options: Any) -> list[str]:
    """The same for sources that are integers already."""
    return _generate_rows(model, tokenizer, sources.to_lists(), options)


def _generate_rows(
    model: Model, tokenizer: Any, rows: Sequence[Sequence[int]], options: dict[str, Any]
) -> list[str]:
    start, end = special_tokens(tokenizer).require("start", "end")
    return generate(
        model,
        tokenizer,
        [list(map(int, row)) for row in rows],
        decoder_start_token_id=start,
        eos_token_id=end,
        batch_size=BATCH_SIZE,
        **options,
    )
