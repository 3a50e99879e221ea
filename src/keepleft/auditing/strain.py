"""Ways to get inside a call without touching the model: gradients to what comes in, large scores, large and poisoned inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.auditing.seen import op
from keepleft.auditing.subject import Call, CallError, Subject
from keepleft.auditing.ways import Way

LARGE, HUGE = 1e5, 1e4  # scores; inputs
_PRODUCTS = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}  # and which argument is the first factor
Touch = Callable[[Tensor], Tensor]


class UntracedError(Exception):
    """What comes in could not be followed."""


class Embedded(TorchFunctionMode):
    """Does something to the vectors of the words, where they are looked up."""

    def __init__(self, tokens: Tensor, touch: Touch) -> None:
        super().__init__()
        self.tokens, self.touch, self.used = tokens, touch, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.embedding, torch.embedding) and isinstance(out, Tensor):
            looked = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, Tensor)
                           and not value.is_floating_point()), None)
            if looked is not None and looked.shape == self.tokens.shape and torch.equal(looked, self.tokens.to(looked)):
                self.used = True
                return self.touch(out)
        return out


def touched(subject: Subject, call: Call, way: Way, touch: Touch) -> Any:
    """The whole output of a call whose vectors were touched on their way in; None where none were seen."""
    called = subject.entry
    given = subject.arguments(call, way)
    if call.tokens.is_floating_point():
        return subject.invoke(called, given, touch={subject.main: touch})
    turned = subject.time == 0
    tokens = call.tokens.to(subject.device)
    change = (lambda vectors: touch(vectors.transpose(0, 1)).transpose(0, 1)) if turned else touch
    with Embedded(tokens.T if turned else tokens, change) as mode:
        out = subject.invoke(called, given)
    return out if mode.used else None


def traced(subject: Subject, call: Call, way: Way) -> tuple[Tensor, Tensor]:
    """The output with its graph, and the leaf (B, T, D) that stands for what came in."""
    leaves: list[Tensor] = []

    def leaf(vectors: Tensor) -> Tensor:
        leaves.append(vectors.detach().clone().requires_grad_())
        return leaves[-1].clone()

    with torch.enable_grad():
        out = touched(subject, call, way, leaf)
    if out is None or not leaves:
        raise UntracedError("no embedding of the tokens was seen: give features, or use torch's embedding")
    found = subject.chosen(out, *call.tokens.shape[:2])
    if not found.requires_grad:
        raise UntracedError("the output has no gradient")
    return found, leaves[0]


def upset(where: Tensor, value: float | None) -> Touch:
    """Vectors at some positions, (B, T), replaced by NaN or infinity; without a value, so many times as large."""
    def touch(vectors: Tensor) -> Tensor:
        new = vectors * HUGE if value is None else torch.full_like(vectors, value)
        return torch.where(where.to(vectors.device).view(*where.shape, *[1] * (vectors.dim() - 2)), new, vectors)

    return touch


def upturned(subject: Subject, call: Call, way: Way, touch: Touch) -> Tensor | None:
    """The audited output of a call whose vectors were touched; None where none were seen."""
    with torch.no_grad():
        out = touched(subject, call, way, touch)
    return None if out is None else subject.chosen(out, *call.tokens.shape[:2]).detach()


class Scores:
    """Scores of attention made large: by as much each time as the first time."""

    def __init__(self, length: int, sign: float = 1.0) -> None:
        self.length, self.sign = length, sign
        self.factors: list[float] = []
        self.recorded = False

    def on(self) -> _Larger:
        return _Larger(self)


class _Larger(TorchDispatchMode):
    def __init__(self, scores: Scores) -> None:
        super().__init__()
        self.scores, self.at = scores, 0
        self.first = not scores.recorded
        scores.recorded = True

    def factor(self, largest: Callable[[], float]) -> float:
        """A power of two, so that it rounds nothing."""
        if self.first:
            found = largest()
            self.scores.factors.append(2.0 ** round(math.log2(LARGE / found)) if 1e-20 < found < 1e20 else 1.0)
        self.at += 1
        if self.at > len(self.scores.factors):
            raise CallError("the number of attentions changes from call to call")
        return self.scores.sign * self.scores.factors[self.at - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op(func)
        if "scaled_dot_product" in name and "backward" not in name and len(args) > 2:
            q, k = args[0], args[1]
            if q.shape[-2] == k.shape[-2] == self.scores.length:
                scale = kwargs.get("scale") or q.shape[-1] ** -0.5
                k_ = k.repeat_interleave(q.shape[1] // k.shape[1], 1) if q.dim() == 4 and q.shape[1] != k.shape[1] else k
                factor = self.factor(lambda: float((q.double() @ k_.double().transpose(-1, -2)).abs().max()) * scale)
                return func(q * factor, *args[1:], **kwargs)
        first = _PRODUCTS.get(name)
        if first is not None and len(args) > first + 1:
            a, b = args[first:first + 2]
            if a.shape[-2] == b.shape[-1] == self.scores.length:
                factor = self.factor(lambda: float((a.double() @ b.double()).abs().max()))
                args = (*args[:first], a * factor, *args[first + 1:])
        return func(*args, **kwargs)


def under(subject: Subject, call: Call, way: Way, scores: Scores | None, touch: Touch | None) -> Callable[[], Any]:
    """The same strained call again, to look where it enters."""
    def run() -> Any:
        with scores.on() if scores is not None else nullcontext():
            return subject.raw(call, way) if touch is None else touched(subject, call, way, touch)

    return run
