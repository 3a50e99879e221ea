"""The operations of a decode step on Triton kernels, over contiguous or paged keys and values.

Decoding one token per row moves every weight through the chip once and computes next to nothing, so time goes
into reading memory and launching kernels. Kernels start before the previous one is done (programmatic
dependent launch) and fetch their weights while they wait. For a few rows a linear layer and its activation or
residual are one kernel; for more rows cuBLAS does the products, and the norm that follows adds the residual.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.inference.ops import (
    CrossAttentionOp,
    DecodeContext,
    LinearResidualOp,
    NormLinearOp,
    SelfAttentionOp,
    SlotTableLayout,
    StaticLayout,
)
from keepleft.kernels.add_norm import PendingResidual, add_norm
from keepleft.kernels.decode_attention import cross_attention, self_attention
from keepleft.kernels.gemv import ACTIVATION_IDS, MAX_FUSED_ROWS, linear_activation, linear_add
from keepleft.nn.attention import AttentionConfig
from keepleft.nn.feedforward import ACTIVATIONS, FeedForwardLayer

_ACTIVATION_NAMES = {function: name for name, function in ACTIVATIONS.items()}


class TritonOps:
    """The context's layout is a `StaticLayout` or a `SlotTableLayout`."""

    static_shapes = True

    def norm_linear(
        self, norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None = None
    ) -> NormLinearOp:
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
            return self_attention(
                qkv,
                keys,
                values,
                heads=config.heads,
                kv_heads=config.kv_heads,
                scale=config.softmax_scale,
                position=context.position,
                window=window or 0,
                rotary=context.rotary,
                relative_bias=context.relative_bias,
                **_self_attention_tables(context),
            )

        return run

    def cross_attention(self, config: AttentionConfig) -> CrossAttentionOp:
        def run(q: Tensor, keys: Tensor, values: Tensor, context: DecodeContext) -> Tensor:
            return cross_attention(
                q,
                keys,
                values,
                heads=config.heads,
                kv_heads=config.kv_heads,
                scale=config.softmax_scale,
                **_cross_attention_tables(context),
            )

        return run


def _self_attention_tables(context: DecodeContext) -> dict[str, Tensor | None]:
    layout = context.layout
    if isinstance(layout, SlotTableLayout):
        return {
            "slot_table": layout.table,
            "table_rows": layout.table_rows,
            "write_slots": layout.write_slots,
        }
    assert isinstance(layout, StaticLayout)
    return {"starts": layout.starts, "beam_rows": layout.beam_rows}


def _cross_attention_tables(context: DecodeContext) -> dict[str, Tensor | None]:
    layout = context.layout
    if isinstance(layout, SlotTableLayout):
        return {
            "slot_table": layout.source_table,
            "table_rows": layout.table_rows,
            "source_lengths": layout.source_lengths,
        }
    assert isinstance(layout, StaticLayout)
    return {"bias": layout.source_bias}


def _make_norm_linear(
    norm: nn.Module | None, linear: nn.Module, feedforward: FeedForwardLayer | None
) -> NormLinearOp:
    norm_kind, norm_weight, norm_bias, eps = _norm_weights(norm)
    if isinstance(linear, nn.Identity):  # a norm behind a norm

        def norm_only(x: Any) -> tuple[Any, Any, Tensor]:
            residual, normed = add_norm(
                x if isinstance(x, PendingResidual) else PendingResidual(x),
                norm_kind,
                norm_weight,
                norm_bias,
                eps,
            )
            return residual, normed, normed

        return norm_only
    weight, bias, scale = _linear_weights(linear)
    activation_id, gated = 0, False
    if feedforward is not None:
        activation_id = ACTIVATION_IDS[_ACTIVATION_NAMES[feedforward.activation]]
        gated = feedforward.gated
    dtype = None if isinstance(linear, nn.Linear) else torch.float32
    # what cuBLAS does on the way out
    fused = (
        feedforward is not None
        and not gated
        and bias is not None
        and feedforward.activation in (ACTIVATIONS["relu"], ACTIVATIONS["gelu_tanh"])
    )

    def run(x: Any) -> tuple[Any, Any, Tensor]:
        residual, normed = add_norm(
            x if isinstance(x, PendingResidual) else PendingResidual(x),
            norm_kind,
            norm_weight,
            norm_bias,
            eps,
        )
        if len(normed) <= MAX_FUSED_ROWS:
            return (
                residual,
                normed,
                linear_activation(
                    normed, weight, bias, activation_id=activation_id, gated=gated, scale=scale, dtype=dtype
                ),
            )
        scaled = normed if scale == 1.0 else normed * scale
        if fused and scaled.is_cuda:
            assert feedforward is not None
            assert bias is not None
            return (
                residual,
                normed,
                torch._addmm_activation(
                    bias, scaled, weight.t(), use_gelu=feedforward.activation is not ACTIVATIONS["relu"]
                ),
            )
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
    """Its kind (none, root mean square, layer), gain, shift and the number that keeps it from dividing by
    nothing.
    """
    if norm is None or isinstance(norm, nn.Identity):
        return 0, None, None, 0.0
    module: Any = norm
    weight = module.weight.detach()
    if isinstance(norm, nn.LayerNorm):
        return 2, weight, None if norm.bias is None else norm.bias.detach(), norm.eps
    return 1, weight, None, torch.finfo(torch.float32).eps if module.eps is None else module.eps
