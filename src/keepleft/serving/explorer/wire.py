"""Tensors in JSON: base64 of little-endian bytes."""

from __future__ import annotations

from base64 import b64encode

import numpy as np
from torch import Tensor


def u8(values: Tensor) -> str:
    return _base64(values.detach().cpu().numpy().astype(np.uint8))


def f32(values: Tensor) -> str:
    return _base64(values.detach().double().cpu().numpy().astype("<f4"))


def bits(table: Tensor) -> str:
    """(rows, columns) booleans: each row starts at a byte, the first column is its highest bit."""
    return _base64(np.packbits(table.cpu().numpy(), axis=1))


def sqrt_u8(weights: Tensor, max_weight: float = 1.0) -> str:
    """Weights from 0 to `max_weight` as bytes, by their square root so that small ones stay visible."""
    if not bool(weights.isfinite().all()):
        raise ValueError(
            "some weights are NaN, and there is nothing to draw: the model itself is broken, or overflows in "
            "half precision; load another, or take float32"
        )
    return u8((weights / (max_weight or 1.0)).clamp(0, 1).sqrt().mul(255).round())


def _base64(values: np.ndarray) -> str:
    return b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
