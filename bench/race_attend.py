"""Attention through the door against the bare kernel: see() once, attend() per call, on a CPU in float32.

The peer is F.scaled_dot_product_attention with the very same arguments. Ratios above 1 are what the door
costs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from keepleft.attention.attend import attend, see
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, full, window
from report import about, arguments, show, weather, write
from timing import race

TARGET = 1.05
Direct = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    name: str
    mask: Mask
    grid: Grid
    direct: Direct
    batch: int = 1
    heads: int = 12
    kv_heads: int = 12


def banded(queries: int, size: int) -> Tensor:
    near = torch.ones(queries, queries, dtype=torch.bool).tril()
    return (near & ~near.tril(-size))[None, None]


def right_padded(batch: int, length: int) -> Tensor:
    """(B, T) segments: every row a quarter shorter than its neighbour, down to a quarter."""
    real = torch.tensor([length - length * (row % 4) // 4 for row in range(batch)])
    return (torch.arange(length) < real[:, None]).long()


def padded_case(batch: int, length: int) -> Case:
    segments = right_padded(batch, length)
    table = (
        torch.ones(length, length, dtype=torch.bool).tril()
        & (segments[:, None, :, None] != 0)
        & (segments[:, None, None, :] != 0)
    )
    return Case(
        f"padded B{batch} H12 T{length}",
        causal,
        Grid(length, length, q_seg=segments, k_seg=segments),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, table),
        batch,
    )


def cases() -> list[Case]:
    out = []
    triangle: Direct = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    everything: Direct = F.scaled_dot_product_attention
    for length in (16, 64, 256, 1024):
        out.append(Case(f"causal B1 H12 T{length}", causal, Grid(length, length), triangle))
    for length in (16, 64, 256, 1024):
        out.append(Case(f"full B1 H12 T{length}", full, Grid(length, length), everything))
    for length, size in ((64, 16), (256, 64), (1024, 256)):
        table = banded(length, size)
        out.append(
            Case(
                f"window({size}) B1 H12 T{length}",
                causal & window(size),
                Grid(length, length),
                lambda q, k, v, table=table: F.scaled_dot_product_attention(q, k, v, table),
            )
        )
    out += [padded_case(1, 128), padded_case(8, 128), padded_case(8, 256)]
    for length in (64, 256, 1024):
        out.append(
            Case(
                f"causal, 3 key heads, T{length}",
                causal,
                Grid(length, length),
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                kv_heads=3,
            )
        )
    for keys in (16, 256, 1024):
        out.append(Case(f"one query, {keys} keys", causal, Grid(1, keys, keys - 1), everything))
    out.append(Case("one query, 256 keys, B8", causal, Grid(1, 256, 255), everything, batch=8))
    return out


def run(case: Case, seconds: float) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    new = lambda heads, length: torch.randn(case.batch, length, heads, 64, generator=generator).transpose(
        1, 2
    )
    q = new(case.heads, case.grid.queries)
    k = new(case.kv_heads, case.grid.keys)
    v = new(case.kv_heads, case.grid.keys)
    sight = see(case.mask, case.grid, batch=case.batch, heads=case.heads)
    ours, theirs = lambda: attend(q, k, v, sight), lambda: case.direct(q, k, v)
    real = slice(None) if case.grid.q_seg is None else (case.grid.q_seg != 0)
    torch.testing.assert_close(
        ours().transpose(1, 2)[real], theirs().transpose(1, 2)[real], atol=1e-5, rtol=1e-4
    )
    found = race(ours, theirs, seconds=seconds, warm=10)
    return {
        "case": case.name,
        "ours µs": round(found.ours * 1e6, 2),
        "sdpa µs": round(found.theirs * 1e6, 2),
        "ratio": round(found.ratio, 3),
        "≤ 1.05": "yes" if found.ratio <= TARGET else "no",
        "of the quickest": round(found.quickest, 3),
        "busy": round(found.busy, 1),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="to spend on each case")
    parser.add_argument("--threads", type=int, default=1, help="of the kernel; the door has one")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{weather()}, {chosen.threads} threads")
    with torch.no_grad():
        same = [run(case, chosen.seconds) for case in cases()]
        longer = [run(padded_case(8, length), chosen.seconds) for length in (512, 1024)]
    show("attend against F.scaled_dot_product_attention with the same arguments", same)
    show(
        "padded batches too long for a table, attended text by text, against the same kernel with a table",
        longer,
    )
    write(chosen.json, {"about": about(), "target": TARGET, "same": same, "longer": longer})


if __name__ == "__main__":
    main()
