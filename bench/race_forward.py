"""A forward pass of GPT-2 (124 M weights, made up) against transformers with its default kernel, on a CPU in
float32.

Both give the scores of all positions from the same weights, without gradients; transformers is told not to
keep a cache. The steps (one token more after a prompt, with a cache on both sides) are for information.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import keepleft as kl
from report import about, arguments, show, weather, write
from timing import race

TARGET = 1.0
SHAPES = ((1, 16), (1, 128), (1, 512), (8, 16), (8, 128))
STEPS = ((1, 16, "dynamic"), (1, 256, "dynamic"), (1, 256, "static"), (8, 256, "dynamic"), (8, 256, "static"))


def both() -> tuple[Any, Any]:
    """The same weights in our model and in theirs."""
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours, _ = kl.load(folder)
    return ours, theirs


def forward(ours: Any, theirs: Any, batch: int, length: int, seconds: float) -> dict[str, Any]:
    tokens = torch.randint(50_257, (batch, length), generator=torch.Generator().manual_seed(1))
    mine, other = lambda: ours(tokens), lambda: theirs(tokens, use_cache=False).logits
    torch.testing.assert_close(mine(), other(), atol=2e-3, rtol=1e-3)
    found = race(mine, other, seconds=seconds)
    return {
        "batch": batch,
        "tokens": length,
        "ours ms": round(found.ours * 1e3, 2),
        "transformers ms": round(found.theirs * 1e3, 2),
        "ratio": round(found.ratio, 3),
        "≤ 1.0": "yes" if found.ratio <= TARGET else "no",
        "of the quickest": round(found.quickest, 3),
        "busy": round(found.busy, 1),
    }


def step(ours: Any, theirs: Any, batch: int, length: int, cache: str, seconds: float) -> dict[str, Any]:
    """Both caches fill by a token with every call, by as many on both sides; after 64 they start afresh."""
    tokens = torch.randint(50_257, (batch, length), generator=torch.Generator().manual_seed(2))
    state: Any = None
    past: Any = None
    left_ours = left_theirs = 0

    def mine() -> torch.Tensor:
        nonlocal state, left_ours
        if not left_ours:
            state, left_ours = ours.start(tokens, cache=cache, capacity=length + 64)[1], 64
        left_ours -= 1
        return ours.step(tokens[:, :1], state)

    def other() -> torch.Tensor:
        nonlocal past, left_theirs
        if not left_theirs:
            past, left_theirs = DynamicCache(config=theirs.config), 64
            theirs(tokens, past_key_values=past, use_cache=True)
        left_theirs -= 1
        return theirs(tokens[:, :1], past_key_values=past, use_cache=True).logits[:, -1]

    torch.testing.assert_close(mine(), other(), atol=2e-3, rtol=1e-3)
    # one call a sample: a fresh start is an outlier, not a bias
    found = race(mine, other, seconds=seconds, sample=0.0)
    return {
        "batch": batch,
        "tokens before": length,
        "our cache": cache,
        "ours ms": round(found.ours * 1e3, 2),
        "transformers ms": round(found.theirs * 1e3, 2),
        "ratio": round(found.ratio, 3),
        "of the quickest": round(found.quickest, 3),
        "busy": round(found.busy, 1),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="to spend on each shape")
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{weather()}, {chosen.threads} threads")
    ours, theirs = both()
    kernel = theirs.config._attn_implementation
    with torch.no_grad():
        passes = [forward(ours, theirs, *shape, chosen.seconds) for shape in SHAPES]
        show(f"a forward pass of GPT-2 124M against transformers ({kernel})", passes)
        steps = [step(ours, theirs, *shape, chosen.seconds) for shape in STEPS]
        show("one more token after a prompt, with a cache (for information)", steps)
    write(
        chosen.json, {"about": about(), "target": TARGET, "kernel": kernel, "passes": passes, "steps": steps}
    )


if __name__ == "__main__":
    main()
