"""A batch: what a model is called with, what is asked of it, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from keepleft.data.objectives import NOTHING, Lesson
from keepleft.data.ragged import Layout, Ragged, Whole


@dataclass(frozen=True)
class Batch:
    inputs: dict[str, Tensor]  # the arguments of the model
    targets: Tensor            # (B, T), −100 where nothing is asked; or (B,) labels
    tokens: int                # how many are asked
    identity: str              # epoch, step and records: for whoever must find it again

    def to(self, device: torch.device) -> Batch:
        """The same on another device; from pinned memory the copy does not wait."""
        move = lambda tensor: tensor.to(device, non_blocking=True)
        return replace(self, inputs={name: move(tensor) for name, tensor in self.inputs.items()}, targets=move(self.targets))

    def pinned(self) -> Batch:
        return replace(self, inputs={name: tensor.pin_memory() for name, tensor in self.inputs.items()},
                       targets=self.targets.pin_memory())

    def silent(self) -> Batch:
        """The same with nothing asked: keeps a process in step that has no work of its own."""
        return replace(self, targets=torch.full_like(self.targets, NOTHING), tokens=0)


def made(lesson: Lesson, target: Layout, source: Layout | None, identity: str, *, segments: bool = True) -> Batch:
    """Lay a lesson out. Without segments every place must be taken by a text of its own row."""
    inputs = {"tokens": _tensor(target.lay(lesson.tokens, 0))}
    if segments:
        inputs["segments"] = _tensor(target.segments(lesson.tokens))
    if lesson.source is not None:
        assert source is not None
        inputs["source"] = _tensor(source.lay(lesson.source, 0))
        if segments:
            inputs["source_segments"] = _tensor(source.segments(lesson.source))
    if isinstance(lesson.targets, Ragged):
        asked = target.lay(lesson.targets, NOTHING)
    else:
        asked = np.full(target.shape[0], NOTHING, np.int64)
        asked[target.row] = lesson.targets
    return Batch(inputs, _tensor(asked), int((asked != NOTHING).sum()), identity)


def _tensor(numbers: Whole) -> Tensor:
    return torch.from_numpy(numbers)
