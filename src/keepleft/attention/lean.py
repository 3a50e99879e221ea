"""Caches that need less of the device's memory: in 8 bits, or beside the device."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.cache import Growing, Pair


class Quantized(Growing):
    """Keeps keys and values as 8-bit numbers, with a scale for each token and head: a quarter of float32, half of bfloat16.

    What is handed back is within 1/254 of the largest number of its token and head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[int, Pair] = {}

    def put(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        whole, scales = zip(*(_rounded(tensor) for tensor in (k, v)), strict=True)
        if layer in self.pairs:
            whole, scales = (tuple(torch.cat([old, new], 2) for old, new in zip(before, now, strict=True))
                             for before, now in ((self.pairs[layer], whole), (self.scales[layer], scales)))
        self.pairs[layer], self.scales[layer] = whole, scales
        out_k, out_v = (number.to(k.dtype) * scale for number, scale in zip(whole, scales, strict=True))
        return out_k, out_v

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self.scales = {layer: (k[rows], v[rows]) for layer, (k, v) in self.scales.items()}

    def drop(self, n: int) -> None:
        super().drop(n)
        short = lambda pairs: {layer: (k[:, :, :self.length], v[:, :, :self.length]) for layer, (k, v) in pairs.items()}
        self.pairs, self.scales = short(self.pairs), short(self.scales)


class Offloaded(Growing):
    """Keeps keys and values in the computer's memory and lends a layer's to the device while it is looked at."""

    def put(self, layer: int, k: Tensor, v: Tensor) -> Pair:
        home = k.device
        there_k, there_v = super().put(layer, k.cpu(), v.cpu())
        return there_k.to(home, non_blocking=True), there_v.to(home, non_blocking=True)

    def keep(self, rows: Tensor) -> None:
        marks, self.positions, self.segments = (self.positions, self.segments), None, None
        super().keep(rows.cpu())
        self.positions, self.segments = (None if mark is None else mark[rows] for mark in marks)


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, n, D) as whole numbers up to 127 and what they have to be multiplied by, (B, H, n, 1)."""
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(tensor.dtype).tiny) / 127
    return (tensor / scale).round().clamp(-127, 127).to(torch.int8), scale
