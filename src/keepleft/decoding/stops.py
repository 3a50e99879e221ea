"""When a text ends besides by its end token: at a string, wherever tokens begin and end, or when time is up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.single import Stop


def stop_strings(tokenizer: Any, strings: Sequence[str]) -> Stop:
    """A text ends with the token that completes one of these."""
    if not strings or not all(strings):
        raise ValueError(f"stop_strings is {list(strings)!r}: give at least one, and none that is empty")
    reach = max(len(string.encode()) for string in strings) + 4  # tokens that may hold one: each has at least a byte

    def stop(texts: Tensor, begin: int) -> Tensor:
        tails = texts[:, max(begin, texts.shape[1] - reach):].tolist()
        return torch.tensor([any(string in text for string in strings)
                             for text in tokenizer.decode_batch(tails, skip_special_tokens=True)], device=texts.device)
    return stop


def over_time(deadline: float) -> Stop:
    """All texts end with the first token after a moment of the monotonic clock."""
    return lambda texts, begin: torch.full((len(texts),), time.monotonic() >= deadline, device=texts.device)


def any_of(stops: Sequence[Stop]) -> Stop | None:
    if len(stops) < 2:
        return stops[0] if stops else None
    return lambda texts, begin: torch.stack([stop(texts, begin) for stop in stops]).any(0)
