"""A copy of a model for quick inference on a CPU: its matrices laid out once, in float32 or in 8 bits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from keepleft.models.compiled import compiler
from keepleft.models.embed import Embed
from keepleft.models.heads import MaskedScores, Scores
from keepleft.models.twin import AnyModel, twin
from keepleft.nn import sense
from keepleft.nn.attention import Attention
from keepleft.nn.packed import Fixed, missing, packed
from keepleft.nn.position import Sinusoidal, waves

DTYPES = ("float32", "int8")


class PackedScores(nn.Module):
    """A head over the vocabulary, tied or not, on a packed matrix: (…, dim) → (…, V)"""

    def __init__(self, head: Scores | MaskedScores, product: Fixed) -> None:
        super().__init__()
        self.head, self.product = head, product

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return self.product(self.head.ready(x))  # type: ignore[no-any-return]

    def ready(self, x: Tensor) -> Tensor:
        """What meets the matrix: (…, dim) → (…, dim)"""
        return self.head.ready(x)

    def matrix(self, table: nn.Embedding) -> tuple[Tensor, Tensor | None]:
        """(V, dim) and, where there is one, (V,) bias; as they were before they were packed"""
        return self.head.matrix(table)


class Waves:
    """The waves of positions looked up in a table, which grows where it must."""

    def __init__(self, dim: int, length: int) -> None:
        self.table = waves(torch.arange(length), dim)

    def __call__(self, positions: Tensor, dim: int) -> Tensor:
        if (farthest := int(positions.max())) >= len(self.table):
            self.table = waves(torch.arange(2 * farthest), dim)
        return nn.functional.embedding(positions, self.table)


@torch.no_grad()
def pack(model: AnyModel, dtype: Literal["float32", "int8"] = "float32", *, compiled: bool = False) -> AnyModel:
    """The same model for inference alone, on a CPU: same doors, same scores, quicker steps. The given one stays as it is.

    "float32" scores alike to rounding. "int8" takes a quarter of the memory traffic: weights are rounded with a scale for
    each output, what meets them with one scale for the whole batch, so a row's scores depend a little on its neighbours.
    Embeddings and norms are shared with the given model. Where PyTorch lacks the kernels, the layers stay plain, with a
    warning. `compiled`: what writes texts compiles its step, which takes a minute for each shape (rows, beams, length to the
    next 128) in each process: for a model that writes long or much.
    """
    sense.word("dtype", dtype, DTYPES)
    if compiled and compiler() is None:
        raise ValueError("a compiled step needs a C++ compiler, and there is none: install g++, or leave compiled out")
    for name, weight in model.named_parameters():
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(f"{name} is {weight.dtype} on {weight.device}: only float32 weights on a CPU can be packed, "
                             "model.float().cpu() makes them so")
    if any(isinstance(part, Fixed) for part in model.modules()):
        raise ValueError("the model is packed already: pack the model that it was packed from")
    out = twin(model).eval()
    for part in out.modules():
        if isinstance(part, Attention):
            part.shape = replace(part.shape, dropout=0.0)
        elif isinstance(part, Embed) and isinstance(model.design.position, Sinusoidal):
            part.waves = Waves(model.design.dim, model.design.position.length)
    dropouts = [name for name, part in out.named_modules() if isinstance(part, nn.Dropout)]
    for name in dropouts:
        out.set_submodule(name, nn.Identity())
    kind: str = dtype if not compiled else "open8" if dtype == "int8" else "plain"  # a compiler lays float32 out itself
    out.compiled = compiled
    if (lacking := missing(dtype)) is not None:
        warnings.warn(f"this PyTorch has no {lacking} to pack {dtype} with: the layers stay as they are", stacklevel=3)
        kind = "plain"
    for name, part in list(out.named_modules()):
        if isinstance(part, nn.Linear):
            out.set_submodule(name, packed(kind, part.weight, part.bias))
    if isinstance(out.head, Scores | MaskedScores):
        out.head = PackedScores(out.head, packed(kind, *out.head.matrix(out.token)))
    return out
