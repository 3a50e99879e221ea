"""Inside a call, without touching the model: count operations, hook embeddings, amplify attention scores."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError, ModelAdapter

AMPLIFIED_SCORE = 1e5  # the largest attention score becomes about this
INPUT_SCALE = 1e4  # the factor of large inputs
_FUSED_ATTENTION_OPS = ("_softmax", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
# matrix products, and the index of the argument that is their first factor
_MATMUL_FIRST_OPERAND = {"bmm": 0, "mm": 0, "baddbmm": 1, "addmm": 1}
Hook = Callable[[Tensor], Tensor]


# -- operations --------------------------------------------------------------------------------


def op_name(func: Any) -> str:
    """The bare name of an operation: softmax for aten::softmax.int"""
    name: str = func.name().partition("::")[2].partition(".")[0]
    return name


class OpCounter(TorchDispatchMode):
    """Counts attentions, and notes whether any operation gives less than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attentions = 0
        self.has_low_precision = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        if "scaled_dot_product" in name or name in _FUSED_ATTENTION_OPS:
            self.num_attentions += 1
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and out.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and out.dim() > 1
        ):
            self.has_low_precision = True
        return out


_RANDOM_OPS = re.compile(r"dropout|bernoulli|^rand|^normal|^uniform|multinomial|exponential")


class DrawRecorder(TorchDispatchMode):
    """Records which random numbers are drawn: the operations, and the shapes of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = op_name(func)
        if _RANDOM_OPS.search(name):
            first = out[0] if isinstance(out, tuple) else out
            self.draws.append((name, tuple(first.shape) if isinstance(first, Tensor) else ()))
        return out


def draws_alike(adapter: ModelAdapter, path: CodePath, first: Inputs, second: Inputs) -> bool:
    """Do both calls draw the same random numbers?"""
    draws = []
    for inputs in (first, second):
        with DrawRecorder() as recorder:
            adapter.run(inputs, path)
        draws.append(recorder.draws)
    return draws[0] == draws[1]


# -- embeddings --------------------------------------------------------------------------------


class UntracedError(Exception):
    """The input could not be followed into the model."""


class EmbeddingHook(TorchFunctionMode):
    """Applies a hook to the embeddings of some tokens where the model looks them up."""

    def __init__(self, tokens: Tensor, hook: Hook) -> None:
        super().__init__()
        self.tokens = tokens
        self.hook = hook
        self.applied = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.embedding, torch.embedding) and isinstance(out, Tensor):
            arguments = (*args, *(kwargs or {}).values())
            indices = next(
                (value for value in arguments if isinstance(value, Tensor) and not value.is_floating_point()),
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
    """What the model returns when its embeddings or features (B, T, D) go through a hook; None where no
    embedding of the tokens was seen.
    """
    function = adapter.entry_point
    arguments = adapter.arguments(inputs, path)
    if inputs.tokens.is_floating_point():
        return adapter.invoke(function, arguments, hooks={adapter.main_argument: hook})
    tokens = inputs.tokens.to(adapter.device)
    embedding_hook = EmbeddingHook(tokens, hook)
    if adapter.time_axis == 0:
        embedding_hook = EmbeddingHook(
            tokens.T, lambda vectors: hook(vectors.transpose(0, 1)).transpose(0, 1)
        )
    with embedding_hook:
        out = adapter.invoke(function, arguments)
    return out if embedding_hook.applied else None


def run_with_grad(adapter: ModelAdapter, inputs: Inputs, path: CodePath) -> tuple[Tensor, Tensor]:
    """The audited output with its graph, and the leaf (B, T, D) that takes the place of the embeddings or
    features. Raises UntracedError where the input cannot be followed.
    """
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
    """Replaces the vectors at the positions of a mask (B, T) by NaN or infinity; without a value, multiplies
    them by INPUT_SCALE.
    """

    def hook(vectors: Tensor) -> Tensor:
        replacement = vectors * INPUT_SCALE if value is None else torch.full_like(vectors, value)
        vector_mask = mask.to(vectors.device).view(*mask.shape, *[1] * (vectors.dim() - 2))
        return torch.where(vector_mask, replacement, vectors)

    return hook


def select_output_with_hook(
    adapter: ModelAdapter, inputs: Inputs, path: CodePath, hook: Hook
) -> Tensor | None:
    """The audited output of run_with_hook, without gradients."""
    with torch.no_grad():
        out = run_with_hook(adapter, inputs, path, hook)
    return None if out is None else adapter.select_output(out, *inputs.tokens.shape[:2]).detach()


# -- attention scores --------------------------------------------------------------------------


class ScoreAmplifier:
    """Multiplies the attention scores of each attention by a factor that the first call determines and all
    later ones share.
    """

    def __init__(self, length: int, sign: float = 1.0) -> None:
        self.length = length
        self.sign = sign
        self.factors: list[float] = []
        self.calibrated = False

    def mode(self) -> _AmplifierMode:
        """A context for one call."""
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
        length = self.amplifier.length
        if "scaled_dot_product" in name and "backward" not in name and len(args) > 2:
            q, k = args[:2]
            if q.shape[-2] == k.shape[-2] == length:
                factor = self.next_factor(lambda: _max_score(q, k, kwargs.get("scale")))
                return func(q * factor, *args[1:], **kwargs)
        operand = _MATMUL_FIRST_OPERAND.get(name)
        if operand is not None and len(args) > operand + 1:
            a, b = args[operand : operand + 2]
            if a.shape[-2] == b.shape[-1] == length:
                factor = self.next_factor(lambda: float((a.double() @ b.double()).abs().max()))
                args = (*args[:operand], a * factor, *args[operand + 1 :])
        return func(*args, **kwargs)


def _max_score(q: Tensor, k: Tensor, scale: float | None) -> float:
    """The largest attention score, in absolute value; keys may have fewer heads than queries."""
    if q.dim() == 4 and q.shape[1] != k.shape[1]:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return float((q.double() @ k.double().transpose(-1, -2)).abs().max()) * (scale or q.shape[-1] ** -0.5)


def stressed_run(
    adapter: ModelAdapter, inputs: Inputs, path: CodePath, amplifier: ScoreAmplifier | None, hook: Hook | None
) -> Callable[[], Any]:
    """A call with amplified scores, with a hook, or both, to be repeated where a leak is located."""

    def run() -> Any:
        with amplifier.mode() if amplifier is not None else nullcontext():
            if hook is None:
                return adapter.run_raw(inputs, path)
            return run_with_hook(adapter, inputs, path, hook)

    return run
