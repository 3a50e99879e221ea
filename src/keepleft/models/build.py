"""From a design to a model: parameter count, weight initialisation, copies that share weights."""

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

_MODEL_CLASSES: dict[str, type[Encoder | Decoder | EncoderDecoder]] = {
    "encoder": Encoder,
    "decoder": Decoder,
    "encoder-decoder": EncoderDecoder,
}


def build(
    design: Design,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Encoder | Decoder | EncoderDecoder:
    """The model of a design with fresh weights, reproducible with a seeded generator.

    On device 'meta' it takes no memory.
    """
    model = build_empty(design, device=device, dtype=dtype)
    if next(model.parameters()).device.type != "meta":
        init_weights(model, generator)
    return model


def build_empty(
    design: Design, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None
) -> Encoder | Decoder | EncoderDecoder:
    """The same with uninitialised weights, for those that will be loaded."""
    if not isinstance(design, Design):
        raise TypeError(f"{design!r} is no design: give one such as presets.gpt2")
    with torch.device("meta"):
        model = _MODEL_CLASSES[design.kind](design)
    if dtype is not None:
        model.to(dtype)
    return model if torch.device(device or "cpu").type == "meta" else materialize(model, device or "cpu")


def materialize(
    model: Encoder | Decoder | EncoderDecoder, device: str | torch.device
) -> Encoder | Decoder | EncoderDecoder:
    """Move a model from device 'meta' to a real one; weights are uninitialised, buffers zero."""
    # to_empty calls empty_like on device 'meta', which imports sympy: a quarter of a second for nothing
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    for buffer in model.buffers():
        buffer.zero_()
    return model


def count_parameters(design: Design) -> int:
    """The number of parameters of a design, without allocating them."""
    return sum(p.numel() for p in build_empty(design, device="meta").parameters())


@torch.no_grad()
def init_weights(model: Model, generator: torch.Generator | None = None) -> None:
    """Fresh weights by design.initial. Norms start at one, biases at zero."""
    design = model.design
    init = design.initial
    depth = sum(stack.layers for stack in (design.encoder, design.decoder) if stack)

    def init_normal(weight: torch.Tensor, std: float) -> None:
        weight.normal_(0.0, std, generator=generator)

    def init_linear(weight: torch.Tensor, std: float) -> None:
        if isinstance(init, XavierInit):
            limit = math.sqrt(6.0 / sum(weight.shape))
            weight.uniform_(-limit, limit, generator=generator)
        else:
            init_normal(weight, std)

    match init:
        case NormalInit():
            embedding_std = init.std
        case T5Init():
            embedding_std = init.factor
        case XavierInit():
            embedding_std = design.dim**-0.5
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
    for module in model.modules():  # after the others: the layers that an initialisation treats differently
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
    """A copy of the model's structure over the same weights, which need no gradient in the copy."""
    shared: dict[int, Any] = {
        id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()
    }
    shared |= {id(buffer): buffer for buffer in model.buffers()}
    return deepcopy(model, shared)
