"""A training step on a GPU in bfloat16, weights and AdamW in float32.

Forward, loss, backward, clipping, update. gpt2: GPT-2 124M, 1,024 tokens a row, no biases, no dropout,
against the same step written plainly (a compiled module, all logits at once, autocast), which is what nanoGPT
runs. marian: an encoder-decoder of the base size over pairs of 8 to 32 tokens, dropout 0.1, against
transformers; only real target tokens count. keepleft packs pairs into rows of one shape.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl
from command_line import add_device, choose_device, make_parser, parse_arguments
from keepleft.nn.loss import IGNORE_INDEX, linear_cross_entropy
from keepleft.training.precision import MixedPrecision
from report import environment, print_table, write_json
from timing import seconds_per_call, synchronize

Step = Callable[[], Any]
MIN_LENGTH, MAX_LENGTH = 8, 32
PEERS = ("plain", "transformers")
INDUCTOR_OPTIONS = {
    "unmixed": ("triton.mix_order_reduction", False),
    "descent": ("coordinate_descent_tuning", True),
}
VARIANTS = (
    "gpt2:plain+compile:64",
    "gpt2:half+compile:64",
    "marian:transformers:256",
    "marian:half+compile+graph:128",
)
SMOKE_VARIANTS = (
    "gpt2:plain+compile:2",
    "gpt2:autocast:2",
    "gpt2:half+compile+graph:2",
    "marian:transformers:4",
    "marian:half+graph+w64:2",
)


# keepleft -----------------------------------------------------------------------------------------


class LossModule(nn.Module):
    """A model and its loss in one module, so that both compile together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: Tensor, *tokens: Tensor, **segments: Tensor) -> Tensor:
        model: Any = self.model
        x = model.head.transform(model.hidden_states(*tokens, **segments))
        return linear_cross_entropy(x, *model.head.output_weight(model.token), targets).loss


def make_loss(model: nn.Module, variant: str, lr: float, smoke: bool) -> tuple[Callable[..., Tensor], Any]:
    """The loss of a model in one variant, words joined as in `half+compile`, and its optimizer."""
    words = variant.split("+")
    loss: Any = LossModule(model)
    if "half" in words:
        loss = MixedPrecision(loss)
    if "compile" in words:
        inductor_options = dict(INDUCTOR_OPTIONS[word] for word in words if word in INDUCTOR_OPTIONS)
        loss = compile_module(
            loss, smoke, dynamic=False, fullgraph=True, options=None if smoke else inductor_options or None
        )
    if "autocast" in words:
        loss = partial(call_with_autocast, loss, device_type(model))
    return loss, adamw(model, lr, capturable="graph" in words and device_type(model) == "cuda")


def compile_module(module: nn.Module, smoke: bool, **options: Any) -> Any:
    """In a smoke run the graph is traced but not compiled, which takes seconds instead of a minute."""
    return torch.compile(module, backend="eager" if smoke else "inductor", **options)


def call_with_autocast(function: Callable[..., Tensor], device: str, *args: Any, **named: Any) -> Tensor:
    with torch.autocast(device, torch.bfloat16):
        return function(*args, **named)


def adamw(model: nn.Module, lr: float, capturable: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=capturable
    )


def make_step(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> Step:
    def step() -> None:
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def capture_graph(step: Step, device: str) -> Step:
    """The whole step as one CUDA graph; on a CPU, the step itself."""
    if device != "cuda":
        print("CUDA graphs need CUDA: the step runs eagerly")
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def device_type(model: nn.Module) -> str:
    return next(model.parameters()).device.type


# GPT-2 --------------------------------------------------------------------------------------------


class PlainGPT2(nn.Module):
    """GPT-2 as it is usually written, with all logits at once and the loss inside."""

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
        self.head = nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.token.weight
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
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1)


def gpt2(variant: str, batch: int, device: str, smoke: bool) -> tuple[Step, int]:
    """A training step of GPT-2 in one variant, and how many tokens it is on."""
    layers, dim, heads, vocab, length = (2, 64, 4, 512, 32) if smoke else (12, 768, 12, 50_304, 1024)
    torch.manual_seed(0)
    tokens, targets = (torch.randint(vocab, (batch, length), device=device) for _ in range(2))
    if variant.startswith("plain"):
        plain = PlainGPT2(layers, dim, heads, vocab, length).to(device)
        compiled = compile_module(plain, smoke) if "compile" in variant else plain
        plain_loss = partial(call_with_autocast, compiled, device, tokens, targets)
        return make_step(plain, plain_loss, adamw(plain, 6e-4)), tokens.numel()
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
    model = kl.build(design, device=device).train()
    loss, optimizer = make_loss(model, variant, 6e-4, smoke)
    step = make_step(model, lambda: loss(targets, tokens) / tokens.numel(), optimizer)
    return capture_graph(step, device) if "graph" in variant.split("+") else step, tokens.numel()


# encoder-decoder ----------------------------------------------------------------------------------


def pair_lengths(seed: int) -> Iterator[tuple[int, int]]:
    """Lengths of source and target."""
    rng = random.Random(seed)
    while True:
        yield rng.randint(MIN_LENGTH, MAX_LENGTH), rng.randint(MIN_LENGTH, MAX_LENGTH)


def expected_padding(source_room: int, target_room: int) -> float:
    """The padding to expect in a row with so much room left: all of it where no pair fits any more, some
    where one side fills up first.
    """
    if min(source_room, target_room) < MIN_LENGTH:
        return source_room + target_room
    return 0.5 * abs(source_room - target_room)


def packed_segments(rows: int, row_length: int, seed: int) -> tuple[Tensor, Tensor]:
    """(rows, row_length) segments of source and target: best fit, by the padding that each pair leaves."""
    lengths = pair_lengths(seed)
    num_pairs = round(1.04 * rows * row_length * 2 / (MIN_LENGTH + MAX_LENGTH))
    available = Counter(next(lengths) for _ in range(num_pairs))
    packed_rows = []
    for _ in range(rows):
        row: list[tuple[int, int]] = []
        source_room = target_room = row_length
        while fits := [
            pair
            for pair, count in available.items()
            if count and pair[0] <= source_room and pair[1] <= target_room
        ]:
            best = min(fits, key=lambda pair: expected_padding(source_room - pair[0], target_room - pair[1]))
            available[best] -= 1
            source_room, target_room = source_room - best[0], target_room - best[1]
            row.append(best)
        packed_rows.append(row)
    segments = torch.zeros(2, rows, row_length, dtype=torch.long)
    for row_number, pairs in enumerate(packed_rows):
        for side in range(2):
            end = 0
            for number, pair in enumerate(pairs, 1):
                begin, end = end, end + pair[side]
                segments[side, row_number, begin:end] = number
    return segments[0], segments[1]


def marian(variant: str, batch: int, device: str, smoke: bool) -> tuple[Step, int]:
    """A training step of an encoder-decoder in one variant, and how many real target tokens it is on.

    `batch` counts pairs in transformers, packed rows in keepleft.
    """
    layers, dim, vocab = (1, 64, 512) if smoke else (6, 512, 32_000)
    torch.manual_seed(0)
    random_tokens = lambda *shape: torch.randint(3, vocab, shape, device=device)
    if variant.startswith("transformers"):
        from transformers_models import marian as transformers_marian

        transformers = transformers_marian(vocab, dim, layers, 4 * dim).to(device).train()
        compiled = (
            compile_module(transformers, smoke, dynamic=False) if "compile" in variant else transformers
        )
        pairs = list(islice(pair_lengths(0), batch))
        lengths = [torch.tensor(side, device=device) for side in zip(*pairs, strict=True)]
        is_token = [torch.arange(MAX_LENGTH, device=device) < length[:, None] for length in lengths]
        source = random_tokens(batch, MAX_LENGTH) * is_token[0]
        labels = random_tokens(batch, MAX_LENGTH).masked_fill(~is_token[1], IGNORE_INDEX)

        def transformers_loss() -> Tensor:
            with torch.autocast(device, torch.bfloat16):
                return compiled(input_ids=source, attention_mask=is_token[0].long(), labels=labels).loss

        step = make_step(transformers, transformers_loss, adamw(transformers, 1e-4))
        return step, int(is_token[1].sum())
    design = kl.presets.marian.but(
        vocab=vocab,
        dim=dim,
        feedforward=kl.FeedForward(4 * dim, "silu"),
        encoder=kl.StackDesign(layers, (kl.full,), final_norm=False),
        decoder=kl.StackDesign(layers, (kl.causal,), final_norm=False),
    )
    row_length = next((int(word[1:]) for word in variant.split("+") if word[0] == "w"), 128)
    source_segments, segments = (x.to(device) for x in packed_segments(batch, row_length, 0))
    source = random_tokens(*source_segments.shape) * (source_segments != 0)
    tokens = random_tokens(*segments.shape) * (segments != 0)
    targets = random_tokens(*segments.shape).masked_fill(segments == 0, IGNORE_INDEX)
    num_targets = int((segments != 0).sum())
    model = kl.build(design, device=device).train()
    loss, optimizer = make_loss(model, variant, 1e-4, smoke)
    step = make_step(
        model,
        lambda: (
            loss(targets, source, tokens, source_segments=source_segments, segments=segments) / num_targets
        ),
        optimizer,
    )
    return capture_graph(step, device) if "graph" in variant.split("+") else step, num_targets


MODELS = {"gpt2": gpt2, "marian": marian}


def measure(
    model: str, variant: str, batch: int, device: str, smoke: bool, profile: Path | None
) -> dict[str, Any]:
    """Median tokens per second of one variant, after a warm-up. An error is a row too; with `smoke` it is
    raised.
    """
    torch.compiler.reset()
    started = monotonic()
    row: dict[str, Any] = {"model": model, "variant": variant, "batch": batch}
    try:
        step, tokens = MODELS[model](variant, batch, device, smoke)
        for _ in range(1 if smoke else 4):
            step()
        synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ready = monotonic() - started
        estimate = seconds_per_call(step, 2, device)
        calls, repetitions = (1, 1) if smoke else (max(1, round(0.15 / estimate)), 5)
        seconds = statistics.median(seconds_per_call(step, calls, device) for _ in range(repetitions))
        row |= {
            "tokens": tokens,
            "ms": round(seconds * 1e3, 2),
            "tok/s": round(tokens / seconds),
            "ready s": round(ready, 1),
        }
        if device == "cuda":
            row["peak GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        if profile is not None:
            append_profile(step, profile, f"{model} {variant} {batch}", device)
    except Exception as error:  # a variant that fails must not end the race
        if smoke:
            raise
        import traceback

        traceback.print_exc()
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    if device == "cuda":
        torch.cuda.empty_cache()
    print(row, flush=True)
    return row


def append_profile(step: Step, path: Path, title: str, device: str) -> None:
    """Append the time of every kernel to a file."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        synchronize(device)
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    milliseconds = lambda event: (
        (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 3e3
    )
    kernels = [event for event in profiler.key_averages() if event.device_type == wanted]
    kernels.sort(key=lambda event: -milliseconds(event))
    with path.open("a") as file:
        print(f"\n{title}: {sum(map(milliseconds, kernels)):.2f} ms of kernels per step", file=file)
        for event in kernels[:45]:
            print(f"{milliseconds(event):9.3f} ms {event.count / 3:7.1f}  {event.key[:150]}", file=file)


def add_speedups(rows: list[dict[str, Any]]) -> None:
    """Compare every variant with the fastest peer, for GPT-2 at the same batch size."""
    for row in rows:
        peers = [
            other["tok/s"]
            for other in rows
            if other["variant"].startswith(PEERS)
            and other["model"] == row["model"]
            and "tok/s" in other
            and (row["model"] != "gpt2" or other["batch"] == row["batch"])
        ]
        if peers and "tok/s" in row:
            row["× best peer"] = round(row["tok/s"] / max(peers), 3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument(
        "--variants",
        nargs="+",
        default=list(VARIANTS),
        help="model:variant:batch; a variant joins half, autocast, compile, unmixed, descent, graph, wN (row "
        "length N)",
    )
    parser.add_argument(
        "--profile", type=Path, metavar="PATH", help="append the kernels of each variant there"
    )
    parser.add_argument(
        "--limit", type=float, default=500.0, help="seconds after which no further variant begins"
    )
    options = parse_arguments(parser, argv, variants=list(SMOKE_VARIANTS))
    device = choose_device(options)
    if device is None:
        return
    torch.set_float32_matmul_precision("high")
    started, rows = monotonic(), []
    for text in options.variants:
        model, variant, batch = text.split(":")
        if monotonic() - started < options.limit:
            rows.append(measure(model, variant, int(batch), device, options.smoke, options.profile))
            write_json(options.json, {"environment": environment(), "rows": rows})
    add_speedups(rows)
    print_table("a training step, bfloat16", rows)
    write_json(options.json, {"environment": environment(), "rows": rows})
    print(f"took {monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
