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


@torch.no_grad()
def write(model: nn.Module, tokenizer: Any, texts: Sequence[str], *, source_tokenizer: Any = None, limit: int | None = None,
          tag: str | None = None, beams: int = 1, penalty: float = 1.0) -> list[str]:
    """The target of each source text, greedily or with beams. Texts of like length go together; limit: None is twice the
    source and ten more."""
    parts: Any = model
    kind = np.dtype(np.int64)
    source_tokenizer = source_tokenizer or tokenizer
    start, end = marks(tokenizer).need("start", "end")
    stop, = marks(source_tokenizer).need("end")
    before = [] if tag is None else [source_tokenizer.token_to_id(tag)]
    rows = [np.frombuffer(row, kind) for row in encoder(source_tokenizer, kind, before=before, after=[stop])(texts)]
    device = next(model.parameters()).device
    out = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda n: len(rows[n]))
    was = model.training
    model.eval()
    for begin in range(0, len(order), AT_ONCE):
        some = order[begin:begin + AT_ONCE]
        ragged = Ragged(np.concatenate([rows[n] for n in some]), np.array([len(rows[n]) for n in some]))
        layout = padded(ragged)
        source, segments = (torch.from_numpy(part).to(device) for part in (layout.lay(ragged, 0), layout.segments(ragged)))
        memory = parts.read(source, segments=segments)
        prompt = torch.full((len(some), 1), start, device=device)
        most = limit or 2 * source.shape[1] + 10
        if beams > 1:
            found = beam(parts, prompt, beams, limit=most, end=end, penalty=penalty, memory=memory)
        else:
            found = torch.stack(list(greedy(parts, prompt, limit=most, end=[end], memory=memory)), 1).tolist()
        for n, tokens in zip(some, found, strict=True):
            out[n] = tokenizer.decode(tokens[:tokens.index(end)] if end in tokens else tokens)
    model.train(was)
    return out
