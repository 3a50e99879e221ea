"""Triton if it is installed, and what all kernels need of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton.language as tl  # type: ignore[import-not-found]
    from triton import cdiv, jit  # type: ignore[import-not-found]
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]
except ImportError:  # it comes with the CUDA builds of PyTorch for Linux; no kernel is called without it
    jit: Any = lambda function: function  # type: ignore[no-redef]
    tl: Any = None  # type: ignore[no-redef]
    cdiv: Any = None  # type: ignore[no-redef]
    gdc_launch_dependents: Any = None  # type: ignore[no-redef]
    gdc_wait: Any = None  # type: ignore[no-redef]

__all__ = [
    "cdiv",
    "gdc_launch_dependents",
    "gdc_wait",
    "jit",
    "lacks_triton",
    "next_power_of_2",
    "pdl_kwargs",
    "tl",
]


def lacks_triton(device: torch.device) -> bool:
    """Is it a GPU that our kernels cannot run on? PyTorch for Windows comes without Triton."""
    return device.type == "cuda" and tl is None


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def pdl_kwargs(x: Tensor) -> dict[str, bool]:
    """Programmatic dependent launch: a kernel starts before the previous one ends, and waits where it needs
    its output.
    """
    return {"launch_pdl": True} if x.is_cuda else {}
