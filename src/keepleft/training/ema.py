"""A moving average of the weights: smoother than the last ones, and usually better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = model
        self.weights: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }
        weight = next(iter(self.weights.values()))
        # of the newest
        self.alpha = torch.ones(
            (), device=weight.device, dtype=torch.promote_types(weight.dtype, torch.float32)
        )

    def set_decay(self, step: int) -> None:
        """How much the weights of this step, counted from 0, will weigh.

        At first it forgets faster: they mean little yet.
        """
        self.alpha.fill_(1.0 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights as they are now."""
        averages = list(self.weights.values())
        differences = torch._foreach_sub([p for p in self.model.parameters() if p.requires_grad], averages)
        torch._foreach_mul_(differences, self.alpha)
        torch._foreach_add_(averages, differences)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Put the average in the place of the weights, for good."""
        for p, average in zip(
            (p for p in self.model.parameters() if p.requires_grad), self.weights.values(), strict=True
        ):
            p.copy_(average)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """The average in the place of the weights, for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for p, average in zip(
            (p for p in self.model.parameters() if p.requires_grad), self.weights.values(), strict=True
        ):
            current = p.detach().clone()
            p.copy_(average)
            average.copy_(current)


@torch.no_grad()
def average_checkpoints(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the weights of several checkpoints."""
    if not states:
        raise ValueError("a mean of no checkpoints is none: give at least one")
    for state in states[1:]:
        if mismatched := sorted(state.keys() ^ states[0].keys()):
            raise ValueError(
                f"only checkpoints of one model have a mean: {mismatched[0]!r} is in some and not in others"
            )
    return {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(tensor.dtype)
        for name, tensor in states[0].items()
    }
