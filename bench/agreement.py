"""Does every kernel say what the reference says in float32, forward and backward? The largest errors, in the
range of 1.
"""

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
LENGTH = 320
WIDTH = 64  # long enough for every form
ALLOWED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


class Case(NamedTuple):
    name: str
    mask: Mask
    kind: str = "plain"  # plain, packed (padding at the end) or left (padding at the start)
    kv_heads: int = HEADS
    bias: bool = False


CASES = (
    Case("causal", causal),
    Case("causal & window(40)", causal & window(40)),
    Case("packed and padded", causal, "packed"),
    Case("packed and padded, window(40)", causal & window(40), "packed"),
    Case("left-padded, both ways", full, "left"),
    Case("~causal: the last sees nothing", ~causal),
    Case("packed, grouped heads", causal, "packed", 2),
    Case("causal, bias", causal, bias=True),
    Case("packed, grouped heads, bias", causal, "packed", 2, True),
)


def segments(kind: str, device: str) -> Tensor:
    """(B, T)"""
    place = torch.arange(LENGTH, device=device)
    if kind == "left":
        rows = [(place >= 60).long(), torch.ones_like(place)]
    elif kind == "packed":
        rows = [(1 + place // 100) * (place < 300), (1 + place // 140) * (place < 261)]
    else:
        rows = [torch.ones_like(place)] * BATCH
    return torch.stack(rows)


def compare(case: Case, backend: str, dtype: torch.dtype, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    segs = segments(case.kind, device)
    places = positions_from_segments(segs)
    grid = Grid(LENGTH, LENGTH, 0, places, places, segs, segs)
    if case.kind == "plain" and backend != "varlen":
        grid = Grid(LENGTH, LENGTH)
    new = lambda heads: torch.randn(BATCH, LENGTH, heads, WIDTH, device=device).to(dtype).transpose(1, 2)
    given = [new(HEADS), new(case.kv_heads), new(case.kv_heads)]
    back = new(HEADS)
    if case.bias:
        given.append(torch.randn(1, HEADS, LENGTH, LENGTH, device=device))

    def both_ways(name: str, precise: bool) -> tuple[Tensor, list[Tensor]]:
        sight = see(case.mask, grid, batch=BATCH, heads=HEADS, device=device, dtype=dtype, backend=name)
        leaves = [(x.float() if precise else x).clone().requires_grad_() for x in given]
        q, k, v, *bias = leaves
        out = attend(q, k, v, sight, bias=bias[0] if bias else None)
        return out.detach(), list(torch.autograd.grad(out, leaves, back.to(out.dtype)))

    true, true_back = both_ways("reference", True)
    out, out_back = both_ways(backend, False)
    forward, backward = error(out, true), max(map(error, out_back, true_back))
    blind = ~grid.table(case.mask, batch=BATCH, heads=HEADS, device=torch.device(device)).any(-1)
    blind = blind.expand(BATCH, HEADS, LENGTH)
    return {
        "case": case.name,
        "backend": backend,
        "type": str(dtype).removeprefix("torch."),
        "forward": f"{forward:.1e}",
        "backward": f"{backward:.1e}",
        "blind rows": int(blind.sum()),
        "are zeros": "yes" if not out[blind].any() else "no",  # any() is true of NaN too
        "agrees": "yes" if max(forward, backward) <= ALLOWED[dtype] else "no",
    }


def error(found: Tensor, true: Tensor) -> float:
    """The largest difference, as a part of the largest value; NaN stays NaN and agrees with nothing."""
    return float((found.float() - true.float()).abs().max() / true.float().abs().max())


def agreement(backends: tuple[str, ...], device: str, late: Callable[[], bool]) -> list[dict[str, Any]]:
    rows = []
    for backend in backends:
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            if backend == "flex":
                torch.compiler.reset()  # or the compiler gives up on it after some eight variants
            for case in CASES:
                if late():
                    print(f"out of time before {backend}, {dtype}, {case.name}", flush=True)
                    return rows
                try:
                    rows.append(compare(case, backend, dtype, device))
                except Exception as problem:
                    why = " ".join(f"{type(problem).__name__}: {problem}".split())[:70]
                    rows.append(
                        {
                            "case": case.name,
                            "backend": backend,
                            "type": str(dtype).removeprefix("torch."),
                            "agrees": why,
                        }
                    )
    return rows
