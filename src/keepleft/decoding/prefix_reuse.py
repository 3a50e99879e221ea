"""A model that keeps the KV cache of its last sequence: what a new prompt shares with it is not prefilled."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from keepleft.decoding.hypotheses import StepModel


class PrefixReuseModel:
    """Wraps a model, for one sequence at a time. Two verbs, as the model has: start() and step()."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.tokens: list[int] = []  # in the KV cache
        self.num_reused = 0  # tokens of the last prompt that were in the KV cache already
        self.state: Any = None

    def start(self, prompt: Tensor, **start_kwargs: Any) -> tuple[Tensor, Self]:
        """Prefill a prompt, (1, T) → the logits of the next token, (1, V).

        `start_kwargs` go to the model with the first prompt: later ones continue from its state.
        """
        sequence = prompt[0].tolist()
        # the last token is always given again: its logits are asked for
        self.num_reused = min(shared_prefix_length(self.tokens, sequence), len(sequence) - 1)
        num_dropped = len(self.tokens) - self.num_reused
        state, self.state = self.state, None  # lost if what follows is interrupted
        if state is None or not (num_dropped == 0 or can_crop(state)):
            self.num_reused = 0
            logits, state = self.model.start(prompt, **start_kwargs)
        else:
            if num_dropped:
                state.crop(num_dropped)
            logits = self.model.step(prompt[:, self.num_reused :], state)
        self.tokens = sequence
        self.state = state
        return logits, self

    def step(self, tokens: Tensor, _state: Self) -> Tensor:
        """(1, n) more tokens → (1, V)"""
        state, self.state = self.state, None
        logits = self.model.step(tokens, state)
        self.tokens += tokens[0].tolist()
        self.state = state
        return logits


def shared_prefix_length(first: list[int], second: list[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def can_crop(state: Any) -> bool:
    """Whether tokens can be removed from all caches of a state: a ring cache has overwritten them."""
    return all(hasattr(cache, "crop") for cache in state.caches)
