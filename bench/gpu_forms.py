"""attend() on a GPU against the same kernels called by hand, in bfloat16: causal, windowed and packed
batches.

The peers: F.scaled_dot_product_attention, compiled FlexAttention with a mask written for the case, and
varlen_attn on tokens that already lie end to end. see() is not in the ratio; its time and memory have columns
of their own. Also: whether every kernel agrees with the reference.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from agreement import agreement
from by_hand import by_hand
from keepleft.attention.attend import attend, see
from report import about, arguments, show, write
from resident import peak_on_gpu
from scenes import Scene, scenes
from timing import race, waited

TARGET = 1.1
HEADS, WIDTH = 16, 64
SIZES = ((4, 4096), (1, 8192), (16, 1024))
BACKENDS = ("sdpa", "flex", "varlen", None)  # None: whatever suits


def tensors(scene: Scene, device: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values as a model makes them, heads beside tokens, and a gradient to send back."""
    generator = torch.Generator(device).manual_seed(0)
    new = lambda: torch.randn(
        scene.batch, scene.length, HEADS, WIDTH, generator=generator, device=device, dtype=dtype
    )
    return [new().transpose(1, 2).requires_grad_() for _ in range(3)], new().transpose(1, 2)


def one(scene: Scene, backend: str | None, device: str, dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    given, back = tensors(scene, device, dtype)
    grid = scene.grid(backend, device)
    looking = partial(
        see, scene.mask, grid, batch=scene.batch, heads=HEADS, device=device, dtype=dtype, backend=backend
    )
    sight = looking()
    hand = by_hand(sight.backend, scene, device)
    laid, laid_back = [hand.lay(x) for x in given], hand.lay(back).detach()

    ours, theirs = partial(attend, *given, sight), partial(hand.attend, *laid)
    ours_back = lambda: torch.autograd.grad(ours(), given, back)
    theirs_back = lambda: torch.autograd.grad(theirs(), laid, laid_back)

    real = slice(None) if scene.segments is None else (scene.segments != 0).flatten()
    mine = ours().detach().transpose(1, 2).flatten(0, 1)[real]
    other = theirs().detach()
    if other.dim() == 4:
        other = other.transpose(1, 2).flatten(0, 1)[real]
    apart = float((mine.float() - other.float()).abs().max())
    ours_back(), theirs_back()  # whatever compiles, compiles here

    forward = race(ours, theirs, seconds=seconds, sample=0.01, device=device)
    both = race(ours_back, theirs_back, seconds=seconds, sample=0.01, device=device)
    row = {
        "B": scene.batch,
        "T": scene.length,
        "scene": scene.name,
        "backend": f"automatic: {sight.backend}" if backend is None else backend,
        "ms": round(forward.ours * 1e3, 3),
        "by hand": round(forward.theirs * 1e3, 3),
        "ratio": round(forward.ratio, 3),
        "+ back ms": round(both.ours * 1e3, 3),
        "+ back by hand": round(both.theirs * 1e3, 3),
        "+ back ratio": round(both.ratio, 3),
        "≤ 1.1": "yes" if max(forward.ratio, both.ratio) <= TARGET else "no",
        "see ms": round(waited(looking, 3, device) * 1e3, 3),
        "apart": round(apart, 4),
    }
    if device == "cuda":
        row |= {
            "see MB": round(peak_on_gpu(looking) / 1e6, 1),
            "MB": round(peak_on_gpu(ours_back) / 1e6, 1),
            "by hand MB": round(peak_on_gpu(theirs_back) / 1e6, 1),
        }
    return row


def races(
    device: str, dtype: torch.dtype, seconds: float, late: Any, sizes: Any = SIZES
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch, length in sizes:
        for scene in scenes(batch, length, device):
            torch.compiler.reset()  # or the compiler gives up on FlexAttention after some eight variants
            for backend in BACKENDS:
                where = f"B={batch} T={length} {scene.name}, {backend or 'automatic'}"
                if late():
                    print(f"out of time before {where}", flush=True)
                    return rows
                try:
                    rows.append(one(scene, backend, device, dtype, seconds))
                    print(f"done: {where}", file=sys.stderr, flush=True)
                except Exception as problem:
                    print(f"{where}: {type(problem).__name__}: {str(problem)[:600]}", flush=True)
                    rows.append(
                        {
                            "B": batch,
                            "T": length,
                            "scene": scene.name,
                            "backend": backend or "automatic",
                            "≤ 1.1": type(problem).__name__,
                        }
                    )
    return rows


def best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The automatic choice against the quickest kernel called by hand, whichever that is."""
    out = []
    for row in rows:
        if not str(row["backend"]).startswith("automatic") or "ms" not in row:
            continue
        rivals = [
            other
            for other in rows
            if "ms" in other and all(other[name] == row[name] for name in ("B", "T", "scene"))
        ]
        first, both = (
            min(rivals, key=lambda other, name=name: other[name]) for name in ("by hand", "+ back by hand")
        )
        out.append(
            {
                "B": row["B"],
                "T": row["T"],
                "scene": row["scene"],
                "chosen": row["backend"],
                "ratio": round(row["ms"] / first["by hand"], 3),
                "to": first["backend"],
                "+ back ratio": round(row["+ back ms"] / both["+ back by hand"], 3),
                "+ back to": both["backend"],
            }
        )
    return out


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=0.3, help="to spend on each race")
    parser.add_argument("--limit", type=float, default=270.0, help="seconds after which no new case is begun")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("This race needs a GPU, and PyTorch sees none here: nothing was measured.")
        return
    begin = monotonic()
    numbers: dict[str, Any] = {"about": about(), "target": TARGET}
    print(numbers["about"], flush=True)
    try:
        numbers["agreement"] = agreement(
            ("sdpa", "varlen"), "cuda", lambda: monotonic() - begin > chosen.limit / 4
        )
        show("agreement with the reference in float32", numbers["agreement"])
        numbers["races"] = races(
            "cuda", torch.bfloat16, chosen.seconds, lambda: monotonic() - begin > chosen.limit * 3 / 4
        )
        show(
            f"attend against the same kernel called by hand, bfloat16, H={HEADS} D={WIDTH}", numbers["races"]
        )
        numbers["best"] = best(numbers["races"])
        show("the automatic choice against the quickest kernel by hand", numbers["best"])
        numbers["flex agreement"] = agreement(("flex",), "cuda", lambda: monotonic() - begin > chosen.limit)
        show("agreement of FlexAttention with the reference in float32", numbers["flex agreement"])
    finally:
        numbers["seconds"] = round(monotonic() - begin, 1)
        print(f"took {numbers['seconds']} s")
        write(chosen.json, numbers)


if __name__ == "__main__":
    main()
