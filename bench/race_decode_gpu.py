"""Generation on a GPU in bfloat16 against transformers, with its defaults and with its compiled static cache.

Both have weights of the same shape (random; the same ones except for the 7B shape), read 32 tokens and
generate 128; no sequence ends early. They take turns after a warm-up; times are of the whole call, prefill
included, tokens per second of all rows.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from command_line import add_device, choose_device, make_parser, parse_arguments
from report import environment, print_table, token_agreement, write_json
from timing import take_turns
from transformers_models import never_stop_early, to_transformers

WARMUP = 3  # calls; the third replays what the first two compile and capture
DESIGNS = {
    "gpt2": kl.presets.gpt2,
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "7b": kl.presets.llama,
}
# design, rows, beams, caches of transformers, target: tokens per second, or times those of the last cache
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
Generate = Callable[[], list[list[int]]]


def make_transformers(model: Any, dtype: torch.dtype, device: str) -> Any:
    """The same weights in transformers; for LLaMA just the same shape, without a second copy on disk."""
    if isinstance(model, kl.EncoderDecoder) or model.design.max_positions:
        return to_transformers(model, dtype, device)
    from transformers import LlamaConfig, LlamaForCausalLM

    design = model.design
    config = LlamaConfig(
        vocab_size=design.vocab,
        hidden_size=design.dim,
        intermediate_size=design.feedforward.width,
        num_hidden_layers=design.decoder.layers,
        num_attention_heads=design.heads,
    )
    with torch.device(device):
        llama = LlamaForCausalLM._from_config(config, dtype=dtype).eval()
    never_stop_early(llama)
    return llama


def generate_transformers(
    model: Any, prompts: list[list[int]], num_beams: int, cache: str, length: int, device: str
) -> Generate:
    tokens = torch.tensor(prompts, device=device)
    cache_options = {"cache_implementation": "static"} if cache == "static" else {}

    @torch.no_grad()
    def generate() -> list[list[int]]:
        sequences = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=num_beams,
            do_sample=False,
            max_new_tokens=length,
            min_new_tokens=length,
            **cache_options,
        )
        return [row[-length:] for row in sequences.tolist()]

    return generate


def generate_keepleft(model: Any, prompts: list[list[int]], num_beams: int, length: int) -> Generate:
    return lambda: [
        candidates[0].tokens
        for candidates in kl.completions(model, None, prompts, num_beams=num_beams, max_new_tokens=length)
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--length", type=int, default=128, help="tokens to generate")
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    options = parse_arguments(parser, argv, rounds=1, rows=[1], prompt_length=5, length=4)
    device = choose_device(options)
    if device is None:
        return
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    length = options.length
    rows = []
    for name in options.models:
        torch.manual_seed(0)
        design = kl.presets.small(DESIGNS[name]) if options.smoke else DESIGNS[name]
        model = kl.build(design, device=device, dtype=dtype).eval()
        model.notes = {
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        transformers = make_transformers(model, dtype, device) if options.transformers else None
        for race_model, batch, num_beams, caches, target in RACES:
            if race_model != name or batch not in options.rows:
                continue
            generator = torch.Generator().manual_seed(1)
            prompts = torch.randint(
                3, design.vocab, (batch, options.prompt_length), generator=generator
            ).tolist()
            works = {"keepleft": generate_keepleft(model, prompts, num_beams, length)}
            if transformers is not None:
                for cache in caches:
                    works[f"transformers {cache}"] = generate_transformers(
                        transformers, prompts, num_beams, cache, length, device
                    )
            warmup = 1 if options.smoke else WARMUP
            tokens = {side: [work() for _ in range(warmup)][-1] for side, work in works.items()}
            samples = take_turns(works, options.rounds, device=device)
            speeds = {side: batch * length / statistics.median(seconds) for side, seconds in samples.items()}
            row: dict[str, Any] = {"model": name, "rows": batch, "beams": num_beams}
            row |= {side: round(speed) for side, speed in speeds.items()}
            if transformers is not None:
                peer = f"transformers {caches[-1]}"
                row["speedup"] = round(speeds["keepleft"] / speeds[peer], 2)
                if name != "7b":  # whose weights differ
                    row["agreement"] = round(token_agreement(tokens["keepleft"], tokens[peer]), 2)
            rows.append(row | {"target": target})
            print(rows[-1], flush=True)
        del model, transformers
        if device == "cuda":
            torch.cuda.empty_cache()
    print_table("tokens per second, and keepleft over the last cache of transformers", rows)
    write_json(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
