"""The code paths of a model: real bugs sit on one of them only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CodePath:
    """One code path: everything that a caller can choose besides the words."""

    train: bool = False
    implementation: str | None = None  # of attention, where the model offers several
    flag: tuple[str, Any] | None = None  # an attribute that chooses between implementations
    extra_arguments: tuple[tuple[str, Any], ...] = ()  # arguments such as output_attentions=True
    mask: str = "absent"  # absent, ones, boolean or square
    batch: int = 2
    dtype: torch.dtype | None = None  # None: as it is
    autocast: bool = False  # to bfloat16
    output: str = ""  # another output than the main one
    wrapped: bool = False  # through the compiled or distributed wrapper

    def but(self, **changes: Any) -> CodePath:
        return replace(self, **changes)

    def label(self, batch: int | None = None, length: int | None = None) -> str:
        """As people read it."""
        parts = ["train" if self.train else "eval"]
        if self.wrapped:
            parts.append("as wrapped")
        if self.autocast:
            parts.append("autocast to bfloat16")
        if self.implementation:
            parts.append(f"{self.implementation} attention")
        if self.flag:
            parts.append(f"{self.flag[0]}={self.flag[1]}")
        parts += [f"{name}={value}" for name, value in self.extra_arguments]
        parts.append(
            {
                "absent": "no mask",
                "ones": "a mask of ones",
                "boolean": "a boolean mask of ones",
                "square": "a 4-D mask",
            }.get(self.mask, self.mask)
        )
        parts.append(f"batch {self.batch if batch is None else batch}")
        if length is not None:
            parts.append(f"length {length}")
        if self.output:
            parts.append(f"output {self.output}")
        if self.dtype is not None:
            parts.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(parts)


@dataclass(frozen=True)
class Budget:
    """How much is tried."""

    name: str
    seconds: float | None  # after which nothing new is begun; None: all of it
    max_lengths: int  # so many further lengths
    max_length: int  # none longer than this
    num_seeds: int
    exhaustive: bool  # every code path, or those that matter most


BUDGETS = {
    "quick": Budget("quick", 28.0, 8, 64, 1, exhaustive=False),
    "standard": Budget("standard", 50.0, 32, 192, 2, exhaustive=True),
    "full": Budget("full", None, 400, 1200, 4, exhaustive=True),
}
