"""How fast it goes: the arithmetic of a step, and the rate at which this device multiplies matrices."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


class FlopCounter:
    """Operations of one forward and backward pass: two for each weight and token, three times, padding not
    counted.

    Attention is counted as in the usual formula, 12 · tokens · width · length for each layer, half of it
    where causal.
    """

    def __init__(self, model: nn.Module) -> None:
        transformer: Any = model
        self.dim = transformer.design.dim
        self.vocab = transformer.design.vocab
        input_names = {
            "encoder": "source" if hasattr(transformer, "decoder") else "tokens",
            "decoder": "tokens",
        }
        self.stacks = [
            (
                input_name,
                sum(p.numel() for p in stack.parameters() if p.dim() == 2),
                len(stack.layers),
                0.5 if stack_name == "decoder" else 1.0,
            )
            for stack_name, input_name in input_names.items()
            if (stack := getattr(transformer, stack_name, None)) is not None
        ]

    def __call__(self, inputs: dict[str, Tensor], num_targets: int) -> float:
        flops = 6.0 * num_targets * self.vocab * self.dim
        for input_name, num_weights, num_layers, visible_fraction in self.stacks:
            if input_name in inputs:
                num_tokens, length = _count_tokens(inputs, input_name)
                flops += (
                    6.0 * num_weights * num_tokens
                    + 12.0 * visible_fraction * num_layers * num_tokens * length * self.dim
                )
        return flops


def _count_tokens(inputs: dict[str, Tensor], name: str) -> tuple[int, float]:
    segments = inputs.get("source_segments" if name == "source" else "segments")
    rows, width = inputs[name].shape
    if segments is None:
        return rows * width, float(width)
    num_tokens = int((segments != 0).sum())
    return num_tokens, num_tokens / max(1, int(segments.amax(1).sum()))


@lru_cache
def peak_matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in a large matrix product: what to measure a share of.

    Takes a fraction of a second, once.
    """
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
