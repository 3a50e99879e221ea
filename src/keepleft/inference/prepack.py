"""Prepacked copies of a model for fast inference on a CPU, in float32 or int8."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from keepleft import checks
from keepleft.inference.compile import find_cxx_compiler
from keepleft.inference.int8_linear import PrepackedLinear, prepack_linear, unsupported_reason
from keepleft.models.build import ModelT, share_weights
from keepleft.models.embedding import Embed
from keepleft.models.heads import LMHeadLayer, MaskedLMHeadLayer
from keepleft.nn.attention import Attention
from keepleft.nn.position import Sinusoidal, sinusoidal_encoding

DTYPES = ("float32", "int8")


class PrepackedLMHead(nn.Module):
    """An LM head, tied or not, on a prepacked matrix: (…, dim) → (…, V)"""

    def __init__(self, head: LMHeadLayer | MaskedLMHeadLayer, product: PrepackedLinear) -> None:
        super().__init__()
        self.head = head
        self.product = product

    def forward(self, x: Tensor, table: nn.Embedding, segments: Tensor | None = None) -> Tensor:
        return self.product(self.head.transform(x))  # type: ignore[no-any-return]

    def transform(self, x: Tensor) -> Tensor:
        """The hidden state just before the output matrix: (…, dim) → (…, dim)"""
        return self.head.transform(x)

    def output_weight(self, table: nn.Embedding) -> tuple[Tensor, Tensor | None]:
        """(V, dim) weight and (V,) bias or None, as they were before packing"""
        return self.head.output_weight(table)


class SinusoidTable:
    """Sinusoidal positions looked up in a table, which grows on demand."""

    def __init__(self, dim: int, length: int) -> None:
        self.table = sinusoidal_encoding(torch.arange(length), dim)

    def __call__(self, positions: Tensor, dim: int) -> Tensor:
        if (max_position := int(positions.max())) >= len(self.table):
            self.table = sinusoidal_encoding(torch.arange(2 * max_position), dim)
        return nn.functional.embedding(positions, self.table)


@torch.no_grad()
def prepack(
    model: ModelT, dtype: Literal["float32", "int8"] = "float32", *, compiled: bool = False
) -> ModelT:
    """A copy of the model for inference on a CPU: the same interface and logits, faster steps.

    "float32" agrees up to rounding. "int8" takes a quarter of the memory traffic: weights are rounded with a
    scale per output channel, activations with one scale for the whole batch, so a row's logits depend a
    little on its neighbours. Embeddings and norms are shared with the given model, which stays as it is.
    Where PyTorch lacks the kernels, layers stay plain, with a warning. `compiled` compiles the decode step,
    which takes about a minute for each shape (rows, beams, length rounded up to 128) in each process: worth
    it for long or many generations.
    """
    checks.check_choice("dtype", dtype, DTYPES)
    if compiled and find_cxx_compiler() is None:
        raise ValueError(
            "a compiled step needs a C++ compiler, and there is none: install g++, or leave compiled out"
        )
    for name, weight in model.named_parameters():
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            raise ValueError(
                f"{name} is {weight.dtype} on {weight.device}: only float32 weights on a CPU can be packed, "
                "model.float().cpu() makes them so"
            )
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
    # the compiler packs float32 itself
    linear_kind: str = dtype if not compiled else "int8_compilable" if dtype == "int8" else "plain"
    out.compiled = compiled
    if (missing_kernel := unsupported_reason(dtype)) is not None:
        warnings.warn(
            f"this PyTorch has no {missing_kernel} to pack {dtype} with: the layers stay as they are",
            stacklevel=3,
        )
        linear_kind = "plain"
    for name, module in list(out.named_modules()):
        if isinstance(module, nn.Linear):
            out.set_submodule(name, prepack_linear(linear_kind, module.weight, module.bias))
    if isinstance(out.head, LMHeadLayer | MaskedLMHeadLayer):
        out.head = PrepackedLMHead(out.head, prepack_linear(linear_kind, *out.head.output_weight(out.token)))
    return out
