"""Caches that need less of the device's memory: in 8 bits, or beside the device."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.attention.kv_cache import KV, DynamicCache


class QuantizedCache(DynamicCache):
    """Keeps keys and values as 8-bit numbers, with a scale for each token and head: a quarter of float32,
    half of bfloat16.

    What is handed back is within 1/254 of the largest number of its token and head.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scales: dict[int, KV] = {}

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        quantized, scales = zip(*(_quantize_int8(tensor) for tensor in (k, v)), strict=True)
        if layer in self.layers:
            quantized, scales = (
                tuple(torch.cat([old, new], 2) for old, new in zip(old_tensors, new_tensors, strict=True))
                for old_tensors, new_tensors in (
                    (self.layers[layer], quantized),
                    (self.scales[layer], scales),
                )
            )
        self.layers[layer], self.scales[layer] = quantized, scales
        out_k, out_v = (
            int8_tensor.to(k.dtype) * scale for int8_tensor, scale in zip(quantized, scales, strict=True)
        )
        return out_k, out_v

    def reorder(self, rows: Tensor) -> None:
        super().reorder(rows)
        self.scales = {layer: (k[rows], v[rows]) for layer, (k, v) in self.scales.items()}

    def crop(self, n: int) -> None:
        super().crop(n)
        crop_layers = lambda layers: {
            layer: (k[:, :, : self.length], v[:, :, : self.length]) for layer, (k, v) in layers.items()
        }
        self.layers, self.scales = crop_layers(self.layers), crop_layers(self.scales)


class OffloadedCache(DynamicCache):
    """Keeps keys and values in the computer's memory and lends a layer's to the device while it is looked at."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> KV:
        device = k.device
        host_k, host_v = super().update(layer, k.cpu(), v.cpu())
        return host_k.to(device, non_blocking=True), host_v.to(device, non_blocking=True)

    def reorder(self, rows: Tensor) -> None:
        tags = (self.positions, self.segments)
        self.positions = None
        self.segments = None
        super().reorder(rows.cpu())
        self.positions, self.segments = (None if tag is None else tag[rows] for tag in tags)


def _quantize_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """(B, H, n, D) as whole numbers up to 127 and what they have to be multiplied by, (B, H, n, 1)."""
    scale = tensor.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(tensor.dtype).tiny) / 127
    return (tensor / scale).round().clamp(-127, 127).to(torch.int8), scale
