"""Errors of every attention backend against the float32 reference, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keepleft.attention.attend import attend, see
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, full, window
from keepleft.models.stack import positions_from_segments

BATCH = 2
HEADS = 4
LENGTH = 320  # long enough for every backend
HEAD_DIM = 64
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class Case(NamedTuple):
    name: str
    mask: Mask
    layout: str = "unpadded"  # unpadded, packed (documents, padding at the end) or left-padded
    kv_heads: int = HEADS
    bias: bool = False


CASES = (
    Case("causal", causal),
    Case("causal & window(40)", causal & window(40)),
    Case("packed and padded", causal, "packed"),
    Case("packed and padded, window(40)", causal & window(40), "packed"),
    Case("left-padded, bidirectional", full, "left-padded"),
    Case("~causal: the last token sees nothing", ~causal),
    Case("packed, grouped heads", causal, "packed", 2),
    Case("causal, bias", causal, bias=True),
    Case("packed, grouped heads, bias", causal, "packed", 2, True),
)


def make_segments(layout: str, device: str) -> Tensor:
    """(B, T)"""
    positions = torch.arange(LENGTH, device=device)
    if layout == "left-padded":
        rows = [(positions >= 60).long(), torch.ones_like(positions)]
    elif layout == "packed":
        rows = [(1 + positions // 100) * (positions < 300), (1 + positions // 140) * (positions < 261)]
    else:
        rows = [torch.ones_like(positions)] * BATCH
    return torch.stack(rows)


def check_case(case: Case, backend: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    segments = make_segments(case.layout, device)
    positions = positions_from_segments(segments)
    grid = Grid(LENGTH, LENGTH, 0, positions, positions, segments, segments)
    if case.layout == "unpadded" and backend != "varlen":
        grid = Grid(LENGTH, LENGTH)
    new = lambda heads: torch.randn(BATCH, LENGTH, heads, HEAD_DIM, device=device).to(dtype).transpose(1, 2)
    inputs = [new(HEADS), new(case.kv_heads), new(case.kv_heads)]
    grad_out = new(HEADS)
    if case.bias:
        inputs.append(torch.randn(1, HEADS, LENGTH, LENGTH, device=device))

    def forward_backward(name: str, in_float32: bool) -> tuple[Tensor, list[Tensor]]:
        sight = see(case.mask, grid, batch=BATCH, heads=HEADS, device=device, dtype=dtype, backend=name)
        leaves = [(x.float() if in_float32 else x).clone().requires_grad_() for x in inputs]
        q, k, v, *bias = leaves
        out = attend(q, k, v, sight, bias=bias[0] if bias else None)
        return out.detach(), list(torch.autograd.grad(out, leaves, grad_out.to(out.dtype)))

    reference, reference_grads = forward_backward("reference", True)
    out, grads = forward_backward(backend, False)
    forward = relative_error(out, reference)
    backward = max(map(relative_error, grads, reference_grads))
    sees_nothing = ~grid.table(case.mask, batch=BATCH, heads=HEADS, device=torch.device(device)).any(-1)
    sees_nothing = sees_nothing.expand(BATCH, HEADS, LENGTH)
    return {
        "case": case.name,
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "forward": f"{forward:.1e}",
        "backward": f"{backward:.1e}",
        "fully masked rows": int(sees_nothing.sum()),
        "are zeros": "yes" if not out[sees_nothing].any() else "no",  # any() is true of NaN too
        "agrees": "yes" if max(forward, backward) <= TOLERANCES[dtype] else "no",
    }


def relative_error(x: Tensor, reference: Tensor) -> float:
    """The largest difference over the largest reference value. NaN stays NaN and agrees with nothing."""
    return float((x.float() - reference.float()).abs().max() / reference.float().abs().max())


def check_parity(
    backends: tuple[str, ...], device: str, out_of_time: Callable[[], bool], smoke: bool = False
) -> list[dict[str, Any]]:
    """A row for each backend, dtype and case. An error is a row too; with `smoke` it is raised, and only two
    cases are checked.
    """
    cases = (CASES[2], CASES[8]) if smoke else CASES
    rows = []
    for backend in backends:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            if backend == "varlen" and dtype == torch.float32:
                continue  # it works in half precision alone
            if backend == "flex":
                torch.compiler.reset()  # or the compiler gives up on it after some eight variants
            for case in cases:
                if out_of_time():
                    print(f"out of time before {backend}, {dtype}, {case.name}", flush=True)
                    return rows
                try:
                    rows.append(check_case(case, backend, dtype, device))
                except Exception as error:
                    if smoke:
                        raise
                    message = " ".join(f"{type(error).__name__}: {error}".split())[:70]
                    rows.append(
                        {
                            "case": case.name,
                            "backend": backend,
                            "dtype": str(dtype).removeprefix("torch."),
                            "agrees": message,
                        }
                    )
    return rows
