"""Brute force, without the audit: how far may something forbidden move an output, as a part of the largest.

Everything is in float64 and eval mode unless a case says otherwise. NaN and infinity count as infinitely far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 50
CHUNKS: tuple[tuple[int, ...], ...] = (
    (11,),
    (1,) * 11,
    (4, *(1,) * 7),
    (3, 2, 2, 2, 2),
    (5, 3, 3),
    (2, 7, 1, 1),
)


def ready(build: Callable[[], dict[str, Any]]) -> Any:
    """The target of a case in float64 and eval mode."""
    return build()["target"].double().eval()


def tokens(batch: int, time: int, seed: int = 0, low: int = 1, vocab: int = VOCAB) -> Tensor:
    """Random tokens; 0 is left out, as it often means padding."""
    return torch.randint(low, vocab, (batch, time), generator=torch.Generator().manual_seed(seed))


def distance(first: Tensor, second: Tensor) -> float:
    """The largest difference as a part of the largest output."""
    if not (torch.isfinite(first).all() and torch.isfinite(second).all()):
        return math.inf
    scale = max(first.abs().max().item(), second.abs().max().item(), 1e-12)
    return (first - second).abs().max().item() / scale


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a model returns."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple):
        return output[0]
    return output["logits"] if isinstance(output, dict) else output.logits


@torch.no_grad()
def padding(
    call: Callable[[Tensor, Tensor], Any],
    *,
    sides: Sequence[str] = ("right",),
    pooled: bool = False,
    empty: bool = True,
    time: int = 9,
    vocab: int = VOCAB,
) -> float:
    """Other padding tokens, other amounts of padding, alone against in the batch; call(tokens, real)."""
    worst = 0.0
    for side in sides:
        lengths = (5, 3, time) + ((0,) if empty else ())
        for extra in (0, 4):
            outputs = []
            for seed in (1, 2):
                batch = tokens(len(lengths), time + extra, seed, vocab=vocab)
                real = torch.zeros_like(batch, dtype=torch.bool)
                for row, length in enumerate(lengths):
                    start = 0 if side == "right" else time + extra - length
                    real[row, start : start + length] = True
                batch[real] = tokens(1, sum(lengths), 3, vocab=vocab)[0]
                outputs.append(logits_of(call(batch, real)))
            if not torch.isfinite(outputs[0]).all():
                return math.inf
            for row, length in enumerate(lengths[:3]):
                keep = slice(None) if pooled else real[row]
                single = batch[row][real[row]][None]
                alone = logits_of(call(single, torch.ones(1, length, dtype=torch.bool)))[0]
                worst = max(worst, distance(outputs[0][row][keep], outputs[1][row][keep]))
                worst = max(worst, distance(outputs[0][row][keep], alone))
    return worst


@torch.no_grad()
def future(call: Callable[[Tensor], Any], *, time: int = 9, reach: int = 0, vocab: int = VOCAB) -> float:
    """Other tokens after each position (and, for a window, before what it reaches)."""
    first, second = tokens(2, time, 4, vocab=vocab), tokens(2, time, 5, vocab=vocab)
    output, worst = logits_of(call(first)), 0.0
    for position in range(time):
        other = first.clone()
        other[:, position + 1 :] = second[:, position + 1 :]
        if reach:
            other[:, : max(0, position + 1 - reach)] = second[:, : max(0, position + 1 - reach)]
        worst = max(worst, distance(output[:, position], logits_of(call(other))[:, position]))
    return worst


@torch.no_grad()
def packing(
    call: Callable[[Tensor, Tensor], Any], *, lengths: Sequence[int] = (4, 1, 6, 3), alone: bool = True
) -> float:
    """Other neighbours, and each sequence alone against packed; call(tokens, segment ids)."""
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
    worst = 0.0
    first, second = tokens(1, ids.shape[1], 6), tokens(1, ids.shape[1], 7)
    packed = logits_of(call(first, ids))
    for segment, _ in enumerate(lengths):
        inside = ids[0] == segment
        replaced = logits_of(call(torch.where(inside, first, second), ids))
        worst = max(worst, distance(packed[:, inside], replaced[:, inside]))
        if alone:
            single = logits_of(call(first[:, inside], torch.zeros_like(ids[:, inside])))
            worst = max(worst, distance(packed[:, inside], single))
    return worst


def restarts(ids: Tensor) -> Tensor:
    """Positions that count from zero in each segment of (1, T) segment ids."""
    _, counts = ids[0].unique_consecutive(return_counts=True)
    return torch.cat([torch.arange(n) for n in counts.tolist()])[None]


@torch.no_grad()
def cache(
    full: Callable[[Tensor], Any],
    decode: Callable[[Tensor, tuple[int, ...], Tensor | None], Tensor],
    *,
    chunks: Iterable[tuple[int, ...]] = CHUNKS,
    batch: int = 3,
    reorder: bool = False,
) -> float:
    """One full pass against chunks; decode(tokens, chunks, rows to take after the first chunk or None).

    Shorter sequences follow on longer ones. With reorder, the rows are permuted after the first chunk.
    """
    worst = 0.0
    for number, sizes in enumerate(chunks):
        for keep in (len(sizes), max(1, len(sizes) - 2)):
            part = sizes[:keep]
            text = tokens(batch, sum(part), 8 + number)
            worst = max(worst, distance(logits_of(full(text)), decode(text, part, None)))
            if reorder and len(part) > 1:
                rows = torch.tensor([2, 0, 1])[:batch]
                later = text.clone()
                later[:, : part[0]] = text[rows, : part[0]]
                expected = logits_of(full(later))[:, part[0] :]
                worst = max(worst, distance(expected, decode(text, part, rows)[:, part[0] :]))
    return worst


@torch.no_grad()
def batch(call: Callable[[Tensor], Any], *, rows: int = 3, time: int = 9, alone: bool = True) -> float:
    """Other rows beside each row, and each row alone."""
    first, second = tokens(rows, time, 20), tokens(rows, time, 21)
    output, worst = logits_of(call(first)), 0.0
    for row in range(rows):
        other = second.clone()
        other[row] = first[row]
        worst = max(worst, distance(output[row], logits_of(call(other))[row]))
        if alone:
            worst = max(worst, distance(output[row], logits_of(call(first[row : row + 1]))[0]))
    return worst


def nans(
    model: nn.Module,
    call: Callable[[Tensor, Tensor], Any],
    *,
    sides: Sequence[str] = ("right", "left"),
    vocab: int = VOCAB,
) -> float:
    """1.0 where padding gives NaN in an output, or in a gradient of the loss at real positions, else 0.0."""
    for side in sides:
        for lengths in ((7, 2, 4), (3, 0, 7), (0, 0, 0), (1, 1, 1)):
            real = torch.arange(7)[None] < torch.tensor(lengths)[:, None]
            real = real if side == "right" else real.flip(1)
            model.zero_grad()
            output = logits_of(call(tokens(3, 7, 30, vocab=vocab), real))
            if not torch.isfinite(output).all():
                return 1.0
            kept = output[real] if output.dim() == 3 else output
            if kept.numel():
                kept.square().sum().backward()
            if not all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
                return 1.0
    return 0.0


@torch.no_grad()
def relative(value: Tensor | float, expected: Tensor | float) -> float:
    """The difference of two losses as a part of the expected one."""
    return abs(float(value) - float(expected)) / max(abs(float(expected)), 1e-12)


def some_labels(text: Tensor, hidden: Sequence[tuple[int, int]] = ((0, 2), (1, 0), (1, 5), (2, 8))) -> Tensor:
    """Labels equal to the tokens, with -100 here and there."""
    labels = text.clone()
    for row, position in hidden:
        labels[row, position] = -100
    return labels


def next_token(logits: Tensor, labels: Tensor, *, ahead: int = 1, ignore: int = -100) -> Tensor:
    """The loss by definition: the mean over labels of -log p(label) at the position `ahead` before it."""
    log_p, terms = logits.log_softmax(-1), []
    for row in range(labels.shape[0]):
        for position in range(ahead, labels.shape[1]):
            label = int(labels[row, position])
            if label != ignore:
                terms.append(-log_p[row, position - ahead, label])
    return torch.stack(terms).mean()
