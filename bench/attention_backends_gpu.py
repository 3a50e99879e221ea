"""attend() on a GPU against the same kernels called directly, in bfloat16.

Causal, windowed and packed batches. The peers: F.scaled_dot_product_attention, compiled FlexAttention with a
mask written for the workload, and varlen_attn on tokens that are contiguous already. see() is not in the
ratio; its time and memory have columns of their own. Also: whether every backend agrees with the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from attention_workloads import Workload, make_workloads
from backend_parity import check_parity
from command_line import add_device, choose_device, make_parser, parse_arguments
from direct_kernels import direct_kernel
from keepleft.attention.attend import attend, see
from peak_memory import peak_cuda_memory
from report import environment, print_table, write_json
from timing import median_latency, race

TARGET = 1.1
HEAD_DIM = 64
SHAPES = ((4, 4096), (1, 8192), (16, 1024))
SMOKE_SHAPES = ((2, 40),)
BACKENDS = ("sdpa", "flex", "varlen", None)  # None: chosen automatically
Row = dict[str, Any]


def make_inputs(
    workload: Workload, heads: int, device: str, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Queries, keys and values in the memory layout of a model, (B, T, H, D), and an output gradient."""
    generator = torch.Generator(device).manual_seed(0)
    new = lambda: torch.randn(
        workload.batch, workload.length, heads, HEAD_DIM, generator=generator, device=device, dtype=dtype
    )
    return [new().transpose(1, 2) for _ in range(3)], new().transpose(1, 2)


def measure(
    workload: Workload, heads: int, backend: str | None, device: str, dtype: torch.dtype, seconds: float
) -> Row:
    inputs, grad_out = make_inputs(workload, heads, device, dtype)
    prepare = partial(
        see,
        workload.mask,
        workload.grid(backend, device),
        batch=workload.batch,
        heads=heads,
        device=device,
        dtype=dtype,
        backend=backend,
    )
    sight = prepare()
    kernel = direct_kernel(sight.backend, workload, device)
    has_backward = device == "cuda" or sight.backend != "flex"  # FlexAttention has none on a CPU
    inputs = [x.requires_grad_(has_backward) for x in inputs]
    direct_inputs, direct_grad_out = (
        [kernel.to_layout(x) for x in inputs],
        kernel.to_layout(grad_out).detach(),
    )

    forward, direct = partial(attend, *inputs, sight), partial(kernel.attend, *direct_inputs)
    backward = lambda: torch.autograd.grad(forward(), inputs, grad_out)
    direct_backward = lambda: torch.autograd.grad(direct(), direct_inputs, direct_grad_out)

    is_token = slice(None) if workload.segments is None else (workload.segments != 0).flatten()
    out = forward().detach().transpose(1, 2).flatten(0, 1)[is_token]
    direct_out = direct().detach()
    if direct_out.dim() == 4:
        direct_out = direct_out.transpose(1, 2).flatten(0, 1)[is_token]
    difference = float((out.float() - direct_out.float()).abs().max())

    forward_race = race(forward, direct, seconds=seconds, sample_seconds=0.01, device=device)
    ratios = [forward_race.ratio]
    row = {
        "B": workload.batch,
        "T": workload.length,
        "workload": workload.name,
        "backend": f"automatic: {sight.backend}" if backend is None else backend,
        "ms": round(forward_race.keepleft * 1e3, 3),
        "direct ms": round(forward_race.peer * 1e3, 3),
        "ratio": round(forward_race.ratio, 3),
    }
    if has_backward:
        backward(), direct_backward()  # compilation happens here
        backward_race = race(backward, direct_backward, seconds=seconds, sample_seconds=0.01, device=device)
        ratios.append(backward_race.ratio)
        row |= {
            "fwd+bwd ms": round(backward_race.keepleft * 1e3, 3),
            "direct fwd+bwd ms": round(backward_race.peer * 1e3, 3),
            "fwd+bwd ratio": round(backward_race.ratio, 3),
        }
    row |= {
        "≤ 1.1": "yes" if max(ratios) <= TARGET else "no",
        "see ms": round(median_latency(prepare, 3, device) * 1e3, 3),
        "max difference": round(difference, 4),
    }
    if device == "cuda":
        row |= {
            "see MB": round(peak_cuda_memory(prepare) / 1e6, 1),
            "fwd+bwd MB": round(peak_cuda_memory(backward) / 1e6, 1),
            "direct fwd+bwd MB": round(peak_cuda_memory(direct_backward) / 1e6, 1),
        }
    return row


def measure_all(
    shapes: Iterable[tuple[int, int]],
    heads: int,
    backends: Sequence[str | None],
    device: str,
    dtype: torch.dtype,
    seconds: float,
    out_of_time: Callable[[], bool],
    smoke: bool,
) -> list[Row]:
    """A row for each shape, workload and backend; an error is a row too, but with `smoke` it is raised."""
    rows: list[Row] = []
    for batch, length in shapes:
        for workload in make_workloads(batch, length, device):
            torch.compiler.reset()  # or the compiler gives up on FlexAttention after some eight variants
            for backend in backends:
                label = f"B={batch} T={length} {workload.name}, {backend or 'automatic'}"
                if out_of_time():
                    print(f"out of time before {label}", flush=True)
                    return rows
                try:
                    rows.append(measure(workload, heads, backend, device, dtype, seconds))
                    print(f"done: {label}", file=sys.stderr, flush=True)
                except Exception as error:
                    if smoke:
                        raise
                    print(f"{label}: {type(error).__name__}: {str(error)[:600]}", flush=True)
                    rows.append(
                        {
                            "B": batch,
                            "T": length,
                            "workload": workload.name,
                            "backend": backend or "automatic",
                            "≤ 1.1": type(error).__name__,
                        }
                    )
    return rows


def compare_with_fastest(rows: list[Row]) -> list[Row]:
    """The automatic choice against the fastest kernel called directly, whichever that is."""
    comparisons = []
    for row in rows:
        if not str(row["backend"]).startswith("automatic") or "fwd+bwd ms" not in row:
            continue
        same_workload = [
            other
            for other in rows
            if "fwd+bwd ms" in other and all(other[name] == row[name] for name in ("B", "T", "workload"))
        ]
        fastest = min(same_workload, key=lambda other: other["direct ms"])
        fastest_backward = min(same_workload, key=lambda other: other["direct fwd+bwd ms"])
        comparisons.append(
            {
                "B": row["B"],
                "T": row["T"],
                "workload": row["workload"],
                "chosen": row["backend"],
                "ratio": round(row["ms"] / max(fastest["direct ms"], 1e-3), 3),
                "fastest": fastest["backend"],
                "fwd+bwd ratio": round(
                    row["fwd+bwd ms"] / max(fastest_backward["direct fwd+bwd ms"], 1e-3), 3
                ),
                "fastest fwd+bwd": fastest_backward["backend"],
            }
        )
    return comparisons


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--seconds", type=float, default=0.3, help="to spend on each race")
    parser.add_argument("--limit", type=float, default=270.0, help="seconds after which no new case begins")
    parser.add_argument("--heads", type=int, default=16)
    options = parse_arguments(parser, argv, seconds=0.0, heads=2)
    device = choose_device(options)
    if device is None:
        return
    shapes, backends = (SMOKE_SHAPES if options.smoke else SHAPES), BACKENDS
    parity_backends: tuple[str, ...] = ("sdpa", "varlen")
    if device != "cuda":
        print("varlen needs CUDA: left out")
        backends, parity_backends = ("sdpa", "flex", None), ("sdpa",)
    started = monotonic()
    limit = options.limit
    numbers: dict[str, Any] = {"environment": environment(), "target": TARGET}
    print(numbers["environment"], flush=True)
    try:
        numbers["parity"] = check_parity(
            parity_backends, device, lambda: monotonic() - started > limit / 4, options.smoke
        )
        print_table("agreement with the float32 reference", numbers["parity"])
        numbers["races"] = measure_all(
            shapes,
            options.heads,
            backends,
            device,
            torch.bfloat16 if device == "cuda" else torch.float32,
            options.seconds,
            lambda: monotonic() - started > limit * 3 / 4,
            options.smoke,
        )
        title = f"attend against the same kernel called directly, H={options.heads} D={HEAD_DIM}"
        print_table(title, numbers["races"])
        numbers["fastest"] = compare_with_fastest(numbers["races"])
        print_table("the automatic choice against the fastest kernel called directly", numbers["fastest"])
        if device == "cuda":
            numbers["flex parity"] = check_parity(
                ("flex",), device, lambda: monotonic() - started > limit, options.smoke
            )
            print_table("agreement of FlexAttention with the float32 reference", numbers["flex parity"])
    finally:
        numbers["seconds"] = round(monotonic() - started, 1)
        print(f"took {numbers['seconds']} s")
        write_json(options.json, numbers)


if __name__ == "__main__":
    main()
