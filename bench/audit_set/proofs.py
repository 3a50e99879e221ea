"""Forbidden influence by brute force: change what should be hidden, look at what should not move.

Nothing of the audit is used here. Each function returns the largest change found, as an absolute size.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from audit_set.case import Build

Forward = Callable[[Any, Any], Any]  # model and input -> output whose first axes are batch and time
Hidden = Callable[[int, int, int], bool]  # reader, source, length -> may the reader not see the source?

ALL_LENGTHS = tuple(range(1, 71))
BOTH_MODES = ("eval", "train")
VOCAB = 50


def call(model: Any, inputs: Any) -> Any:
    """The model's output for its only argument."""
    return model(inputs)


def later(reader: int, source: int, length: int) -> bool:
    """The claim `causal`: a reader may not see what comes after it."""
    return source > reader


def outside(window: int, layers: int = 1) -> Hidden:
    """The claim `causal & window(n)` through several layers: nor what lies before its receptive field."""
    reach = layers * (window - 1)
    return lambda reader, source, length: source > reader or source < reader - reach


def after_prefix(prefix: int) -> Hidden:
    """The claim `causal | prefix(n)`: a reader may also see the first n positions."""
    return lambda reader, source, length: source > reader and source >= prefix


def as_tensor(output: Any) -> Tensor:
    """The logits (or whatever is first) of a model's output, as a tensor of floats."""
    while not isinstance(output, Tensor):
        if hasattr(output, "logits"):
            output = output.logits
        elif isinstance(output, Mapping):
            output = output["logits"] if "logits" in output else next(iter(output.values()))
        elif dataclasses.is_dataclass(output):
            output = getattr(output, dataclasses.fields(output)[0].name)
        else:
            output = output[0]
    return output.detach()


def difference(left: Tensor, right: Tensor) -> float:
    """The largest absolute difference; infinite where one is NaN and the other is not."""
    if not left.numel():
        return 0.0
    left, right = left.double(), right.double()
    if not torch.equal(left.isnan(), right.isnan()):
        return float("inf")
    return float((left - right).nan_to_num(0.0).abs().max())


class Runner:
    """A model in one mode that answers the same question in the same way, whatever was asked before."""

    def __init__(self, build: Build, forward: Forward, mode: str, double: bool, fresh: bool) -> None:
        self.model = build()["target"]
        owner = getattr(self.model, "__self__", self.model)  # the module of a bound method
        if isinstance(owner, torch.nn.Module):
            owner.train(mode == "train")
            if double:
                owner.double()
        self.forward, self.fresh = forward, fresh

    def __call__(self, *inputs: Any) -> Tensor:
        torch.manual_seed(1)
        model = copy.deepcopy(self.model) if self.fresh else self.model
        return as_tensor(self.forward(model, *inputs))


def token_maker(vocab: int = VOCAB) -> Callable[[int, int], Tensor]:
    """Random tokens of shape (batch, time)."""
    return lambda batch, length: torch.randint(1, vocab, (batch, length))


def feature_maker(width: int, scale: float = 1.0) -> Callable[[int, int], Tensor]:
    """Random features of shape (batch, time, width)."""
    return lambda batch, length: scale * torch.randn(batch, length, width)


def few(count: int, most: int) -> list[int]:
    """All of range(count), or about `most` of them with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def future(
    build: Build,
    forward: Forward = call,
    *,
    inputs: Callable[[int, int], Tensor] | None = None,
    lengths: Iterable[int] = (3, 8, 12),
    batches: Sequence[int] = (2,),
    modes: Sequence[str] = ("eval",),
    hidden: Hidden = later,
    double: bool = False,
    fresh: bool = False,
    values: int = 2,
    most: int = 7,
) -> float:
    """Change what is hidden from each reader, all at once and one by one; the largest change at the reader.

    The batch axis is first and time second, in the input as in the output. A length that the model refuses
    with a ValueError is left out, but not all of them.
    """
    make = inputs or token_maker()
    largest, answered = 0.0, False
    for mode in modes:
        run = Runner(build, forward, mode, double, fresh)
        for batch in batches:
            for length in lengths:
                torch.manual_seed(100 * length + batch)
                before, others = make(batch, length), [make(batch, length) for _ in range(values)]
                if double and before.is_floating_point():
                    before, others = before.double(), [other.double() for other in others]
                try:
                    base = run(before)
                except ValueError:
                    continue
                answered = True
                assert base.shape[:2] == before.shape[:2], (base.shape, before.shape)
                for other in others:
                    for reader in few(length, most):
                        sources = [s for s in range(length) if hidden(reader, s, length)]
                        if not sources:
                            continue
                        changed = before.clone()
                        changed[:, sources] = other[:, sources]
                        largest = max(largest, difference(run(changed)[:, reader], base[:, reader]))
                    for source in few(length, most):
                        readers = [r for r in range(length) if hidden(r, source, length)]
                        if not readers:
                            continue
                        changed = before.clone()
                        changed[:, source] = other[:, source]
                        largest = max(largest, difference(run(changed)[:, readers], base[:, readers]))
    assert answered, "the model took no length at all"
    return largest


def rows(
    build: Build,
    forward: Forward = call,
    *,
    inputs: Callable[[int, int], Tensor] | None = None,
    lengths: Iterable[int] = (1, 5, 12, 16, 17, 40),
    batches: Sequence[int] = (2, 3),
    modes: Sequence[str] = BOTH_MODES,
    alone: bool = True,
    fresh: bool = False,
) -> float:
    """Change the other rows of a batch, and leave them out (in float64 and without dropout)."""
    make = inputs or token_maker()
    largest = 0.0
    for mode in modes:
        run = Runner(build, forward, mode, True, fresh)
        for batch in batches:
            for length in lengths:
                torch.manual_seed(100 * length + batch)
                before, other = make(batch, length), make(batch, length)
                if before.is_floating_point():
                    before, other = before.double(), other.double()
                base = run(before)
                for row in range(batch):
                    changed = other.clone()
                    changed[row] = before[row]
                    largest = max(largest, difference(run(changed)[row], base[row]))
                    if alone and mode == "eval":
                        largest = max(largest, difference(run(before[row : row + 1])[0], base[row]))
    return largest


def padding(
    build: Build,
    forward: Callable[[Any, Tensor, Tensor], Any],
    *,
    inputs: Callable[[int, int], Tensor] | None = None,
    lengths: Iterable[int] = (1, 4, 9),
    pads: Sequence[int] = (1, 3),
    sides: Sequence[str] = ("right", "left"),
    batches: Sequence[int] = (1, 3),
) -> float:
    """Pad, with other content and other amounts; the change at real positions, in float64, infinite if NaN.

    `forward` takes the model, the input, and a mask that is 1 where the input is real.
    """
    make = inputs or token_maker()
    largest = 0.0
    run = Runner(build, forward, "eval", True, False)
    for length in lengths:
        for batch in batches:
            torch.manual_seed(100 * length + batch)
            real = make(batch, length)
            ones = torch.ones(batch, length, dtype=torch.long)
            alone = run(real, ones)
            for pad in pads:
                for side in sides:
                    # the first row is padded, the others are as long as the batch
                    mask = torch.ones(batch, length + pad, dtype=torch.long)
                    padded = make(batch, length + pad)
                    place = slice(0, length) if side == "right" else slice(pad, None)
                    mask[0] = 0
                    mask[0, place] = 1
                    padded[0, place] = real[0]
                    first = run(padded, mask)
                    if first[mask.bool()].isnan().any():
                        return float("inf")
                    largest = max(largest, difference(first[0, place], alone[0]))
                    other = make(batch, length + pad)
                    other[mask.bool()] = padded[mask.bool()]
                    second = run(other, mask)
                    largest = max(largest, difference(second[mask.bool()], first[mask.bool()]))
    return largest


def loss_of_each_label(
    loss: Callable[[Any, Tensor, Tensor], Tensor], vocab: int = VOCAB
) -> Callable[[Any, Tensor], Tensor]:
    """The outputs behind a scalar loss: at each position, how the loss differs between two labels there.

    The difference of the losses for two labels of one position is a difference of two logits there, so it may
    depend on what this position may see, and on nothing else.
    """

    def forward(model: Any, tokens: Tensor) -> Tensor:
        batch, length = tokens.shape
        answers = torch.zeros(batch, length, dtype=torch.double)
        for row in range(batch):
            for position in range(length):
                values = []
                for label in (3, 7):
                    labels = torch.zeros_like(tokens) + 5
                    labels[row, position] = label
                    torch.manual_seed(1)
                    values.append(float(loss(model, tokens, labels).detach()))
                answers[row, position] = values[0] - values[1]
        return answers

    return forward


def sweep(
    build: Build,
    forward: Forward = call,
    *,
    inputs: Callable[[int, int], Tensor] | None = None,
    hidden: Hidden = later,
    double: bool = False,
    lengths: Iterable[int] = ALL_LENGTHS,
    batch_check: bool = True,
    fresh: bool = False,
) -> float:
    """The proof for honest models: every length to 70, both modes, batches of 1 and 3, and other rows."""
    kwargs: dict[str, Any] = dict(inputs=inputs, hidden=hidden, double=double, modes=BOTH_MODES, fresh=fresh)
    lengths = tuple(lengths)
    size = future(build, forward, lengths=lengths, batches=(1,), values=1, most=8, **kwargs)
    some = [n for n in lengths if n in (1, 2, 7, 15, 16, 17, 24, 25, 33, 48, 49, 64, 65)]
    size = max(size, future(build, forward, lengths=some, batches=(3,), values=2, most=4, **kwargs))
    if batch_check:
        shorter = [n for n in (1, 5, 16, 17, 40) if n in lengths]
        size = max(size, rows(build, forward, inputs=inputs, lengths=shorter, fresh=fresh))
    return size
