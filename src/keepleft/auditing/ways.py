"""The code paths of a model: real bugs sit on one of them only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

COARSE = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Way:
    """One code path: everything that a caller can choose besides the words."""

    train: bool = False
    implementation: str | None = None               # of attention, where the model offers several
    flag: tuple[str, Any] | None = None             # an attribute that chooses between implementations
    asked: tuple[tuple[str, Any], ...] = ()         # arguments such as output_attentions=True
    mask: str = "absent"                            # absent, ones, boolean or square
    batch: int = 2
    dtype: torch.dtype | None = None                # None: as it is
    autocast: bool = False                          # to bfloat16
    output: str = ""                                # another output than the main one
    wrapped: bool = False                           # through the compiled or distributed wrapper

    def but(self, **changes: Any) -> Way:
        return replace(self, **changes)

    def named(self, batch: int | None = None, length: int | None = None) -> str:
        """As people read it."""
        out = ["train" if self.train else "eval"]
        if self.wrapped:
            out.append("as wrapped")
        if self.autocast:
            out.append("autocast to bfloat16")
        if self.implementation:
            out.append(f"{self.implementation} attention")
        if self.flag:
            out.append(f"{self.flag[0]}={self.flag[1]}")
        out += [f"{name}={value}" for name, value in self.asked]
        out.append({"absent": "no mask", "ones": "a mask of ones", "boolean": "a boolean mask of ones",
                    "square": "a 4-D mask"}.get(self.mask, self.mask))
        out.append(f"batch {self.batch if batch is None else batch}")
        if length is not None:
            out.append(f"length {length}")
        if self.output:
            out.append(f"output {self.output}")
        if self.dtype is not None:
            out.append(str(self.dtype).removeprefix("torch."))
        return ", ".join(out)


@dataclass(frozen=True)
class Budget:
    """How much is tried."""

    name: str
    seconds: float | None     # after which nothing new is begun; None: all of it
    lengths: int              # so many further lengths
    longest: int              # none longer than this
    seeds: int
    broad: bool               # every code path, or those that matter most


BUDGETS = {
    "quick": Budget("quick", 28.0, 8, 64, 1, broad=False),
    "standard": Budget("standard", 50.0, 32, 192, 2, broad=True),
    "full": Budget("full", None, 400, 1200, 4, broad=True),
}
