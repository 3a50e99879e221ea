"""Triton, where there is one, and what all kernels here ask of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

try:
    import triton.language as tl  # type: ignore[import-not-found]
    from triton import cdiv, jit  # type: ignore[import-not-found]
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-not-found]
except ImportError:  # it comes with PyTorch wherever there is a GPU; nothing written in it is called without it
    jit: Any = lambda function: function  # type: ignore[no-redef]
    tl: Any = None  # type: ignore[no-redef]
    cdiv: Any = None  # type: ignore[no-redef]
    gdc_launch_dependents: Any = None  # type: ignore[no-redef]
    gdc_wait: Any = None  # type: ignore[no-redef]

__all__ = ["cdiv", "gdc_launch_dependents", "gdc_wait", "jit", "next_power_of_2", "pdl_kwargs", "tl"]


def next_power_of_2(n: int) -> int:
    """The power of two that a block of so many is made of."""
    return 1 << (n - 1).bit_length()


def pdl_kwargs(x: Tensor) -> dict[str, bool]:
    """A kernel may begin before the one before it is done; it waits where it needs what that one writes."""
    return {"launch_pdl": True} if x.is_cuda else {}
