"""Model FLOPs utilization (MFU): the arithmetic of the model, as a fraction of what the device can do.

The peak is measured, with large matrix products, and not taken from a data sheet. On a CPU there is no MFU:
its peak changes with every other process, and the fraction would say more about those than about the model.
"""

from __future__ import annotations

import time
from functools import lru_cache

import torch
from torch import Tensor, nn

from keepleft.models.design import ClassificationHead
from keepleft.models.stack import LayerStack
from keepleft.models.transformer import Model


class FlopCounter:
    """FLOPs of one forward and backward pass: 6 for each weight and token, padding not counted.

    A frozen weight has no gradient of its own, and counts 4. Attention adds 12 · tokens · dim · length for
    each layer, as in the usual formula; half of it if causal.
    """

    def __init__(self, model: Model) -> None:
        self.dim = model.design.dim
        self.target_flops = _head_flops(model)
        encoder_input = "source" if model.design.is_encoder_decoder else "tokens"
        self.stacks = []  # input name, FLOPs of a token, layers, fraction of the keys that attention sees
        for name, input_name, visible_fraction in (
            ("encoder", encoder_input, 1.0),
            ("decoder", "tokens", 0.5),
        ):
            stack = getattr(model, name, None)
            if isinstance(stack, LayerStack):
                self.stacks.append((input_name, _matrix_flops(stack), len(stack.layers), visible_fraction))

    def __call__(self, inputs: dict[str, Tensor], num_targets: int) -> float:
        flops = self.target_flops * num_targets
        for input_name, token_flops, num_layers, visible_fraction in self.stacks:
            if input_name in inputs:
                num_tokens, length = measure_sequences(inputs, input_name)
                attention_flops = 12.0 * visible_fraction * num_layers * num_tokens * length * self.dim
                flops += token_flops * num_tokens + attention_flops
        return flops


def model_flops_utilization(
    flops: float, seconds: float, device: torch.device, dtype: torch.dtype
) -> float | None:
    """The fraction of the peak that `flops` in `seconds` are, at most 1; None where the peak is not known.

    `dtype` is that of the matrix products.
    """
    if not flops or device.type == "cpu":
        return None
    # the peak is measured for a moment, and a device may run faster at another
    return min(1.0, flops / seconds / peak_matmul_flops(device, dtype))


def measure_sequences(inputs: dict[str, Tensor], name: str) -> tuple[int, float]:
    """The tokens of an input, padding not counted, and the mean length of its sequences."""
    segments = inputs.get("source_segments" if name == "source" else "segments")
    rows, width = inputs[name].shape
    if segments is None:
        return rows * width, float(width)
    num_tokens = int((segments != 0).sum())
    num_sequences = int(segments.amax(1).sum())  # segments count from 1 in each row
    return num_tokens, num_tokens / max(1, num_sequences)


def _head_flops(model: Model) -> float:
    """FLOPs of one target: a token of the vocabulary, or the label of a sequence."""
    head: nn.Module = model.head
    if isinstance(model.design.head, ClassificationHead):
        return _matrix_flops(head)
    weight = getattr(head, "weight", None)
    output_weight = model.token.weight if weight is None else weight
    return _flops_per_weight(output_weight) * model.design.vocab * model.design.dim


def _matrix_flops(module: nn.Module) -> float:
    return sum(_flops_per_weight(p) * p.numel() for p in module.parameters() if p.dim() == 2)


def _flops_per_weight(weight: Tensor) -> float:
    return 6.0 if weight.requires_grad else 4.0


@lru_cache
def peak_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second in large matrix products, the denominator of MFU. Measured once, in under a second."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=device, dtype=dtype).unbind()
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best_seconds = float("inf")
    for _ in range(4):
        synchronize()
        start_time = time.perf_counter()
        for _ in range(3):
            a @ b
        synchronize()
        best_seconds = min(best_seconds, (time.perf_counter() - start_time) / 3)
    return 2.0 * n**3 / best_seconds
