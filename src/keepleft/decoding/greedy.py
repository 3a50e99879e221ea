"""The simplest way to write: always the likeliest token."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Stepper(Protocol):
    """All that decoding asks of a model."""

    def start(self, prompt: Tensor, **given: Any) -> tuple[Tensor, Any]: ...
    def step(self, tokens: Tensor, state: Any) -> Tensor: ...


@torch.no_grad()
def greedy(model: Stepper, prompt: Tensor, *, limit: int, end: Collection[int] = (), **given: Any) -> Iterator[Tensor]:
    """Yield the next tokens, (B,), up to `limit` times; a row that has ended repeats its end, and when all have, stop.

    `given` goes to model.start(): segments of a padded prompt, the memory of a source, the kind of cache.
    """
    ends = torch.tensor(sorted(end), dtype=torch.long, device=prompt.device)
    scores, state = model.start(prompt, **given)
    done = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    tokens = prompt[:, -1]
    for n in range(limit):
        if n:
            scores = model.step(tokens[:, None], state)
        tokens = torch.where(done, tokens, scores.argmax(-1))
        done = done | torch.isin(tokens, ends)
        yield tokens
        if bool(done.all()):
            return
