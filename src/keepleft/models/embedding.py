"""Token embeddings, plus position embeddings where they are added and token-type embeddings; input checks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from keepleft.models.design import Design
from keepleft.nn.norm import make_norm
from keepleft.nn.position import LearnedPositionEmbedding, LearnedPositions, Sinusoidal, sinusoidal_encoding


def embedding_table(size: int, dim: int) -> nn.Embedding:
    """An nn.Embedding with uninitialised weights.

    nn.Embedding alone would sample them, and on device 'meta' import PyTorch's compiler for that: seconds.
    """
    return nn.Embedding.from_pretrained(torch.empty(size, dim), freeze=False)


class Embed(nn.Module):
    """The input of one stack. The token table may be shared between stacks, so each call is given it."""

    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.sinusoids: Callable[[Tensor, int], Tensor] = sinusoidal_encoding
        if isinstance(design.position, LearnedPositions):
            self.position = LearnedPositionEmbedding(design.position, design.dim)
        if design.token_types:
            self.kind = embedding_table(design.token_types, design.dim)
        if design.norm_embedding:
            self.norm = make_norm(design.norm, design.dim)
        self.dropout = nn.Dropout(design.dropout)

    def forward(
        self, table: nn.Embedding, tokens: Tensor, positions: Tensor, token_types: Tensor | None = None
    ) -> Tensor:
        """(B, T) tokens at (B or 1, T) positions → (B, T, dim)"""
        design, x = self.design, table(tokens)
        if design.scale_embedding:
            x = x * design.dim**0.5
        if isinstance(design.position, Sinusoidal):
            x = x + self.sinusoids(positions, design.dim).to(x.dtype)
        elif isinstance(design.position, LearnedPositions):
            x = x + self.position(positions)
        if design.token_types:
            x = x + self.kind(torch.zeros_like(tokens) if token_types is None else token_types)
        return self.dropout(self.norm(x) if design.norm_embedding else x)


INTEGER_DTYPES = (torch.int64, torch.int32)  # what F.embedding takes


def check_tokens(name: str, tokens: Tensor, vocab: int) -> None:
    """ValueError unless these are (B, T) integers, at least one, and all in the vocabulary.

    On a GPU this synchronises: call it where that is cheap.
    """
    if tokens.dim() != 2 or tokens.dtype not in INTEGER_DTYPES:
        raise ValueError(
            f"{name} of shape {tuple(tokens.shape)} and type {tokens.dtype}: integers (batch, length), "
            "of type int64 or int32, are needed"
        )
    if not tokens.numel():
        raise ValueError(
            f"{name} of shape {tuple(tokens.shape)} are empty: give at least one row of one token"
        )
    low, high = (int(x) for x in torch.aminmax(tokens))
    if low < 0 or high >= vocab:
        raise ValueError(
            f"token {low if low < 0 else high} is not in the vocabulary of {vocab}: "
            "do the tokenizer and the model belong together?"
        )


def check_like(argument: str, values: Tensor | None, name: str, tokens: Tensor) -> None:
    """ValueError unless the values are integers of at least 0 in the shape of the tokens; None passes."""
    if values is None:
        return
    if values.shape != tokens.shape:
        raise ValueError(
            f"{argument} have shape {tuple(values.shape)}, {name} have {tuple(tokens.shape)}: "
            "they must be the same"
        )
    if values.dtype not in INTEGER_DTYPES:
        raise ValueError(
            f"{argument} are {values.dtype}: integers of type int64 or int32 are needed "
            "(.long() makes them so)"
        )
    if values.device.type == "cpu" and (low := int(values.min())) < 0:
        raise ValueError(f"{argument} go down to {low}: they start at 0")
