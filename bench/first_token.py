"""How long the first token takes: reading a prompt with a cache, and all until the first token is there,
against one forward pass over the prompt. The aim is at most 1.1 times as long. `--slope` also tells the speed
of the tokens after the first.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from report import about, arguments, show, write

DESIGNS = {"gpt2": kl.presets.gpt2, "7b": kl.presets.llama}


def rounds(works: dict[str, Callable[[], Any]], count: int, device: str) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in works}
    for number in range(count + 2):
        for name, work in works.items():
            before = time.perf_counter()
            work()
            if device == "cuda":
                torch.cuda.synchronize()
            if number > 1:
                found[name].append(time.perf_counter() - before)
    return {name: statistics.median(times) for name, times in found.items()}


@torch.no_grad()
def measured(model: Any, length: int, count: int, slope: bool, device: str) -> dict[str, Any]:
    prompt = torch.randint(3, model.design.vocab, (1, length), device=device)
    write_so_many = lambda n: lambda: kl.completions(model, None, prompt.tolist(), max_new_tokens=n)
    found = rounds(
        {"forward": lambda: model(prompt), "prefill": lambda: model.start(prompt), "first": write_so_many(1)},
        count,
        device,
    )
    row: dict[str, Any] = {side: round(1000 * seconds, 2) for side, seconds in found.items()}
    row |= {f"{side} / forward": found[side] / found["forward"] for side in ("prefill", "first")}
    if slope:
        more = rounds({"64": write_so_many(64), "192": write_so_many(192)}, 3, device)
        row["tokens/s after the first"] = round(128 / (more["192"] - more["64"]), 1)
    return row


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=DESIGNS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--slope", action="store_true")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in chosen.models:
        model = kl.build(
            DESIGNS[name], device=device, dtype=torch.bfloat16 if device == "cuda" else None
        ).eval()
        for length in chosen.lengths:
            rows.append(
                {"model": name, "prompt": length}
                | measured(model, length, chosen.rounds, chosen.slope, device)
            )
            print(rows[-1], flush=True)
        del model
    show("milliseconds", rows)
    write(chosen.json, {"about": about(), "rows": rows})


if __name__ == "__main__":
    main()
