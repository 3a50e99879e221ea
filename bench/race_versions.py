"""Two versions of keepleft, round by round in turns: the serving engine's throughput with each.

TREE is a checkout of the other version (`git worktree add TREE COMMIT`). Each version has a process of its
own, which loads race_serve_gpu.py of its tree and keeps its engine; the two take turns, so that what else the
machine does meanwhile meets both. Besides the seconds of a round, its seconds of CPU time are counted, which
other work disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from command_line import add_device, choose_device, make_parser, parse_arguments
from report import environment, print_table, write_json

ROOT = Path(__file__).resolve().parents[1]
# what a child runs: a round for each line that it reads
CHILD = """
import json, sys, time
name, device, num_requests, smoke = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "smoke"
import race_serve_gpu as race
import torch
import keepleft as kl
torch.manual_seed(0)
design = kl.presets.small(race.DESIGNS[name]) if smoke else race.DESIGNS[name]
model = kl.build(design, device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32).eval()
model.notes = {"bos_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
requests = race.make_requests(name, design.vocab, num_requests, 0.125 if smoke else 1.0)
generate = race.generate_keepleft(race.make_engine(model, name, num_requests, smoke), requests)
for line in sys.stdin:
    started, cpu_started = time.perf_counter(), time.process_time()
    num_tokens = sum(map(len, generate()))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    print(json.dumps([num_tokens, seconds, cpu_seconds]), flush=True)
"""


def start_version(tree: Path, name: str, device: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    arguments = [name, device, str(options.requests), "smoke" if options.smoke else "full"]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        cwd=tree / "bench",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_round(version: subprocess.Popen[str]) -> tuple[int, float, float]:
    """Tokens, seconds, seconds of CPU time."""
    commands, answers = cast(IO[str], version.stdin), cast(IO[str], version.stdout)
    commands.write("\n")
    commands.flush()
    line = answers.readline()
    if not line:
        raise SystemExit("a version stopped: its error is above")
    num_tokens, seconds, cpu_seconds = json.loads(line)
    return num_tokens, seconds, cpu_seconds


def compare(
    trees: dict[str, Path], name: str, device: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    versions = {label: start_version(tree, name, device, options) for label, tree in trees.items()}
    try:
        for version in versions.values():
            for _ in range(options.warm_ups):
                run_round(version)
        rounds: dict[str, list[tuple[int, float, float]]] = {label: [] for label in versions}
        for number in range(options.rounds):
            for label in sorted(versions, reverse=bool(number % 2)):
                rounds[label].append(run_round(versions[label]))
    finally:
        for version in versions.values():
            version.kill()
            version.wait()
    rows = []
    for label, results in rounds.items():
        tokens, seconds, cpu_seconds = zip(*results, strict=True)
        rows.append(
            {
                "model": name,
                "version": label,
                "tok/s, median": round(tokens[0] / statistics.median(seconds)),
                "tok/s, best": round(tokens[0] / min(seconds)),
                "CPU ms, median": 1e3 * statistics.median(cpu_seconds),
                "CPU ms, least": 1e3 * min(cpu_seconds),
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--tree", type=Path, default=ROOT, help="default: this version, against itself")
    parser.add_argument("--models", nargs="+", default=["base", "gpt2"], choices=["base", "gpt2"])
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--warm-ups", type=int, default=3)
    options = parse_arguments(parser, argv, requests=4, rounds=1, warm_ups=1)
    device = choose_device(options)
    if device is None:
        return
    trees = {"this": ROOT, "other": options.tree.resolve()}
    rows = [row for name in options.models for row in compare(trees, name, device, options)]
    print_table(f"{options.requests} requests, {options.rounds} rounds of each version in turns", rows)
    write_json(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
