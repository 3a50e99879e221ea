"""Peak memory of attention as sequences grow, through see() and attend(): is it linear?

Linear is an exponent of 1 per doubling. On a CPU (float32) every length runs in a process of its own; on a
GPU (bfloat16) the allocator is asked. Queries, keys and values exist before; what is measured is the rest:
the lowered mask, the workspace of the kernel and the output. The yardstick is the output itself, (B, T, H·D):
nothing can need less.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from peak_memory import peak_cuda_memory, peak_rss, run_child
from report import print_table, write_json

HEADS = 8
HEAD_DIM = 64
BATCH = 2
LENGTHS = (1024, 2048, 4096, 8192)
WARMUP_LENGTH = 320
CASES = (
    "causal",
    "causal, with gradients",
    "right-padded",
    "left-padded",
    "packed",
    "packed, with gradients",
    "causal & window(256)",
)


def make_segments(case: str, length: int) -> Any:
    """(B, T): a full row and one three quarters full, or rows packed with documents; None without padding and
    packing.
    """
    import torch

    positions = torch.arange(length)
    if case == "right-padded":
        return torch.stack([torch.ones_like(positions), (positions < length * 3 // 4).long()])
    if case == "left-padded":
        return torch.stack([torch.ones_like(positions), (positions >= length // 4).long()])
    if case.startswith("packed"):
        return torch.stack([1 + positions // 300, 1 + (positions + 100) // 420])
    return None


def measure(case: str, length: int, device: str) -> dict[str, int]:
    """Peak bytes of see(), and of see() and attend() together."""
    import torch

    from keepleft.attention.attend import attend, see
    from keepleft.attention.grid import Grid
    from keepleft.attention.masks import causal, window
    from keepleft.models.stack import positions_from_segments

    mask = causal & window(256) if "window" in case else causal
    with_gradients = "gradients" in case
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    peak = peak_rss if device == "cpu" else peak_cuda_memory

    def make_sight(length: int) -> Any:
        segments = make_segments(case, length)
        if segments is None:
            grid = Grid(length, length)
        else:
            segments = segments.to(device)
            positions = positions_from_segments(segments)
            grid = Grid(length, length, 0, positions, positions, segments, segments)
        return see(mask, grid, batch=BATCH, heads=HEADS, device=device, dtype=dtype)

    def make_inputs(length: int) -> list[Any]:
        new = lambda: torch.randn(BATCH, length, HEADS, HEAD_DIM, device=device, dtype=dtype).transpose(1, 2)
        return [new().requires_grad_(with_gradients) for _ in range(3)]

    def work(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v, make_sight(q.shape[2]))
        return torch.autograd.grad(out.sum(), (q, k, v)) if with_gradients else out

    torch.manual_seed(0)
    torch.compiler.reset()  # or the compiler gives up on FlexAttention after some eight lengths
    # first calls set up threads, libraries and compiled kernels
    work(*make_inputs(min(length, WARMUP_LENGTH) if device == "cpu" else length))
    inputs = make_inputs(length)
    return {"see": peak(lambda: make_sight(length)), "total": peak(lambda: work(*inputs))}


def measure_case(case: str, lengths: Sequence[int], device: str, in_child: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for length in lengths:
        if in_child:
            peaks = run_child(__file__, "--measure", case, str(length))
        else:
            peaks = measure(case, length, device)
        tokens = BATCH * length
        output_bytes = tokens * HEADS * HEAD_DIM * (4 if device == "cpu" else 2)
        shorter = rows[-1]["peak MB"] if rows else 0
        peak_mb = round(peaks["total"] / 1e6, 2)
        rows.append(
            {
                "case": case,
                "T": length,
                "peak MB": peak_mb,
                "see MB": round(peaks["see"] / 1e6, 2),
                "bytes/token": round(peaks["total"] / tokens),
                "× output": round(peaks["total"] / output_bytes, 2),
                "exponent": round(math.log2(peak_mb / shorter), 2) if peak_mb > 0 and shorter > 0 else "",
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument(
        "--measure",
        nargs=2,
        metavar=("CASE", "LENGTH"),
        help="measure one here on the CPU, print bytes as JSON",
    )
    smoke_cases = ["causal", "left-padded", "packed, with gradients", "causal & window(256)"]
    options = parse_arguments(parser, argv, lengths=[32], cases=smoke_cases)
    if options.measure:
        print(json.dumps(measure(options.measure[0], int(options.measure[1]), "cpu")))
        return
    numbers: dict[str, Any] = {}
    in_child = not options.smoke  # new processes would take seconds
    numbers["cpu"] = [
        row for case in options.cases for row in measure_case(case, options.lengths, "cpu", in_child)
    ]
    print_table(f"peak memory on the CPU, float32, B={BATCH} H={HEADS} D={HEAD_DIM}", numbers["cpu"])
    import torch

    if torch.cuda.is_available():
        numbers["cuda"] = [
            row for case in options.cases for row in measure_case(case, options.lengths, "cuda", False)
        ]
        device = torch.cuda.get_device_name()
        print_table(f"peak memory on {device}, bfloat16, B={BATCH} H={HEADS} D={HEAD_DIM}", numbers["cuda"])
    write_json(options.json, numbers)


if __name__ == "__main__":
    main()
