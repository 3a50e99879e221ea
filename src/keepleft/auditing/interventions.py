"""Ways to get inside a call without touching the model: gradients to what comes in, large scores, large and
poisoned inputs.
"""

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

from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import CallError, Inputs, ModelAdapter
from keepleft.auditing.op_counter import op_name

AMPLIFIED_SCORE, INPUT_SCALE = 1e5, 1e4  # scores; inputs
# and which argument is the first factor
_MATMUL_FIRST_OPERAND = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}
Hook = Callable[[Tensor], Tensor]


class UntracedError(Exception):
    """What comes in could not be followed."""


class EmbeddingHook(TorchFunctionMode):
    """Does something to the vectors of the words, where they are looked up."""

    def __init__(self, tokens: Tensor, hook: Hook) -> None:
        super().__init__()
        self.tokens = tokens
        self.hook = hook
        self.applied = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.embedding, torch.embedding) and isinstance(out, Tensor):
            indices = next(
                (
                    value
                    for value in (*args, *(kwargs or {}).values())
                    if isinstance(value, Tensor) and not value.is_floating_point()
                ),
                None,
            )
            if (
                indices is not None
                and indices.shape == self.tokens.shape
                and torch.equal(indices, self.tokens.to(indices))
            ):
                self.applied = True
                return self.hook(out)
        return out


def run_with_hook(adapter: ModelAdapter, inputs: Inputs, path: CodePath, hook: Hook) -> Any:
    """The whole output of a call whose vectors were touched on their way in; None where none were seen."""
    function = adapter.entry_point
    arguments = adapter.arguments(inputs, path)
    if inputs.tokens.is_floating_point():
        return adapter.invoke(function, arguments, hooks={adapter.main_argument: hook})
    time_first = adapter.time_axis == 0
    tokens = inputs.tokens.to(adapter.device)
    oriented_hook = (lambda vectors: hook(vectors.transpose(0, 1)).transpose(0, 1)) if time_first else hook
    with EmbeddingHook(tokens.T if time_first else tokens, oriented_hook) as embedding_hook:
        out = adapter.invoke(function, arguments)
    return out if embedding_hook.applied else None


def run_with_grad(adapter: ModelAdapter, inputs: Inputs, path: CodePath) -> tuple[Tensor, Tensor]:
    """The output with its graph, and the leaf (B, T, D) that stands for what came in."""
    leaves: list[Tensor] = []

    def capture_leaf(vectors: Tensor) -> Tensor:
        leaves.append(vectors.detach().clone().requires_grad_())
        return leaves[-1].clone()

    with torch.enable_grad():
        out = run_with_hook(adapter, inputs, path, capture_leaf)
    if out is None or not leaves:
        raise UntracedError("no embedding of the tokens was seen: give features, or use torch's embedding")
    output = adapter.select_output(out, *inputs.tokens.shape[:2])
    if not output.requires_grad:
        raise UntracedError("the output has no gradient")
    return output, leaves[0]


def poison_hook(mask: Tensor, value: float | None) -> Hook:
    """Vectors at some positions, (B, T), replaced by NaN or infinity; without a value, so many times as
    large.
    """

    def hook(vectors: Tensor) -> Tensor:
        replacement = vectors * INPUT_SCALE if value is None else torch.full_like(vectors, value)
        return torch.where(
            mask.to(vectors.device).view(*mask.shape, *[1] * (vectors.dim() - 2)), replacement, vectors
        )

    return hook


def select_output_with_hook(
    adapter: ModelAdapter, inputs: Inputs, path: CodePath, hook: Hook
) -> Tensor | None:
    """The audited output of a call whose vectors were touched; None where none were seen."""
    with torch.no_grad():
        out = run_with_hook(adapter, inputs, path, hook)
    return None if out is None else adapter.select_output(out, *inputs.tokens.shape[:2]).detach()


class ScoreAmplifier:
    """Scores of attention made large: by as much each time as the first time."""

    def __init__(self, length: int, sign: float = 1.0) -> None:
        self.length = length
        self.sign = sign
        self.factors: list[float] = []
        self.calibrated = False

    def mode(self) -> _AmplifierMode:
        return _AmplifierMode(self)


class _AmplifierMode(TorchDispatchMode):
    def __init__(self, amplifier: ScoreAmplifier) -> None:
        super().__init__()
        self.amplifier = amplifier
        self.index = 0
        self.calibrating = not amplifier.calibrated
        amplifier.calibrated = True

    def next_factor(self, measure_max_score: Callable[[], float]) -> float:
        """A power of two, so that it rounds nothing."""
        if self.calibrating:
            max_score = measure_max_score()
            self.amplifier.factors.append(
                2.0 ** round(math.log2(AMPLIFIED_SCORE / max_score)) if 1e-20 < max_score < 1e20 else 1.0
            )
        self.index += 1
        if self.index > len(self.amplifier.factors):
            raise CallError("the number of attentions changes from call to call")
        return self.amplifier.sign * self.amplifier.factors[self.index - 1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if "scaled_dot_product" in name and "backward" not in name and len(args) > 2:
            q, k = args[0], args[1]
            if q.shape[-2] == k.shape[-2] == self.amplifier.length:
                scale = kwargs.get("scale") or q.shape[-1] ** -0.5
                expanded_k = (
                    k.repeat_interleave(q.shape[1] // k.shape[1], 1)
                    if q.dim() == 4 and q.shape[1] != k.shape[1]
                    else k
                )
                factor = self.next_factor(
                    lambda: float((q.double() @ expanded_k.double().transpose(-1, -2)).abs().max()) * scale
                )
                return func(q * factor, *args[1:], **kwargs)
        operand = _MATMUL_FIRST_OPERAND.get(name)
        if operand is not None and len(args) > operand + 1:
            a, b = args[operand : operand + 2]
            if a.shape[-2] == b.shape[-1] == self.amplifier.length:
                factor = self.next_factor(lambda: float((a.double() @ b.double()).abs().max()))
                args = (*args[:operand], a * factor, *args[operand + 1 :])
        return func(*args, **kwargs)


def stressed_run(
    adapter: ModelAdapter, inputs: Inputs, path: CodePath, amplifier: ScoreAmplifier | None, hook: Hook | None
) -> Callable[[], Any]:
    """The same strained call again, to look where it enters."""

    def run() -> Any:
        with amplifier.mode() if amplifier is not None else nullcontext():
            return (
                adapter.run_raw(inputs, path) if hook is None else run_with_hook(adapter, inputs, path, hook)
            )

    return run
