"""From a design to a model with fresh weights."""

from __future__ import annotations

import math

import torch
from torch import nn

from keepleft.models.design import Design, Folded, Normal, Xavier
from keepleft.models.wholes import Decoder, Encoder, EncoderDecoder, Model
from keepleft.nn.attention import CrossAttention, SelfAttention
from keepleft.nn.feedforward import Feed
from keepleft.nn.position import Nearness, PositionTable


def build(design: Design, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None,
          generator: torch.Generator | None = None) -> Encoder | Decoder | EncoderDecoder:
    """The model that a design describes; reproducible with a seeded generator. On device 'meta' it takes no memory."""
    model = empty(design, device=device, dtype=dtype)
    if next(model.parameters()).device.type != "meta":
        initialise(model, generator)
    return model


def empty(design: Design, *, device: str | torch.device | None = None,
          dtype: torch.dtype | None = None) -> Encoder | Decoder | EncoderDecoder:
    """The same with arbitrary weights: for those that will be loaded."""
    if not isinstance(design, Design):
        raise TypeError(f"{design!r} is no design: give one such as presets.gpt2")
    kind = Encoder if design.decoder is None else Decoder if design.encoder is None else EncoderDecoder
    with torch.device("meta"):
        model = kind(design)
    if dtype is not None:
        model.to(dtype)
    return model if torch.device(device or "cpu").type == "meta" else housed(model, device or "cpu")


def housed(model: Encoder | Decoder | EncoderDecoder, device: str | torch.device) -> Encoder | Decoder | EncoderDecoder:
    """A model on device 'meta' with memory for its weights, which are arbitrary."""
    model.to_empty(device=device)
    for buffer in model.buffers():
        buffer.zero_()
    return model


def parameters(design: Design) -> int:
    """How many weights the design has: the cheapest check that a preset is the paper's."""
    return sum(p.numel() for p in empty(design, device="meta").parameters())


@torch.no_grad()
def initialise(model: Model, generator: torch.Generator | None = None) -> None:
    """Fresh weights by the design's own rule. Norms start at one, biases at zero."""
    design, rule = model.design, model.design.initial
    depth = sum(stack.layers for stack in (design.encoder, design.decoder) if stack)

    def normal(weight: torch.Tensor, std: float) -> None:
        weight.normal_(0.0, std, generator=generator)

    def linear(weight: torch.Tensor, std: float) -> None:
        if isinstance(rule, Xavier):
            limit = math.sqrt(6.0 / sum(weight.shape))
            weight.uniform_(-limit, limit, generator=generator)
        else:
            normal(weight, std)

    wide = rule.std if isinstance(rule, Normal) else rule.factor if isinstance(rule, Folded) else design.dim ** -0.5
    for module in model.modules():
        if isinstance(module, nn.LayerNorm | nn.RMSNorm):
            nn.init.ones_(module.weight)
            if isinstance(module, nn.LayerNorm):
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding | PositionTable):
            normal(module.weight, wide)
        elif isinstance(module, Nearness):
            normal(module.weight, design.dim ** -0.5)
        elif isinstance(module, nn.Linear):
            linear(module.weight, rule.std if isinstance(rule, Normal) else module.in_features ** -0.5)
            if module.bias is not None:
                module.bias.zero_()
    for module in model.modules():  # after the plain ones: what a rule says of special places
        if isinstance(module, SelfAttention | CrossAttention | Feed):
            out = module.down if isinstance(module, Feed) else module.out
            if isinstance(rule, Normal) and rule.by_depth:
                normal(out.weight, rule.std / math.sqrt(2 * depth))
            if isinstance(rule, Folded) and not isinstance(module, Feed):
                queries = module.qkv.weight[:module.sizes[0]] if isinstance(module, SelfAttention) else module.q.weight
                normal(queries, rule.factor * (design.dim * design.head_width) ** -0.5)
    weight = getattr(model.head, "weight", None)
    if weight is not None:
        linear(weight, rule.std if isinstance(rule, Normal) else design.dim ** -0.5)
    if isinstance(bias := getattr(model.head, "bias", None), nn.Parameter):
        bias.zero_()
