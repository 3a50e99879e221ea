"""The decoder layers for one token per row, as bare functions over tensors: what the static and the paged
runner share.

Where keys and values lie, and what a row may attend to, is up to the runner: it passes a `DecodeContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.attention.masks import is_causal_window, window_size
from keepleft.inference.int8_linear import PrepackedLinear
from keepleft.inference.ops import (
    DecodeContext,
    DecodeOps,
    PagedLayout,
    RotaryCosSin,
    SlotTableLayout,
    StaticLayout,
)
from keepleft.inference.prepack import PrepackedLMHead
from keepleft.kernels.triton_compat import lacks_triton
from keepleft.models.heads import LMHeadLayer
from keepleft.models.transformer import CausalModel, Decoder, EncoderDecoder
from keepleft.nn.attention import Attention
from keepleft.nn.position import (
    LearnedPositions,
    RelativeBias,
    Rotary,
    Sinusoidal,
    rope_cos_sin,
    sinusoidal_encoding,
)

ByPosition = Callable[[Tensor], Tensor]  # a table indexed by position → (R or 1, …), the entry of each row
KVBuffers = Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer


def unsupported_reason(model: nn.Module) -> str | None:
    """Why the fused decode step cannot serve this model; None if it can."""
    if not isinstance(model, Decoder | EncoderDecoder):
        return "it is not a decoder of keepleft's"
    if not all(map(is_causal_window, model.decoder.masks)):
        return f"its mask is {' / '.join(map(str, model.decoder.masks))}"
    if not isinstance(model.head, LMHeadLayer | PrepackedLMHead):
        return "it has no head over a vocabulary"
    if lacks_triton(model.token.weight.device):
        return "on a GPU it needs Triton, which is not installed"
    for name, module in model.decoder.named_modules():
        if isinstance(module, Attention) and module.watcher is not None:
            return "its attention is being watched"
        is_linear = name.endswith((".qkv", ".q", ".out", ".up", ".down"))
        if is_linear and type(module) is not nn.Linear and not isinstance(module, PrepackedLinear):
            return f"{name} is a {type(module).__name__}"
    return None


class DecodeLayers:
    """The layers as fused operations, valid as long as the weights keep their memory."""

    def __init__(self, model: CausalModel, ops: DecodeOps) -> None:
        if (reason := unsupported_reason(model)) is not None:
            raise ValueError(
                f"the fused decode step does not serve this model, {reason}: use its own start() and step()"
            )
        self.model = model
        self.design = model.design
        self.ops = ops
        self.windows = tuple(map(window_size, model.decoder.masks))
        self.layers = [self._layer(n, layer) for n, layer in enumerate(model.decoder.layers)]
        final_norm = model.decoder.norm if not isinstance(model.decoder.norm, nn.Identity) else None
        last_layer: Any = model.decoder.layers[-1]
        if not self.design.norm_first:  # post-norm: the norm after a layer is the one before the next
            self.final_norms = (
                [last_layer.norm_feed] if final_norm is None else [last_layer.norm_feed, final_norm]
            )
        else:
            self.final_norms = [] if final_norm is None else [final_norm]
        self.lm_head = ops.norm_linear(
            self.final_norms[-1] if self.final_norms else None, _head_linear(model.head, model.token)
        )
        self.inner_norms = [ops.norm_linear(norm, nn.Identity()) for norm in self.final_norms[:-1]]
        self.position_table = self.rotary_table = self.relative_bias = torch.empty(0)

    def _layer(self, n: int, layer: Any) -> tuple[Any, ...]:
        ops, config = self.ops, layer.self.config
        norms = [
            layer.norm_self,
            *([layer.norm_cross] if self.design.is_encoder_decoder else []),
            layer.norm_feed,
        ]
        if not self.design.norm_first:
            previous: Any = self.model.decoder.layers[n - 1] if n else None
            norms = [previous.norm_feed if n else None, *norms[:-1]]
        self_ops = [
            ops.norm_linear(norms[0], layer.self.qkv),
            ops.self_attention(config, self.windows[n % len(self.windows)]),
            ops.linear_residual(layer.self.out),
        ]
        cross_ops = None
        if self.design.is_encoder_decoder:
            cross_ops = (
                ops.norm_linear(norms[1], layer.cross.q),
                ops.cross_attention(layer.cross.config),
                ops.linear_residual(layer.cross.out),
            )
        return (
            *self_ops,
            cross_ops,
            ops.norm_linear(norms[-1], layer.feed.up, layer.feed),
            ops.linear_residual(layer.feed.down),
        )

    def context(
        self, position: Tensor, layout: StaticLayout | PagedLayout | SlotTableLayout, by_position: ByPosition
    ) -> DecodeContext:
        """What all layers share in a step of rows at these positions."""
        relative_bias = self.relative_bias if len(self.relative_bias) else None
        return DecodeContext(position, layout, self.rotary(by_position), relative_bias)

    def forward(
        self,
        tokens: Tensor,
        by_position: ByPosition,
        context: DecodeContext,
        kv_buffers: KVBuffers,
        source_kv: KVBuffers | None = None,
    ) -> Tensor:
        """(R,) next tokens → (R, V) logits, by tensors alone."""
        x = self.embed(tokens, by_position)
        norm_first = self.design.norm_first
        for n, (norm_linear, attend, linear_residual, cross_ops, up, down) in enumerate(self.layers):
            residual, normed, qkv = norm_linear(x)
            attended = attend(qkv, *kv_buffers[n], context)
            x = linear_residual(residual if norm_first else normed, attended)
            if source_kv is not None:
                norm_linear, attend, linear_residual = cross_ops
                residual, normed, q = norm_linear(x)
                x = linear_residual(residual if norm_first else normed, attend(q, *source_kv[n], context))
            residual, normed, hidden = up(x)
            x = down(residual if norm_first else normed, hidden)
        for norm in self.inner_norms:
            x = norm(x)[1]
        return self.lm_head(x)[2]

    def embed(self, tokens: Tensor, by_position: ByPosition) -> Tensor:
        """(R,) → (R, dim)"""
        model = self.model
        x = F.embedding(tokens, model.token.weight)
        if self.design.scale_embedding:
            x = x * self.design.dim**0.5
        if len(self.position_table):
            x = x + by_position(self.position_table)
        return model.embed.norm(x) if self.design.norm_embedding else x

    def rotary(self, by_position: ByPosition) -> RotaryCosSin | None:
        """RoPE cosines and sines at each row's position; None without RoPE."""
        return (
            RotaryCosSin(*by_position(self.rotary_table)[:, None].chunk(2, -1))
            if len(self.rotary_table)
            else None
        )

    def prepare_tables(self, capacity: int) -> None:
        """Build the tables by position for `capacity` tokens.

        Learned ones are read again each time: weights may have changed.
        """
        learned = (
            isinstance(self.design.position, LearnedPositions | RelativeBias) or self.design.token_types > 0
        )
        current_length = max(len(self.position_table), len(self.rotary_table), self.relative_bias.shape[-1])
        if current_length >= capacity and not learned:
            return
        positions = torch.arange(
            max(current_length, next_power_of_2(capacity)), device=self.model.token.weight.device
        )
        with torch.no_grad():
            for name, table in self._position_tables(positions).items():
                if (old := getattr(self, name)).shape == table.shape:
                    old.copy_(table)  # in place: captured graphs point to it
                else:
                    setattr(self, name, table)

    def _position_tables(self, positions: Tensor) -> dict[str, Tensor]:
        design = self.design
        embed = self.model.embed
        like = self.model.token.weight
        out: dict[str, Tensor] = {}
        match design.position:
            case Sinusoidal():
                out["position_table"] = sinusoidal_encoding(positions, design.dim).to(like.dtype)
            case LearnedPositions():
                out["position_table"] = embed.position(positions.clamp(max=design.position.length - 1))
            case Rotary():
                out["rotary_table"] = torch.cat(
                    rope_cos_sin(design.position, positions[None], design.head_width, like.dtype), -1
                )[0, 0]
            case _:
                bias_module = self.model.decoder.nearness
                out["relative_bias"] = (
                    bias_module(positions[-1:][None], positions[None])[0, :, 0].flip(-1).contiguous()
                )
        if design.token_types:
            token_type = embed.kind.weight[:1]
            out["position_table"] = (
                out["position_table"] + token_type
                if "position_table" in out
                else token_type.repeat(len(positions), 1)
            )
        return out


class HeadLinear(nn.Module):
    """The linear layer of an LM head; its weight may be tied to the embedding."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scale: float) -> None:
        super().__init__()
        self.weight_and_bias = (weight, bias)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.scale == 1.0 else x * self.scale, *self.weight_and_bias)


class ScaledLinear(nn.Module):
    """A prepacked LM head with the scale before it."""

    def __init__(self, product: nn.Module, scale: float) -> None:
        super().__init__()
        self.product = product
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x * self.scale)  # type: ignore[no-any-return]


def _head_linear(head: Any, table: nn.Embedding) -> nn.Module:
    if not isinstance(head, PrepackedLMHead):
        weight, bias = head.output_weight(table)
        return HeadLinear(weight, bias, head.scale)
    if head.head.scale == 1.0:
        return head.product
    return ScaledLinear(head.product, head.head.scale)  # type: ignore[arg-type]


def next_power_of_2(capacity: int) -> int:
    """A power of two, at least 64: so that tables are seldom rebuilt."""
    return 1 << max(6, (capacity - 1).bit_length())
