"""The peak memory of attention as texts grow, through see() and attend(): linear means an exponent of 1 a
doubling.

On a CPU (float32) every length runs in a process of its own; on a GPU (bfloat16) the allocator is asked.
Queries, keys and values are there before; what is measured is the rest: the sight, the kernel's room and the
output. The peer is the output itself, (B, T, H·D): nothing can need less.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from report import arguments, show, write
from resident import in_a_child, peak_of, peak_on_gpu

HEADS = 8
WIDTH = 64
BATCH = 2
LENGTHS = (1024, 2048, 4096, 8192)
CASES = (
    "causal",
    "causal, with gradients",
    "right-padded",
    "left-padded",
    "packed",
    "packed, with gradients",
    "causal & window(256)",
)


def segments(case: str, length: int) -> Any:
    """(B, T): one full row beside one three quarters full, or rows packed with documents; None where there is
    one text.
    """
    import torch

    place = torch.arange(length)
    if case == "right-padded":
        return torch.stack([torch.ones_like(place), (place < length * 3 // 4).long()])
    if case == "left-padded":
        return torch.stack([torch.ones_like(place), (place >= length // 4).long()])
    if case.startswith("packed"):
        return torch.stack([1 + place // 300, 1 + (place + 100) // 420])
    return None


def measure(case: str, length: int, device: str) -> dict[str, int]:
    """Peak bytes of seeing, and of seeing and attending."""
    import torch

    from keepleft.attention.attend import attend, see
    from keepleft.attention.grid import Grid
    from keepleft.attention.masks import causal, window
    from keepleft.models.stack import positions_from_segments

    mask = causal & window(256) if "window" in case else causal
    learning = "gradients" in case
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    peak = peak_of if device == "cpu" else peak_on_gpu

    def sight(length: int) -> Any:
        segs = segments(case, length)
        if segs is None:
            grid = Grid(length, length)
        else:
            segs = segs.to(device)
            places = positions_from_segments(segs)
            grid = Grid(length, length, 0, places, places, segs, segs)
        return see(mask, grid, batch=BATCH, heads=HEADS, device=device, dtype=dtype)

    def inputs(length: int) -> list[Any]:
        new = lambda: torch.randn(BATCH, length, HEADS, WIDTH, device=device, dtype=dtype).transpose(1, 2)
        return [new().requires_grad_(learning) for _ in range(3)]

    def work(q: Any, k: Any, v: Any) -> Any:
        out = attend(q, k, v, sight(q.shape[2]))
        return torch.autograd.grad(out.sum(), (q, k, v)) if learning else out

    torch.manual_seed(0)
    torch.compiler.reset()  # or the compiler gives up on FlexAttention after some eight lengths
    # first calls set up threads, libraries and compiled kernels
    work(*inputs(320 if device == "cpu" else length))
    given = inputs(length)
    return {"seeing": peak(lambda: sight(length)), "all": peak(lambda: work(*given))}


def rows_of(case: str, device: str) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for length in LENGTHS:
        if device == "cpu":
            found = in_a_child(__file__, "--case", case, "--length", str(length))
        else:
            found = measure(case, length, device)
        tokens = BATCH * length
        size = tokens * HEADS * WIDTH * (4 if device == "cpu" else 2)
        before = out[-1]["peak MB"] if out else 0
        out.append(
            {
                "case": case,
                "T": length,
                "peak MB": round(found["all"] / 1e6, 2),
                "of it seeing MB": round(found["seeing"] / 1e6, 2),
                "bytes a token": round(found["all"] / tokens),
                "× output": round(found["all"] / size, 2),
                "exponent": round(math.log2(found["all"] / 1e6 / before), 2) if before else "",
            }
        )
    return out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--case", choices=CASES, help="measure just this, here, on the CPU, and print bytes as JSON"
    )
    parser.add_argument("--length", type=int, default=LENGTHS[0])
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure(chosen.case, chosen.length, "cpu")))
        return
    numbers: dict[str, Any] = {}
    numbers["cpu"] = [row for case in CASES for row in rows_of(case, "cpu")]
    show(f"peak memory on the CPU, float32, B={BATCH} H={HEADS} D={WIDTH}", numbers["cpu"])
    import torch

    if torch.cuda.is_available():
        numbers["cuda"] = [row for case in CASES for row in rows_of(case, "cuda")]
        show(
            f"peak memory on {torch.cuda.get_device_name()}, bfloat16, B={BATCH} H={HEADS} D={WIDTH}",
            numbers["cuda"],
        )
    write(chosen.json, numbers)


if __name__ == "__main__":
    main()
