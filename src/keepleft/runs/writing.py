"""Write targets for sources, many at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from keepleft.data.encoding import encoder
from keepleft.data.ragged import Ragged, padded
from keepleft.data.tokenizer import marks
from keepleft.decoding.beam import beam
from keepleft.decoding.greedy import greedy

AT_ONCE = 128


def write(model: nn.Module, tokenizer: Any, texts: Sequence[str], *, source_tokenizer: Any = None, limit: int | None = None,
          tag: str | None = None, beams: int = 1, penalty: float = 1.0) -> list[str]:
    """The target of each source text, greedily or with beams."""
    kind = np.dtype(np.int64)
    source_tokenizer = source_tokenizer or tokenizer
    stop, = marks(source_tokenizer).need("end")
    before = [] if tag is None else [source_tokenizer.token_to_id(tag)]
    rows = [np.frombuffer(row, kind) for row in encoder(source_tokenizer, kind, before=before, after=[stop])(texts)]
    sources = Ragged(np.concatenate([np.empty(0, kind), *rows]), np.array([len(row) for row in rows], kind))
    return write_from(model, tokenizer, sources, limit=limit, beams=beams, penalty=penalty)


@torch.no_grad()
def write_from(model: nn.Module, tokenizer: Any, sources: Ragged, *, limit: int | None = None, beams: int = 1,
               penalty: float = 1.0) -> list[str]:
    """The same for sources that are integers already. Those of like length go together; limit: None is twice the source and
    ten more, as far as the model's positions reach."""
    parts: Any = model
    start, end = marks(tokenizer).need("start", "end")
    device, was = next(model.parameters()).device, model.training
    rows = np.split(sources.flat, np.cumsum(sources.lengths)[:-1])
    out = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    model.eval()
    try:
        for begin in range(0, len(order), AT_ONCE):
            some = order[begin:begin + AT_ONCE]
            ragged = Ragged(np.concatenate([rows[n] for n in some]), np.array([len(rows[n]) for n in some]))
            layout = padded(ragged)
            source, segments = (torch.from_numpy(part).to(device) for part in (layout.lay(ragged, 0), layout.segments(ragged)))
            memory = parts.read(source, segments=segments)
            prompt = torch.full((len(some), 1), start, device=device)
            most = min(limit or 2 * source.shape[1] + 10, parts.design.longest or 1 << 30)
            if beams > 1:
                found = beam(parts, prompt, beams, limit=most, end=end, penalty=penalty, memory=memory)
            else:
                found = torch.stack(list(greedy(parts, prompt, limit=most, end=[end], memory=memory)), 1).tolist()
            for n, tokens in zip(some, found, strict=True):
                out[n] = tokenizer.decode(tokens[:tokens.index(end)] if end in tokens else tokens)
    finally:
        model.train(was)
    return out
