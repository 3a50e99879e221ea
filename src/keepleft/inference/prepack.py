"""A copy of a model for quick inference on a CPU: its matrices laid out once, in float32 or in 8 bits."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from keepleft import checks
from keepleft.inference.compile import find_cxx_compiler
from keepleft.inference.linear_cpu import PrepackedLinear, prepack_linear, unsupported_reason
from keepleft.models.build import ModelT, share_weights
from keepleft.models.embedding import Embed
from keepleft.models.heads import LMHeadLayer, MaskedLMHeadLayer
from keepleft.nn.attention import Attention
from keepleft.nn.position import Sinusoidal, sinusoidal_encoding

DTYPES = ("float32", "int8")


class PrepackedLMHead(nn.Module):
    """A head over the vocabulary, tied or not, on a packed matrix: (…, dim) → (…, V)"""

    def __init__(self, head: LMHeadLayer | MaskedLMHeadLayer, product: PrepackedLinear) -> None:
        super().__init__()
        self.head, self.product = head, product

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return self.product(self.head.transform(x))  # type: ignore[no-any-return]

    def transform(self, x: Tensor) -> Tensor:
        """What meets the matrix: (…, dim) → (…, dim)"""
        return self.head.transform(x)

    def output_weight(self, table: nn.Embedding) -> tuple[Tensor, Tensor | None]:
        """(V, dim) and, where there is one, (V,) bias; as they were before they were packed"""
        return self.head.output_weight(table)


class SinusoidTable:
    """The waves of positions looked up in a table, which grows where it must."""

    def __init__(self, dim: int, length: int) -> None:
        self.table = sinusoidal_encoding(torch.arange(length), dim)

    def __call__(self, positions: Tensor, dim: int) -> Tensor:
        if (max_position := int(positions.max())) >= len(self.table):
            self.table = sinusoidal_encoding(torch.arange(2 * max_position), dim)
        return nn.functional.embedding(positions, self.table)


@torch.no_grad()
def prepack(model: ModelT, dtype: Literal["float32", "int8"] = "float32", *, compiled: bool = False) -> ModelT:
    """The same model for inference alone, on a CPU: same doors, same scores, quicker steps. The given one stays as it is.

    "float32" scores alike to rounding. "int8" takes a quarter of the memory traffic: weights are rounded with a scale for
    each output, what meets them with one scale for the whole batch, so a row's scores depend a little on its neighbours.
    Embeddings and norms are shared with the given model. Where PyTorch lacks the kernels, the layers stay plain, with a
    warning. `compiled`: what writes texts compiles its step, which takes a minute for each shape (rows, beams, length to the
    next 128) in each process: for a model that writes long or much.
    """
    checks.check_choice("dtype", dtype, DTYPES)
    if compiled and find_cxx_compiler() is None:
        raise ValueError("a compiled step needs a C++ compiler, and there is none: install g++, or leave compiled out")
    for name, weight in model.named_parameters():
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(f"{name} is {weight.dtype} on {weight.device}: only float32 weights on a CPU can be packed, "
                             "model.float().cpu() makes them so")
    if any(isinstance(module, PrepackedLinear) for module in model.modules()):
        raise ValueError("the model is packed already: pack the model that it was packed from")
    out = share_weights(model).eval()
    for module in out.modules():
        if isinstance(module, Attention):
            module.config = replace(module.config, dropout=0.0)
        elif isinstance(module, Embed) and isinstance(model.design.position, Sinusoidal):
            module.sinusoids = SinusoidTable(model.design.dim, model.design.position.length)
    dropouts = [name for name, module in out.named_modules() if isinstance(module, nn.Dropout)]
    for name in dropouts:
        out.set_submodule(name, nn.Identity())
    linear_kind: str = dtype if not compiled else "open8" if dtype == "int8" else "plain"  # a compiler lays float32 out itself
    out.compiled = compiled
    if (missing_kernel := unsupported_reason(dtype)) is not None:
        warnings.warn(f"this PyTorch has no {missing_kernel} to pack {dtype} with: the layers stay as they are", stacklevel=3)
        linear_kind = "plain"
    for name, module in list(out.named_modules()):
        if isinstance(module, nn.Linear):
            out.set_submodule(name, prepack_linear(linear_kind, module.weight, module.bias))
    if isinstance(out.head, LMHeadLayer | MaskedLMHeadLayer):
        out.head = PrepackedLMHead(out.head, prepack_linear(linear_kind, *out.head.output_weight(out.token)))
    return out
