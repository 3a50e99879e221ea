"""From a design to a model with fresh weights."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any, TypeVar

import torch
from torch import nn

from keepleft.models.design import Design, NormalInit, T5Init, XavierInit
from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder, Model
from keepleft.nn.attention import CrossAttention, SelfAttention
from keepleft.nn.feedforward import FeedForwardLayer
from keepleft.nn.position import LearnedPositionEmbedding, RelativePositionBias

ModelT = TypeVar("ModelT", bound=Model)


def build(
    design: Design,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Encoder | Decoder | EncoderDecoder:
    """The model that a design describes; reproducible with a seeded generator.

    On device 'meta' it takes no memory.
    """
    model = build_empty(design, device=device, dtype=dtype)
    if next(model.parameters()).device.type != "meta":
        init_weights(model, generator)
    return model


def build_empty(
    design: Design, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Encoder | Decoder | EncoderDecoder:
    """The same with arbitrary weights: for those that will be loaded."""
    if not isinstance(design, Design):
        raise TypeError(f"{design!r} is no design: give one such as presets.gpt2")
    model_class = Encoder if design.decoder is None else Decoder if design.encoder is None else EncoderDecoder
    with torch.device("meta"):
        model = model_class(design)
    if dtype is not None:
        model.to(dtype)
    return model if torch.device(device or "cpu").type == "meta" else materialize(model, device or "cpu")


def materialize(
    model: Encoder | Decoder | EncoderDecoder, device: str | torch.device
) -> Encoder | Decoder | EncoderDecoder:
    """A model on device 'meta' with memory for its weights, which are arbitrary."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def count_parameters(design: Design) -> int:
    """How many weights the design has: the cheapest check that a preset is the paper's."""
    return sum(p.numel() for p in build_empty(design, device="meta").parameters())


@torch.no_grad()
def init_weights(model: Model, generator: torch.Generator | None = None) -> None:
    """Fresh weights by the design's own rule. Norms start at one, biases at zero."""
    design, init = model.design, model.design.initial
    depth = sum(stack.layers for stack in (design.encoder, design.decoder) if stack)

    def init_normal(weight: torch.Tensor, std: float) -> None:
        weight.normal_(0.0, std, generator=generator)

    def init_linear(weight: torch.Tensor, std: float) -> None:
        if isinstance(init, XavierInit):
            limit = math.sqrt(6.0 / sum(weight.shape))
            weight.uniform_(-limit, limit, generator=generator)
        else:
            init_normal(weight, std)

    embedding_std = (
        init.std
        if isinstance(init, NormalInit)
        else init.factor
        if isinstance(init, T5Init)
        else design.dim**-0.5
    )
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | LearnedPositionEmbedding):
            init_normal(module.weight, embedding_std)
        elif isinstance(module, RelativePositionBias):
            init_normal(module.weight, design.dim**-0.5)
        elif isinstance(module, nn.Linear):
            init_linear(module.weight, init.std if isinstance(init, NormalInit) else module.in_features**-0.5)
            if module.bias is not None:
                module.bias.zero_()
    for module in model.modules():  # after the plain ones: what a rule says of special places
        if isinstance(module, SelfAttention | CrossAttention | FeedForwardLayer):
            out = module.down if isinstance(module, FeedForwardLayer) else module.out
            if isinstance(init, NormalInit) and init.by_depth:
                init_normal(out.weight, init.std / math.sqrt(2 * depth))
            if isinstance(init, T5Init) and not isinstance(module, FeedForwardLayer):
                query_weight = (
                    module.qkv.weight[: module.qkv_sizes[0]]
                    if isinstance(module, SelfAttention)
                    else module.q.weight
                )
                init_normal(query_weight, init.factor * (design.dim * module.config.head_dim) ** -0.5)
    weight = getattr(model.head, "weight", None)
    if weight is not None:
        init_linear(weight, init.std if isinstance(init, NormalInit) else design.dim**-0.5)
    if isinstance(bias := getattr(model.head, "bias", None), nn.Parameter):
        bias.zero_()


def share_weights(model: ModelT) -> ModelT:
    """A copy of the model over the same weights, which need no gradient: changing one model's structure
    leaves the other's.
    """
    shared: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()
    }
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return deepcopy(model, shared)
