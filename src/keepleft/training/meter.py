"""How fast it goes: the arithmetic of a step, and the rate at which this device multiplies matrices."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn


class Work:
    """Operations of one forward and backward pass: two for each weight and token, three times, padding not counted.

    Attention is counted as in the usual formula, 12 · tokens · width · length for each layer, half of it where causal.
    """

    def __init__(self, model: nn.Module) -> None:
        parts: Any = model
        self.dim, self.vocab = parts.design.dim, parts.design.vocab
        names = {"encoder": "source" if hasattr(parts, "decoder") else "tokens", "decoder": "tokens"}
        self.stacks = [(name, sum(p.numel() for p in stack.parameters() if p.dim() == 2), len(stack.layers),
                        0.5 if which == "decoder" else 1.0)
                       for which, name in names.items() if (stack := getattr(parts, which, None)) is not None]

    def __call__(self, inputs: dict[str, Tensor], asked: int) -> float:
        total = 6.0 * asked * self.vocab * self.dim
        for name, weights, layers, seen in self.stacks:
            if name in inputs:
                tokens, length = _real(inputs, name)
                total += 6.0 * weights * tokens + 12.0 * seen * layers * tokens * length * self.dim
        return total


def _real(inputs: dict[str, Tensor], name: str) -> tuple[int, float]:
    segments = inputs.get("source_segments" if name == "source" else "segments")
    rows, width = inputs[name].shape
    if segments is None:
        return rows * width, float(width)
    real = int((segments != 0).sum())
    return real, real / max(1, int(segments.amax(1).sum()))


@lru_cache
def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second in a large matrix product: what to measure a share of. Takes a fraction of a second, once."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, n, n, device=device, dtype=dtype).unbind()
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best = float("inf")
    for _ in range(4):
        wait()
        begin = time.perf_counter()
        for _ in range(3):
            a @ b
        wait()
        best = min(best, (time.perf_counter() - begin) / 3)
    return 2.0 * n ** 3 / best
