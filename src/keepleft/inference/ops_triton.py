"""The step of inference/ops_torch.py on a GPU: a handful of kernels for a layer, each doing all that can be done before others must wait.

One token for each row moves every weight through the chip once and computes next to nothing, so time goes into reading memory
and into starting kernels. Kernels begin before the one before them is done, and fetch their weights while they wait for it. For
a few rows a product and the bend or the residual behind it are one kernel; for more rows the products are cuBLAS's, and the
residual is added by the norm that follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.inference.ops_torch import (
    CrossAttentionOp,
    DecodeContext,
    LinearResidualOp,
    NormLinearOp,
    SelfAttentionOp,
)
from keepleft.kernels.add_norm import PendingResidual, add_norm
from keepleft.kernels.decode_attention import cross_attention, self_attention
from keepleft.kernels.gemv import ACTIVATION_IDS, MAX_FUSED_ROWS, linear_activation, linear_add
from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import ACTIVATIONS, FeedForwardLayer


class TritonOps:
    static_shapes = True

    def norm_linear(self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None) -> NormLinearOp:
        return _make_norm_linear(norm, linear, feedforward)

    def linear_residual(self, linear: nn.Module) -> LinearResidualOp:
        weight, bias, _ = _linear_weights(linear)

        def run(x: Tensor, y: Tensor) -> Any:
            if len(y) <= MAX_FUSED_ROWS:
                return linear_add(x, y, weight, bias)
            return PendingResidual(x, F.linear(y, weight, bias))
        return run

    def self_attention(self, config: AttentionConfig, window: int | None) -> SelfAttentionOp:
        def run(qkv: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
            return self_attention(qkv, keys, values, context, config, window or 0)
        return run

    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp:
        def run(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
            return cross_attention(q, keys, values, bias, config)
        return run


def _make_norm_linear(norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None) -> NormLinearOp:
    norm_kind, norm_weight, norm_bias, eps = _norm_weights(norm)
    if isinstance(linear, nn.Identity):  # a norm behind a norm
        def norm_only(x: Any) -> tuple[Any, Any, Tensor]:
            residual, normed = add_norm(x if isinstance(x, PendingResidual) else PendingResidual(x), norm_kind, norm_weight, norm_bias, eps)
            return residual, normed, normed
        return norm_only
    weight, bias, scale = _linear_weights(linear)
    activation_id, gated = (0, False) if feedforward is None else (ACTIVATION_IDS[feedforward.activation], feedforward.gated)
    dtype = None if isinstance(linear, nn.Linear) else torch.float32
    # what cuBLAS does on the way out
    fused = feedforward is not None and not gated and bias is not None and feedforward.activation in (ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"])

    def run(x: Any) -> tuple[Any, Any, Tensor]:
        residual, normed = add_norm(x if isinstance(x, PendingResidual) else PendingResidual(x), norm_kind, norm_weight, norm_bias, eps)
        if len(normed) <= MAX_FUSED_ROWS:
            return residual, normed, linear_activation(normed, weight, bias, activation_id=activation_id, gated=gated, scale=scale, dtype=dtype)
        scaled = normed if scale == 1.0 else normed * scale
        if fused and scaled.is_cuda:
            assert feedforward is not None
            assert bias is not None
            return residual, normed, torch._addmm_activation(bias, scaled, weight.t(), use_gelu=feedforward.activation is not ACTIVATIONS["relu"])
        y = F.linear(scaled, weight, bias)
        return residual, normed, y if feedforward is None else feedforward.activate(y)
    return run


def _linear_weights(linear: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    """Matrix, bias and the scale before them."""
    module: Any = linear
    if isinstance(linear, nn.Linear):
        return linear.weight.detach(), None if linear.bias is None else linear.bias.detach(), 1.0
    weight, bias = module.weight_and_bias
    return weight.detach(), None if bias is None else bias.detach(), module.scale


def _norm_weights(norm: nn.Module | None) -> tuple[int, Tensor | None, Tensor | None, float]:
    """Its kind (none, root mean square, layer), gain, shift and the number that keeps it from dividing by nothing."""
    if norm is None or isinstance(norm, nn.Identity):
        return 0, None, None, 0.0
    module: Any = norm
    weight = module.weight.detach()
    if isinstance(norm, nn.LayerNorm):
        return 2, weight, None if norm.bias is None else norm.bias.detach(), norm.eps
    return 1, weight, None, torch.finfo(torch.float32).eps if module.eps is None else module.eps
