"""Stopping criteria besides the end-of-sequence token: stop strings, wherever tokens begin and end, and time
limits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.sampling import StoppingCriterion

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def stop_strings(tokenizer: Tokenizer, strings: Sequence[str]) -> StoppingCriterion:
    """Stop at the token that completes one of these strings."""
    if not strings or not all(strings):
        raise ValueError(f"stop_strings is {list(strings)!r}: give at least one, and none that is empty")

    def stop(sequences: Tensor, prompt_width: int) -> Tensor:
        tails = sequences[:, max(prompt_width, sequences.shape[1] - max_stop_tokens(strings)) :].tolist()
        return torch.tensor(hits_stop_string(tokenizer, strings, tails), device=sequences.device)

    return stop


def max_stop_tokens(strings: Sequence[str]) -> int:
    """How many of the last tokens may hold one of these strings: each token has at least a byte."""
    return max(len(string.encode()) for string in strings) + 4


def hits_stop_string(
    tokenizer: Tokenizer, strings: Sequence[str], sequences: Sequence[list[int]]
) -> list[bool]:
    """Which sequences have just completed one of these strings?"""
    if not strings:
        return [False] * len(sequences)
    max_tokens = max_stop_tokens(strings)
    tails = tokenizer.decode_batch(
        [sequence[-max_tokens:] for sequence in sequences], skip_special_tokens=True
    )
    return [any(string in tail for string in strings) for tail in tails]


def ended_by_itself(tokenizer: Tokenizer | None, options: GenerationConfig, tokens: list[int]) -> bool:
    """Did a sequence end by itself, and not at its length limit?"""
    if not tokens:
        return False
    if tokens[-1] in options.eos_ids:
        return True
    return tokenizer is not None and hits_stop_string(tokenizer, options.stop_list, [tokens])[0]


def max_time(deadline: float) -> StoppingCriterion:
    """All sequences stop with the first token after this moment of the monotonic clock."""
    return lambda sequences, prompt_width: torch.full(
        (len(sequences),), time.monotonic() >= deadline, device=sequences.device
    )


def any_of(criteria: Sequence[StoppingCriterion]) -> StoppingCriterion:
    if len(criteria) == 1:
        return criteria[0]
    return lambda sequences, prompt_width: torch.stack(
        [criterion(sequences, prompt_width) for criterion in criteria]
    ).any(0)
