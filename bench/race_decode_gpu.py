"""Writing on a GPU in bfloat16: ours against transformers, by its defaults and with its static cache, which
it compiles.

All sides have weights of the same shape (made up; the same ones but for the 7B shape), read 32 tokens and
write 128; no text ends before. They take turns after a warm-up; times are of the whole call, prompt included,
tokens a second of all rows.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from report import about, arguments, show, write

READ, WRITE = 32, 128
DESIGNS = {
    "gpt2": kl.presets.gpt2,
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "7b": kl.presets.llama,
}
# design, rows, beams, transformers' ways, aim: tokens a second, or times as many as its quickest way
RACES = (
    ("gpt2", 1, 1, ("default", "static"), "2,500 tok/s"),
    ("gpt2", 32, 1, ("static",), "3 x static"),
    ("base", 1, 1, ("default", "static"), "3 x static"),
    ("base", 32, 1, ("static",), "3 x static"),
    ("base", 1, 4, ("default",), "10 x"),
    ("base", 32, 4, ("default",), "10 x"),
    ("7b", 1, 1, ("default", "static"), "280 tok/s"),
    ("7b", 32, 1, ("static",), "2 x static"),
)


def peer(model: Any) -> Any:
    """The same weights in transformers; for the largest just the same shape."""
    from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MarianMTModel

    if model.design.dim == 4096:
        with torch.device("cuda"):
            return LlamaForCausalLM._from_config(LlamaConfig(), dtype=torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        kl.save(model, None, folder)
        kind = MarianMTModel if isinstance(model, kl.EncoderDecoder) else GPT2LMHeadModel
        return kind.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()


def theirs(model: Any, prompts: list[list[int]], beams: int, way: str) -> Callable[[], list[list[int]]]:
    tokens = torch.tensor(prompts, device="cuda")
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    said = {"cache_implementation": "static"} if way == "static" else {}

    def run() -> list[list[int]]:
        with torch.no_grad():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                num_beams=beams,
                do_sample=False,
                max_new_tokens=WRITE,
                min_new_tokens=WRITE,
                **said,
            )
        return [row[-WRITE:] for row in out.tolist()]

    return run


def ours(model: Any, prompts: list[list[int]], beams: int) -> Callable[[], list[list[int]]]:
    return lambda: [
        several[0].tokens
        for several in kl.completions(model, None, prompts, num_beams=beams, max_new_tokens=WRITE)
    ]


def race(
    works: dict[str, Callable[[], list[list[int]]]], rounds: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    found: dict[str, list[float]] = {name: [] for name in works}
    said = {name: [work() for _ in range(3)][-1] for name, work in works.items()}
    for _ in range(rounds):
        for name, work in works.items():
            torch.cuda.synchronize()
            before = time.perf_counter()
            work()
            torch.cuda.synchronize()
            found[name].append(time.perf_counter() - before)
    return found, said


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--alone", action="store_true", help="ours without transformers")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing to race")
        return
    rows = []
    for name in chosen.models:
        torch.manual_seed(0)
        model = kl.build(DESIGNS[name], device="cuda", dtype=torch.bfloat16).eval()
        model.notes = {
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        other = None if chosen.alone else peer(model)
        for design, batch, beams, ways, aim in RACES:
            if design != name or batch not in chosen.rows:
                continue
            dice = torch.Generator().manual_seed(1)
            prompts = torch.randint(3, model.design.vocab, (batch, READ), generator=dice).tolist()
            works = {"ours": ours(model, prompts, beams)}
            works |= {} if other is None else {way: theirs(other, prompts, beams, way) for way in ways}
            found, said = race(works, chosen.rounds)
            speeds = {side: batch * WRITE / statistics.median(times) for side, times in found.items()}
            row: dict[str, Any] = {"model": name, "rows": batch, "beams": beams}
            row |= {side: round(speed) for side, speed in speeds.items()}
            if other is not None:
                row["times"] = round(speeds["ours"] / speeds[ways[-1]], 2)
                pairs = [
                    a == b
                    for x, y in zip(said["ours"], said[ways[-1]], strict=True)
                    for a, b in zip(x, y, strict=True)
                ]
                row["same"] = round(sum(pairs) / len(pairs), 2)
            rows.append(row | {"aim": aim})
            print(rows[-1], flush=True)
        del model, other
        torch.cuda.empty_cache()
    show("tokens a second, and ours over the last of transformers' ways", rows)
    write(chosen.json, {"about": about(), "rows": rows})


if __name__ == "__main__":
    main()
