"""Weights stored as int8: a quarter of the bytes of float32, for models that are shipped with a program.

A matrix X is stored as int8, with a scale for each row in X_scale; everything else as it is. The numbers are
those that `prepack(model, "int8")` computes with, so nothing more is lost there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from keepleft.weights.rules import TensorSource

QUANT_METHOD = "keepleft-int8"  # "quant_method" in the "quantization_config" of config.json
SCALE_SUFFIX = "_scale"
INT8_LEVELS = 127


class Int8Source:
    """A checkpoint with int8 matrices, read as float32."""

    def __init__(self, source: TensorSource) -> None:
        names = source.names()
        self.source = source
        self.scales = {
            name: source.rows(name + SCALE_SUFFIX, 0, source.shape(name)[0])
            for name in names
            if name + SCALE_SUFFIX in names
        }
        for name, scales in self.scales.items():
            if scales.shape != source.shape(name)[:1] or not scales.is_floating_point():
                raise ValueError(
                    f"{name + SCALE_SUFFIX!r} has shape {tuple(scales.shape)}, type {scales.dtype}: it must "
                    f"be a number for each of the {source.shape(name)[0]} rows of {name!r}"
                )

    def names(self) -> list[str]:
        return [
            name
            for name in self.source.names()
            if name.removesuffix(SCALE_SUFFIX) not in self.scales or name in self.scales
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        rows = self.source.rows(name, begin, end)
        if name not in self.scales:
            return rows
        return rows.float() * self.scales[name][begin:end, None].float()


def int8_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors with matrices as int8 and their scales."""
    for name, tensor in tensors:
        if tensor.dim() != 2:
            yield name, tensor
            continue
        weight = tensor.detach().float()
        scales = (weight.abs().amax(1) / INT8_LEVELS).clamp(min=torch.finfo(torch.float32).tiny)
        yield name, (weight / scales[:, None]).round().to(torch.int8)
        yield name + SCALE_SUFFIX, scales


def is_int8(config: dict[str, Any], where: str) -> bool:
    """Whether a config.json says that matrices are int8. Raises ValueError for any other quantization."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return False
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if method != QUANT_METHOD:
        raise ValueError(
            f"{where}: quantization_config is of {method!r}, and only {QUANT_METHOD!r} is read: take the "
            "model in float16 or wider"
        )
    return True
