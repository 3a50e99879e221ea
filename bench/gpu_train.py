"""A training step on a GPU in bfloat16, weights and AdamW in float32: forward, loss, backward, clipping,
step.

gpt2: GPT-2 124M, 1,024 tokens a row, no biases, no dropout, against the same step written plainly (a compiled
module, all scores at once, autocast), which is what nanoGPT runs. marian: an encoder-decoder of the base size
over pairs of 8 to 32 tokens, dropout 0.1, against transformers; tokens are real target tokens. Ours packs
pairs into rows of one shape.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl
from keepleft.nn.loss import IGNORE_INDEX, linear_cross_entropy
from keepleft.training.precision import MixedPrecision
from report import about, arguments, show, write
from timing import timed

Step = Callable[[], Any]
SHORTEST, LONGEST = 8, 32
PEERS = ("plain", "transformers")
OPTIONS = {"unmixed": ("triton.mix_order_reduction", False), "descent": ("coordinate_descent_tuning", True)}


# ours ---------------------------------------------------------------------------------------------


class Lesson(nn.Module):
    """A model and its loss in one piece, so that both compile together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: Tensor, *given: Tensor, **named: Tensor) -> Tensor:
        model: Any = self.model
        x = model.head.transform(model.hidden_states(*given, **named))
        return linear_cross_entropy(x, *model.head.output_weight(model.token), targets).loss


def taught(
    model: nn.Module, way: str, lr: float = 1e-4
) -> tuple[nn.Module, Callable[..., Tensor], torch.optim.Optimizer]:
    """A model's lesson in one of our ways: autocast or half, eager or compiled, as `half+compile`."""
    words = way.split("+")
    lesson: Any = Lesson(model)
    if "half" in words:
        lesson = MixedPrecision(lesson)
    if "compile" in words:
        options = {OPTIONS[word][0]: OPTIONS[word][1] for word in words if word in OPTIONS}
        lesson = torch.compile(lesson, dynamic=False, fullgraph=True, options=options or None)
    if "autocast" in words:
        inner = lesson

        def lesson(*given: Any, **named: Any) -> Tensor:
            with torch.autocast(device_of(model), torch.bfloat16):
                return inner(*given, **named)

    return model, lesson, adamw(model, lr, capturable="graph" in words)


def adamw(model: nn.Module, lr: float, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=capturable
    )


def stepping(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def replayed(step: Step) -> Step:
    """The whole step as one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def device_of(model: nn.Module) -> str:
    return next(model.parameters()).device.type


# GPT-2 --------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """GPT-2 as it is usually written, with all scores at once and the loss inside."""

    def __init__(self, layers: int, dim: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm_1": nn.LayerNorm(dim, bias=False),
                    "qkv": nn.Linear(dim, 3 * dim, bias=False),
                    "out": nn.Linear(dim, dim, bias=False),
                    "norm_2": nn.LayerNorm(dim, bias=False),
                    "up": nn.Linear(dim, 4 * dim, bias=False),
                    "down": nn.Linear(4 * dim, dim, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim, bias=False)
        self.score = nn.Linear(dim, vocab, bias=False)
        self.score.weight = self.token.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        b, t = tokens.shape
        x = self.token(tokens) + self.position(torch.arange(t, device=tokens.device))
        for block in self.blocks:
            parts: Any = block
            q, k, v = parts["qkv"](parts["norm_1"](x)).split(x.shape[-1], 2)
            q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in (q, k, v))
            y = (
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
                .transpose(1, 2)
                .contiguous()
                .view(b, t, -1)
            )
            x = x + parts["out"](y)
            x = x + parts["down"](F.gelu(parts["up"](parts["norm_2"](x))))
        scores = self.score(self.norm(x))
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), targets.view(-1), ignore_index=-1)


def gpt2(way: str, batch: int, device: str, small: bool) -> tuple[Step, int]:
    """A step of GPT-2 in one way, and the tokens it learns from."""
    layers, dim, heads, vocab, length = (2, 64, 4, 512, 32) if small else (12, 768, 12, 50_304, 1024)
    torch.manual_seed(0)
    tokens, targets = (torch.randint(vocab, (batch, length), device=device) for _ in range(2))
    if way.startswith("plain"):
        model: nn.Module = Plain(layers, dim, heads, vocab, length).to(device)
        inner = torch.compile(model) if "compile" in way else model

        def loss() -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return inner(tokens, targets)

        return stepping(model, loss, adamw(model, 6e-4)), tokens.numel()
    design = kl.presets.gpt2.but(
        vocab=vocab,
        dim=dim,
        heads=heads,
        feedforward=kl.FeedForward(4 * dim, "gelu_tanh"),
        position=kl.LearnedPositions(length),
        bias=False,
        dropout=0.0,
        attention_dropout=0.0,
        decoder=kl.StackDesign(layers, (kl.causal,)),
    )
    model, lesson, optimizer = taught(kl.build(design, device=device).train(), way, 6e-4)
    step = stepping(model, lambda: lesson(targets, tokens) / tokens.numel(), optimizer)
    return replayed(step) if "graph" in way.split("+") else step, tokens.numel()


# encoder-decoder ----------------------------------------------------------------------------------


def pairs(seed: int) -> Iterator[tuple[int, int]]:
    """Lengths of source and target."""
    dice = random.Random(seed)
    while True:
        yield dice.randint(SHORTEST, LONGEST), dice.randint(SHORTEST, LONGEST)


def left_over(source: int, target: int) -> float:
    """How much room a row will waste: all of it where no pair fits any more, some where one side fills up
    first.
    """
    return source + target if min(source, target) < SHORTEST else 0.5 * abs(source - target)


def packed(rows: int, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, width) segments of source and target: pairs side by side, those that leave least over; the rest
    waits.
    """
    draw, placed = pairs(seed), []
    waiting = Counter(next(draw) for _ in range(round(1.04 * rows * width * 2 / (SHORTEST + LONGEST))))
    for _ in range(rows):
        row: list[tuple[int, int]] = []
        room = (width, width)
        while fits := [
            pair for pair, left in waiting.items() if left and pair[0] <= room[0] and pair[1] <= room[1]
        ]:
            best = min(fits, key=lambda pair: left_over(room[0] - pair[0], room[1] - pair[1]))
            waiting[best] -= 1
            room = room[0] - best[0], room[1] - best[1]
            row.append(best)
        placed.append(row)
    out = torch.zeros(2, rows, width, dtype=torch.long)
    for row, texts in enumerate(placed):
        for side in range(2):
            end = 0
            for number, text in enumerate(texts, 1):
                begin, end = end, end + text[side]
                out[side, row, begin:end] = number
    return out[0], out[1]


def marian(way: str, batch: int, device: str, small: bool) -> tuple[Step, int]:
    """A step of an encoder-decoder in one way, and the real target tokens it learns from.

    Batch: pairs, or rows of ours.
    """
    layers, dim, vocab = (1, 64, 512) if small else (6, 512, 32_000)
    torch.manual_seed(0)
    draw = lambda *shape: torch.randint(3, vocab, shape, device=device)
    if way.startswith("transformers"):
        from transformers import MarianConfig, MarianMTModel

        theirs: Any = (
            MarianMTModel(
                MarianConfig(
                    vocab_size=vocab,
                    d_model=dim,
                    encoder_layers=layers,
                    decoder_layers=layers,
                    encoder_ffn_dim=4 * dim,
                    decoder_ffn_dim=4 * dim,
                    encoder_attention_heads=8,
                    decoder_attention_heads=8,
                    activation_function="swish",
                    dropout=0.1,
                    scale_embedding=True,
                    max_position_embeddings=512,
                    pad_token_id=0,
                    eos_token_id=1,
                    decoder_start_token_id=2,
                    use_cache=False,
                )
            )
            .to(device)
            .train()
        )
        inner = torch.compile(theirs, dynamic=False) if "compile" in way else theirs
        drawn = [pair for pair, _ in zip(pairs(0), range(batch), strict=False)]
        sizes = [torch.tensor(side, device=device) for side in zip(*drawn, strict=True)]
        there = [torch.arange(LONGEST, device=device) < size[:, None] for size in sizes]
        source = draw(batch, LONGEST) * there[0]
        labels = draw(batch, LONGEST).masked_fill(~there[1], IGNORE_INDEX)

        def loss() -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return inner(input_ids=source, attention_mask=there[0].long(), labels=labels).loss

        return stepping(theirs, loss, adamw(theirs, 1e-4)), int(there[1].sum())
    design = kl.presets.marian.but(
        vocab=vocab,
        dim=dim,
        feedforward=kl.FeedForward(4 * dim, "silu"),
        encoder=kl.StackDesign(layers, (kl.full,), final_norm=False),
        decoder=kl.StackDesign(layers, (kl.causal,), final_norm=False),
    )
    width = next((int(word[1:]) for word in way.split("+") if word[0] == "w"), 128)
    source_seg, seg = (x.to(device) for x in packed(batch, width, 0))
    source, tokens = draw(*source_seg.shape) * (source_seg != 0), draw(*seg.shape) * (seg != 0)
    targets = draw(*seg.shape).masked_fill(seg == 0, IGNORE_INDEX)
    real = int((seg != 0).sum())
    model, lesson, optimizer = taught(kl.build(design, device=device).train(), way, 1e-4)
    step = stepping(
        model,
        lambda: lesson(targets, source, tokens, source_segments=source_seg, segments=seg) / real,
        optimizer,
    )
    return replayed(step) if "graph" in way.split("+") else step, real


RACES = {"gpt2": gpt2, "marian": marian}


def one(race: str, way: str, batch: int, device: str, small: bool, profile: Path | None) -> dict[str, Any]:
    """Median tokens a second of one way, after a warm-up."""
    torch.compiler.reset()
    began = monotonic()
    row: dict[str, Any] = {"race": race, "way": way, "batch": batch}
    try:
        step, tokens = RACES[race](way, batch, device, small)
        for _ in range(4):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        ready = monotonic() - began
        once = timed(step, 2, device)
        seconds = statistics.median(timed(step, max(1, round(0.15 / once)), device) for _ in range(5))
        row |= {
            "tokens": tokens,
            "ms": round(seconds * 1e3, 2),
            "tok/s": round(tokens / seconds),
            "ready s": round(ready, 1),
        }
        if device == "cuda":
            row["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        if profile is not None:
            profiled(step, profile, f"{race} {way} {batch}")
    except Exception as error:  # one way that fails must not end the race
        import traceback

        traceback.print_exc()
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    if device == "cuda":
        torch.cuda.empty_cache()
    print(row, flush=True)
    return row


def profiled(step: Step, path: Path, title: str) -> None:
    """Where the time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watching

    with watching(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    kernels = [e for e in found.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    with path.open("a") as file:
        print(
            f"\n{title}: {sum(e.self_device_time_total for e in kernels) / 3e3:.2f} ms of kernels a step",
            file=file,
        )
        for e in kernels[:45]:
            print(f"{e.self_device_time_total / 3e3:9.3f} ms {e.count / 3:7.1f}  {e.key[:150]}", file=file)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--ways",
        nargs="+",
        default=[
            "gpt2:plain+compile:64",
            "gpt2:half+compile:64",
            "marian:transformers:256",
            "marian:half+compile+graph:128",
        ],
        help="race:way:batch; ways join half, autocast, compile, unmixed, descent, graph, wN (row width)",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, to try the file itself")
    parser.add_argument("--profile", type=Path, metavar="PATH", help="append the kernels of each way there")
    parser.add_argument(
        "--limit", type=float, default=500.0, help="seconds after which no further way is begun"
    )
    chosen = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    began, rows = monotonic(), []
    for text in chosen.ways:
        race, way, batch = text.split(":")
        if monotonic() - began < chosen.limit:
            rows.append(one(race, way, int(batch), chosen.device, chosen.small, chosen.profile))
            write(chosen.json, {"about": about(), "rows": rows})
    for row in rows:
        same = [
            other["tok/s"]
            for other in rows
            if other["way"].startswith(PEERS)
            and other["race"] == row["race"]
            and "tok/s" in other
            and (row["race"] != "gpt2" or other["batch"] == row["batch"])
        ]
        if same and "tok/s" in row:
            row["× best peer"] = round(row["tok/s"] / max(same), 3)
    show("a training step, bfloat16", rows)
    print(f"took {monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
