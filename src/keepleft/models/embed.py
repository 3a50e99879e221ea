"""Tokens to vectors: the token's own, its position's where positions are added, its kind's where there are kinds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from keepleft.models.design import Design
from keepleft.nn.norm import norm
from keepleft.nn.position import Learned, PositionTable, Sinusoidal, waves


def table(size: int, dim: int) -> nn.Embedding:
    """Arbitrary weights. nn.Embedding alone would draw them, and on device 'meta' load PyTorch's compiler for that: seconds."""
    return nn.Embedding.from_pretrained(torch.empty(size, dim), freeze=False)


class Embed(nn.Module):
    """What one stack reads. The token table itself may be shared, so it is handed in with every call."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.waves: Callable[[Tensor, int], Tensor] = waves
        if isinstance(design.position, Learned):
            self.position = PositionTable(design.position, design.dim)
        if design.kinds:
            self.kind = table(design.kinds, design.dim)
        if design.norm_embedding:
            self.norm = norm(design.norm, design.dim)
        self.dropout = nn.Dropout(design.dropout)

    def forward(self, table: nn.Embedding, tokens: Tensor, positions: Tensor, kinds: Tensor | None = None) -> Tensor:
        """(B, T) tokens at (B or 1, T) positions → (B, T, dim)"""
        design, x = self.design, table(tokens)
        if design.scale_embedding:
            x = x * design.dim ** 0.5
        if isinstance(design.position, Sinusoidal):
            x = x + self.waves(positions, design.dim).to(x.dtype)
        elif isinstance(design.position, Learned):
            x = x + self.position(positions)
        if design.kinds:
            x = x + self.kind(torch.zeros_like(tokens) if kinds is None else kinds)
        return self.dropout(self.norm(x) if design.norm_embedding else x)


WHOLE = (torch.int64, torch.int32)  # what a table can be asked with


def check(name: str, tokens: Tensor, vocab: int) -> None:
    """Every token must be in the vocabulary. On a GPU this waits for the device: call it where that is cheap."""
    if tokens.dim() != 2 or tokens.dtype not in WHOLE:
        raise ValueError(f"{name} of shape {tuple(tokens.shape)} and type {tokens.dtype}: integers (batch, length), of type "
                         "int64 or int32, are needed")
    if not tokens.numel():
        raise ValueError(f"{name} of shape {tuple(tokens.shape)} hold no token: give at least one row of one token")
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab:
        raise ValueError(f"token {low if low < 0 else high} is not in the vocabulary of {vocab}: "
                         "do the tokenizer and the model belong together?")


def alike(word: str, given: Tensor | None, name: str, tokens: Tensor) -> None:
    """What goes with the tokens has their shape, and is made of whole numbers of at least 0."""
    if given is None:
        return
    if given.shape != tokens.shape:
        raise ValueError(f"{word} have shape {tuple(given.shape)}, {name} have {tuple(tokens.shape)}: they must be the same")
    if given.dtype not in WHOLE:
        raise ValueError(f"{word} are {given.dtype}: whole numbers, of type int64 or int32, are needed (.long() makes them so)")
    if given.device.type == "cpu" and (low := int(given.min())) < 0:
        raise ValueError(f"{word} go down to {low}: they begin at 0")
