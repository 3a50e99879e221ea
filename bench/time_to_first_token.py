"""Time to first token: prefill with a KV cache, and generating one token, against one forward pass.

The target is at most 1.1 times the forward pass over the prompt. `--decode` also measures the speed of the
tokens after the first.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from command_line import add_device, make_parser, parse_arguments
from report import environment, print_table, write_json
from timing import take_turns

DESIGNS = {"gpt2": kl.presets.gpt2, "7b": kl.presets.llama}


def median_seconds(works: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    samples = take_turns(works, rounds, warmup=2, device=device)
    return {name: statistics.median(seconds) for name, seconds in samples.items()}


@torch.no_grad()
def measure(
    model: Any, length: int, rounds: int, decode_lengths: tuple[int, int] | None, device: str
) -> dict[str, Any]:
    prompt = torch.randint(3, model.design.vocab, (1, length), device=device)
    generate = lambda n: lambda: kl.completions(model, None, prompt.tolist(), max_new_tokens=n)
    seconds = median_seconds(
        {
            "forward": lambda: model(prompt),
            "prefill": lambda: model.start(prompt),
            "first token": generate(1),
        },
        rounds,
        device,
    )
    row: dict[str, Any] = {f"{name} ms": round(1000 * value, 2) for name, value in seconds.items()}
    for name in ("prefill", "first token"):
        row[f"{name} / forward"] = seconds[name] / seconds["forward"]
    if decode_lengths is not None:
        short, long = decode_lengths
        seconds = median_seconds({"short": generate(short), "long": generate(long)}, 3, device)
        decode_seconds = max(1e-9, seconds["long"] - seconds["short"])
        row["tok/s after the first"] = round((long - short) / decode_seconds, 1)
    return row


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--models", nargs="+", default=["gpt2"], choices=DESIGNS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--decode", action="store_true", help="also tokens per second after the first")
    options = parse_arguments(parser, argv, models=list(DESIGNS), lengths=[8], rounds=1, decode=True)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    decode_lengths = None if not options.decode else (2, 6) if options.smoke else (64, 192)
    rows = []
    for name in options.models:
        design = kl.presets.small(DESIGNS[name]) if options.smoke else DESIGNS[name]
        model = kl.build(design, device=device, dtype=torch.bfloat16 if device == "cuda" else None).eval()
        for length in options.lengths:
            columns = measure(model, length, options.rounds, decode_lengths, device)
            rows.append({"model": name, "prompt tokens": length} | columns)
            print(rows[-1], flush=True)
        del model
    print_table(f"time to first token on {device}", rows)
    write_json(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
