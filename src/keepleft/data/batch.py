"""A batch: model inputs, targets, and which records they came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from keepleft.data.objectives import Examples
from keepleft.data.ragged import IntArray, Layout, Ragged
from keepleft.nn.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Batch:
    inputs: dict[str, Tensor]  # keyword arguments of the model
    targets: Tensor  # (B, T), IGNORE_INDEX where there is no target; or (B,) labels
    tokens: int  # number of targets that are not ignored
    identity: str  # epoch, step and records, so that a batch can be found again

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device; from pinned memory the copy is asynchronous."""
        move = lambda tensor: tensor.to(device, non_blocking=True)
        return replace(
            self,
            inputs={name: move(tensor) for name, tensor in self.inputs.items()},
            targets=move(self.targets),
        )

    def pin_memory(self) -> Batch:
        return replace(
            self,
            inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()},
            targets=self.targets.pin_memory(),
        )

    def without_targets(self) -> Batch:
        """The same batch with every target ignored: keeps an idle process in step with the others."""
        return replace(self, targets=torch.full_like(self.targets, IGNORE_INDEX), tokens=0)


def collate(
    examples: Examples,
    target_layout: Layout,
    source_layout: Layout | None,
    identity: str,
    *,
    segments: bool = True,
) -> Batch:
    """Lay examples out as a batch. Without segments, one sequence must fill each row."""
    inputs = {"tokens": _tensor(target_layout.scatter(examples.tokens, 0))}
    if segments:
        inputs["segments"] = _tensor(target_layout.segments(examples.tokens))
    if examples.source is not None:
        assert source_layout is not None
        inputs["source"] = _tensor(source_layout.scatter(examples.source, 0))
        if segments:
            inputs["source_segments"] = _tensor(source_layout.segments(examples.source))
    if isinstance(examples.targets, Ragged):
        targets = target_layout.scatter(examples.targets, IGNORE_INDEX)
    else:
        targets = np.full(target_layout.shape[0], IGNORE_INDEX, np.int64)
        targets[target_layout.row] = examples.targets
    return Batch(inputs, _tensor(targets), int((targets != IGNORE_INDEX).sum()), identity)


def _tensor(array: IntArray) -> Tensor:
    return torch.from_numpy(array)
