"""attend() against the bare kernel: see() once, attend() per call, on a CPU in float32.

The peer is F.scaled_dot_product_attention with the same arguments. Ratios above 1 are the overhead of
attend().
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from keepleft.attention.attend import attend, see
from keepleft.attention.grid import Grid
from keepleft.attention.masks import Mask, causal, full, window
from report import environment, print_table, system_load, write_json
from timing import race

TARGET = 1.05
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


class Case(NamedTuple):
    name: str
    mask: Mask
    grid: Grid
    kernel: Kernel
    batch: int = 1
    heads: int = 12
    kv_heads: int = 12


def window_mask(length: int, size: int) -> Tensor:
    """(1, 1, T, T)"""
    is_causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (is_causal & ~is_causal.tril(-size))[None, None]


def right_padded(batch: int, length: int) -> Tensor:
    """(B, T) segments: every row a quarter shorter than its neighbour, down to a quarter."""
    lengths = torch.tensor([length - length * (row % 4) // 4 for row in range(batch)])
    return (torch.arange(length) < lengths[:, None]).long()


def padded_case(batch: int, length: int) -> Case:
    segments = right_padded(batch, length)
    mask = (
        torch.ones(length, length, dtype=torch.bool).tril()
        & (segments[:, None, :, None] != 0)
        & (segments[:, None, None, :] != 0)
    )
    return Case(
        f"padded B{batch} H12 T{length}",
        causal,
        Grid(length, length, q_seg=segments, k_seg=segments),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask),
        batch,
    )


def make_cases(max_length: int) -> list[Case]:
    cases = []
    causal_kernel: Kernel = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    full_kernel: Kernel = F.scaled_dot_product_attention
    for length in (16, 64, 256, 1024):
        cases.append(Case(f"causal B1 H12 T{length}", causal, Grid(length, length), causal_kernel))
    for length in (16, 64, 256, 1024):
        cases.append(Case(f"full B1 H12 T{length}", full, Grid(length, length), full_kernel))
    for length, size in ((64, 16), (256, 64), (1024, 256)):
        mask = window_mask(length, size)
        cases.append(
            Case(
                f"window({size}) B1 H12 T{length}",
                causal & window(size),
                Grid(length, length),
                lambda q, k, v, mask=mask: F.scaled_dot_product_attention(q, k, v, mask),
            )
        )
    cases += [padded_case(4, 64), padded_case(1, 128), padded_case(8, 128), padded_case(8, 256)]
    for length in (64, 256, 1024):
        cases.append(
            Case(
                f"causal, 3 key heads, T{length}",
                causal,
                Grid(length, length),
                lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
                kv_heads=3,
            )
        )
    for keys in (16, 256, 1024):
        cases.append(Case(f"one query, {keys} keys", causal, Grid(1, keys, keys - 1), full_kernel))
    cases.append(Case("one query, 256 keys, B8", causal, Grid(1, 256, 255), full_kernel, batch=8))
    return [case for case in cases if case.grid.keys <= max_length]


def measure(case: Case, seconds: float, warmup: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    new = lambda heads, length: torch.randn(case.batch, length, heads, 64, generator=generator).transpose(
        1, 2
    )
    q = new(case.heads, case.grid.queries)
    k = new(case.kv_heads, case.grid.keys)
    v = new(case.kv_heads, case.grid.keys)
    sight = see(case.mask, case.grid, batch=case.batch, heads=case.heads)
    keepleft, sdpa = lambda: attend(q, k, v, sight), lambda: case.kernel(q, k, v)
    is_token = slice(None) if case.grid.q_seg is None else (case.grid.q_seg != 0)
    torch.testing.assert_close(
        keepleft().transpose(1, 2)[is_token], sdpa().transpose(1, 2)[is_token], atol=1e-5, rtol=1e-4
    )
    result = race(keepleft, sdpa, seconds=seconds, warmup=warmup)
    return {
        "case": case.name,
        "keepleft µs": round(result.keepleft * 1e6, 2),
        "sdpa µs": round(result.peer * 1e6, 2),
        "ratio": round(result.ratio, 3),
        "≤ 1.05": "yes" if result.ratio <= TARGET else "no",
        "min ratio": round(result.min_ratio, 3),
        "noise": round(result.noise, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.5, help="to spend on each case")
    parser.add_argument("--threads", type=int, default=1, help="of the kernel; attend() itself has one")
    parser.add_argument("--max-length", type=int, default=1024, help="leave out cases of more keys")
    parser.add_argument("--warmup", type=int, default=10, help="calls before each case")
    options = parse_arguments(parser, argv, seconds=0.0, max_length=64, warmup=1)
    torch.set_num_threads(options.threads)
    print(f"{system_load()}, {options.threads} threads")
    long_cases = [padded_case(8, length) for length in (512, 1024) if length <= options.max_length]
    with torch.no_grad():
        rows = [measure(case, options.seconds, options.warmup) for case in make_cases(options.max_length)]
        long_rows = [measure(case, options.seconds, options.warmup) for case in long_cases]
    print_table("attend against F.scaled_dot_product_attention with the same arguments", rows)
    if long_rows:
        print_table(
            "long padded batches: attend calls the kernel per sequence, the peer with a boolean mask",
            long_rows,
        )
    write_json(
        options.json,
        {"environment": environment(), "target": TARGET, "rows": rows, "long padded batches": long_rows},
    )


if __name__ == "__main__":
    main()
