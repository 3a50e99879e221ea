"""The peak memory of kl.load of a GPT-2 (124 M float32 weights, made up), each time in a process of its own.

The peer is the weights themselves: 1.0 would be a load that never holds a byte twice. Everything is imported,
and a tiny model is loaded, before measuring starts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from report import arguments, show, write
from resident import in_a_child, peak_of

TARGET = 1.2
SHARD = 100 << 20  # bytes: five shards


def make(folder: Path) -> dict[str, int]:
    """The same model as one file and in shards, and a tiny one. How many bytes of weights it has."""
    import keepleft as kl

    model = kl.build(kl.presets.gpt2)
    kl.save(model, None, folder / "whole")
    kl.save(model, None, folder / "sharded", shard=SHARD)
    tiny = kl.presets.gpt2.but(
        vocab=101,
        dim=32,
        heads=4,
        feedforward=kl.FeedForward(64, "gelu_tanh"),
        position=kl.LearnedPositions(64),
    )
    kl.save(kl.build(tiny), None, folder / "tiny")
    return {"weights": sum(p.nbytes for p in model.parameters())}


def measure(folder: Path, name: str, dtype: str) -> dict[str, int]:
    import torch

    import keepleft as kl

    given = {"dtype": getattr(torch, dtype)}
    kl.load(folder / "tiny", **given)
    return {"peak": peak_of(lambda: kl.load(folder / name, **given))}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--make", type=Path, metavar="FOLDER", help="write the models there, and nothing else"
    )
    parser.add_argument(
        "--measure", nargs=3, metavar=("FOLDER", "NAME", "DTYPE"), help="load one here, print bytes as JSON"
    )
    chosen = parser.parse_args()
    if chosen.make:
        print(json.dumps(make(chosen.make)))
        return
    if chosen.measure:
        print(json.dumps(measure(Path(chosen.measure[0]), *chosen.measure[1:])))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        weights = in_a_child(__file__, "--make", folder)["weights"]
        for name, dtype, bytes_ in (
            ("whole", "float32", weights),
            ("sharded", "float32", weights),
            ("whole", "bfloat16", weights // 2),
        ):
            peak = sorted(in_a_child(__file__, "--measure", folder, name, dtype)["peak"] for _ in range(3))[1]
            ratio = round(peak / bytes_, 3)
            rows.append(
                {
                    "directory": name,
                    "loaded as": dtype,
                    "weights MB": round(bytes_ / 1e6, 1),
                    "peak MB": round(peak / 1e6, 1),
                    "ratio": ratio,
                    "< 1.2": "yes" if ratio < TARGET else "no",
                }
            )
    show("peak memory of kl.load against the size of the weights loaded", rows)
    write(chosen.json, {"target": TARGET, "rows": rows})


if __name__ == "__main__":
    main()
