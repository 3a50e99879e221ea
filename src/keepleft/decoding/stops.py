"""When a text ends besides by its end token: at a string, wherever tokens begin and end, or when time is up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.options import Options
from keepleft.decoding.single import Stop


def stop_strings(tokenizer: Any, strings: Sequence[str]) -> Stop:
    """A text ends with the token that completes one of these."""
    if not strings or not all(strings):
        raise ValueError(f"stop_strings is {list(strings)!r}: give at least one, and none that is empty")

    def stop(texts: Tensor, begin: int) -> Tensor:
        tails = texts[:, max(begin, texts.shape[1] - reach(strings)):].tolist()
        return torch.tensor(completed(tokenizer, strings, tails), device=texts.device)
    return stop


def reach(strings: Sequence[str]) -> int:
    """Tokens that may hold one of these: each has at least a byte."""
    return max(len(string.encode()) for string in strings) + 4


def completed(tokenizer: Any, strings: Sequence[str], texts: Sequence[list[int]]) -> list[bool]:
    """In which texts has one of these strings just come?"""
    far = reach(strings)
    tails = tokenizer.decode_batch([text[-far:] for text in texts], skip_special_tokens=True)
    return [any(string in tail for string in strings) for tail in tails]


def stopped(tokenizer: Any, options: Options, text: list[int]) -> bool:
    """Did a text end by itself, and not because it was long enough?"""
    if not text:
        return False
    return text[-1] in options.end or (bool(options.strings) and completed(tokenizer, options.strings, [text])[0])


def over_time(deadline: float) -> Stop:
    """All texts end with the first token after a moment of the monotonic clock."""
    return lambda texts, begin: torch.full((len(texts),), time.monotonic() >= deadline, device=texts.device)


def any_of(stops: Sequence[Stop]) -> Stop | None:
    if len(stops) < 2:
        return stops[0] if stops else None
    return lambda texts, begin: torch.stack([stop(texts, begin) for stop in stops]).any(0)
