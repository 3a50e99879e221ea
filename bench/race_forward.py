"""A forward pass of GPT-2 124M (random weights) against transformers with its default kernel, CPU, float32.

Both compute the logits of all positions from the same weights, without gradients; transformers keeps no KV
cache. The decode steps (one more token after a prompt, with a KV cache on both sides) are for information.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from command_line import make_parser, parse_arguments
from report import environment, print_table, system_load, write_json
from timing import Race, race
from transformers_models import from_transformers

TARGET = 1.0
SHAPES = ((1, 16), (1, 128), (1, 512), (8, 16), (8, 128))
DECODE_SHAPES = (
    (1, 16, "dynamic"),
    (1, 256, "dynamic"),
    (1, 256, "static"),
    (8, 256, "dynamic"),
    (8, 256, "static"),
)
SMOKE_SHAPES = ((2, 16),)
SMOKE_DECODE_SHAPES = ((2, 16, "dynamic"), (2, 16, "static"))
STEPS_PER_PROMPT = 64


def make_models(smoke: bool) -> tuple[Any, Any]:
    """The same weights in keepleft and in transformers."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4) if smoke else GPT2Config()
    transformers = GPT2LMHeadModel(config).eval()
    return from_transformers(transformers), transformers


def race_columns(result: Race) -> dict[str, Any]:
    return {
        "keepleft ms": round(result.keepleft * 1e3, 2),
        "transformers ms": round(result.peer * 1e3, 2),
        "ratio": round(result.ratio, 3),
        "min ratio": round(result.min_ratio, 3),
        "noise": round(result.noise, 1),
    }


def measure_forward(keepleft: Any, transformers: Any, batch: int, length: int, seconds: float) -> dict:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(keepleft.design.vocab, (batch, length), generator=generator)
    forward = lambda: keepleft(tokens)
    peer_forward = lambda: transformers(tokens, use_cache=False).logits
    torch.testing.assert_close(forward(), peer_forward(), atol=2e-3, rtol=1e-3)
    result = race(forward, peer_forward, seconds=seconds)
    met = "yes" if result.ratio <= TARGET else "no"
    return {"batch": batch, "tokens": length, **race_columns(result), "≤ 1.0": met}


def measure_decode_step(
    keepleft: Any, transformers: Any, batch: int, length: int, cache: str, seconds: float
) -> dict[str, Any]:
    """Both caches grow by a token with every call; after 64 both sides start again from the prompt."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(keepleft.design.vocab, (batch, length), generator=generator)
    state: Any = None
    past: Any = None
    steps_left = peer_steps_left = 0

    def step() -> torch.Tensor:
        nonlocal state, steps_left
        if not steps_left:
            state = keepleft.start(tokens, cache=cache, capacity=length + STEPS_PER_PROMPT)[1]
            steps_left = STEPS_PER_PROMPT
        steps_left -= 1
        return keepleft.step(tokens[:, :1], state)

    def peer_step() -> torch.Tensor:
        nonlocal past, peer_steps_left
        if not peer_steps_left:
            past = DynamicCache(config=transformers.config)
            transformers(tokens, past_key_values=past, use_cache=True)
            peer_steps_left = STEPS_PER_PROMPT
        peer_steps_left -= 1
        return transformers(tokens[:, :1], past_key_values=past, use_cache=True).logits[:, -1]

    torch.testing.assert_close(step(), peer_step(), atol=2e-3, rtol=1e-3)
    # one call per sample: a prefill is an outlier, not a bias
    result = race(step, peer_step, seconds=seconds, sample_seconds=0.0)
    return {"batch": batch, "prompt tokens": length, "keepleft cache": cache, **race_columns(result)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="to spend on each shape")
    parser.add_argument("--threads", type=int, default=2)
    options = parse_arguments(parser, argv, seconds=0.0, threads=1)
    shapes = SMOKE_SHAPES if options.smoke else SHAPES
    decode_shapes = SMOKE_DECODE_SHAPES if options.smoke else DECODE_SHAPES
    torch.set_num_threads(options.threads)
    print(f"{system_load()}, {options.threads} threads")
    keepleft, transformers = make_models(options.smoke)
    kernel = transformers.config._attn_implementation
    with torch.no_grad():
        forward_rows = [measure_forward(keepleft, transformers, *shape, options.seconds) for shape in shapes]
        print_table(f"a forward pass of GPT-2 against transformers ({kernel})", forward_rows)
        decode_rows = [
            measure_decode_step(keepleft, transformers, *shape, options.seconds) for shape in decode_shapes
        ]
        print_table("one more token after a prompt, with a KV cache (for information)", decode_rows)
    write_json(
        options.json,
        {
            "environment": environment(),
            "target": TARGET,
            "kernel": kernel,
            "forward": forward_rows,
            "decode steps": decode_rows,
        },
    )


if __name__ == "__main__":
    main()
