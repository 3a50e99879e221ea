"""Averaged weights, over steps (EMA) or over checkpoints: smoother than the last ones, and usually better."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class EMA:
    """Exponential moving average of the trainable weights: average += alpha · (weight − average)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.model = model
        self.weights: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad
        }
        weight = next(iter(self.weights.values()))
        alpha_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.alpha = torch.ones((), device=weight.device, dtype=alpha_dtype)  # a tensor: CUDA graphs read it

    def set_decay(self, step: int) -> None:
        """Set alpha for a step, counted from 0. The decay starts low, so that initial weights fade fast."""
        self.alpha.fill_(1.0 - min(self.decay, (1 + step) / (10 + step)))

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        averages = list(self.weights.values())
        differences = torch._foreach_sub(self._parameters(), averages)
        torch._foreach_mul_(differences, self.alpha)
        torch._foreach_add_(averages, differences)

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Replace the weights of the model by their average."""
        for p, average in zip(self._parameters(), self.weights.values(), strict=True):
            p.copy_(average)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Within this context the model has the average in place of its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _parameters(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def _swap(self) -> None:
        for p, average in zip(self._parameters(), self.weights.values(), strict=True):
            current = p.detach().clone()
            p.copy_(average)
            average.copy_(current)


@torch.no_grad()
def average_checkpoints(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the state dicts of several checkpoints. Raises ValueError if they are not of one model."""
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
