"""Peak memory of kl.load of GPT-2 124M (random float32 weights), each time in a process of its own.

The yardstick is the weights themselves: 1.0 would be a load that never holds a byte twice. Everything is
imported, and a tiny model is loaded, before measuring starts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from peak_memory import peak_rss, run_child
from report import print_table, write_json

TARGET = 1.2
NUM_SHARDS = 5


def make_models(folder: Path, smoke: bool) -> dict[str, int]:
    """The same model as one file and in shards, and a tiny one. Returns how many bytes of weights it has."""
    import keepleft as kl

    tiny = kl.presets.small(kl.presets.gpt2)
    model = kl.build(tiny if smoke else kl.presets.gpt2)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    kl.save(model, None, folder / "one file")
    kl.save(model, None, folder / "sharded", shard=weight_bytes // NUM_SHARDS)
    kl.save(kl.build(tiny), None, folder / "tiny")
    return {"weights": weight_bytes}


def measure(folder: Path, name: str, dtype: str) -> dict[str, int]:
    import torch

    import keepleft as kl

    options = {"dtype": getattr(torch, dtype)}
    kl.load(folder / "tiny", **options)
    return {"peak": peak_rss(lambda: kl.load(folder / name, **options))}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many counts")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="write the models there, nothing else")
    parser.add_argument(
        "--measure", nargs=3, metavar=("FOLDER", "NAME", "DTYPE"), help="load one here, print bytes as JSON"
    )
    options = parse_arguments(parser, argv, rounds=1)
    if options.make:
        print(json.dumps(make_models(options.make, options.smoke)))
        return
    if options.measure:
        print(json.dumps(measure(Path(options.measure[0]), *options.measure[1:])))
        return
    rows: list[dict[str, Any]] = []
    smoke = ["--smoke"] if options.smoke else []
    with tempfile.TemporaryDirectory() as folder:
        weights = run_child(__file__, *smoke, "--make", folder)["weights"]
        for name, dtype, weight_bytes in (
            ("one file", "float32", weights),
            ("sharded", "float32", weights),
            ("one file", "bfloat16", weights // 2),
        ):
            peaks = [
                measure(Path(folder), name, dtype)["peak"]
                if options.smoke  # new processes would take seconds
                else run_child(__file__, "--measure", folder, name, dtype)["peak"]
                for _ in range(options.rounds)
            ]
            peak = sorted(peaks)[len(peaks) // 2]
            ratio = round(peak / weight_bytes, 3)
            rows.append(
                {
                    "directory": name,
                    "loaded as": dtype,
                    "weights MB": round(weight_bytes / 1e6, 1),
                    "peak MB": round(peak / 1e6, 1),
                    "ratio": ratio,
                    "< 1.2": "yes" if ratio < TARGET else "no",
                }
            )
    print_table("peak memory of kl.load against the size of the weights loaded", rows)
    write_json(options.json, {"target": TARGET, "rows": rows})


if __name__ == "__main__":
    main()
