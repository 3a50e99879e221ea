"""Linear layers for a CPU: weights quantized to int8, or prepacked in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# weights from which a prepacked matrix is faster than a plain one, although the call costs more
MIN_PREPACKED_WEIGHTS = 1 << 20
MIN_ONEDNN_OUTPUTS = 4096  # outputs from which oneDNN's int8 product is faster than FBGEMM's
QUANTIZED_ENGINES = frozenset(torch.backends.quantized.supported_engines)


class PrepackedLinear(nn.Module):
    """Common to all prepacked layers: no training, no saving. (…, in) → (…, out)"""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.training = False

    def train(self, mode: bool = True) -> PrepackedLinear:
        if mode:
            raise RuntimeError(
                "a packed model cannot learn: train the model that it was packed from, and pack it again"
            )
        return self

    def _save_to_state_dict(self, *args: object) -> None:
        raise RuntimeError("a prepacked model has no weights to save: save the model that it was packed from")

    def __deepcopy__(self, memo: dict[int, object]) -> PrepackedLinear:
        """A layer that never changes is its own copy."""
        return self

    def register_constants(self, **tensors: Tensor | None) -> None:
        """Register tensors as buffers that a compiler may treat as constants."""
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach(), persistent=False)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class PlainLinear(PrepackedLinear):
    """float32 weights as they were: what is left where packing does not pay."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.register_constants(weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class OneDNNLinear(PlainLinear):
    """float32 through oneDNN with blocked weights; a single row reads each weight once anyway and takes the
    plain product.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed_weight = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.in_features:
            return F.linear(x, self.weight, self.bias)
        linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise
        return linear(x, self.packed_weight, self.bias, "none", [], "")


class Int8Linear(PrepackedLinear):
    """int8 by FBGEMM: a scale per output channel for weights, one scale for all of x, int32 accumulation."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        weight = weight.detach()
        scales = (weight.abs().amax(1) / weight_levels()).clamp(min=torch.finfo(torch.float32).tiny)
        with (
            _quantized_engine("onednn" if len(weight) >= MIN_ONEDNN_OUTPUTS else "fbgemm"),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel")
            quantized = torch.quantize_per_channel(
                weight, scales.double(), torch.zeros(len(weight), dtype=torch.long), 0, torch.qint8
            )
            self.packed_weight = torch.ops.quantized.linear_prepack(
                quantized, None if bias is None else bias.detach()
            )

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed_weight, False)  # type: ignore[no-any-return]


class CompilableInt8Linear(PrepackedLinear):
    """int8 that torch.compile can trace: a scale per output channel for weights and one per row for
    activations.
    """

    blocks: Tensor
    scales: Tensor
    zeros: Tensor
    one: Tensor
    middle: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        weight = weight.detach()
        scales = (weight.abs().amax(1) / weight_levels()).clamp(min=torch.finfo(torch.float32).tiny)
        quantized = (weight / scales[:, None]).round().to(torch.int8)
        self.register_constants(
            blocks=torch.ops.onednn.qlinear_prepack(quantized, None),
            scales=scales,
            one=torch.ones(1),
            bias=bias,
            zeros=torch.zeros(len(weight), dtype=torch.int32),
            middle=torch.tensor([128], dtype=torch.int32),
        )

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * (1 / 127)
        quantized = ((x / scale).round() + 128).to(torch.uint8)
        y = (
            torch.ops.onednn.qlinear_pointwise.tensor(
                quantized,
                self.one,
                self.middle,
                self.blocks,
                self.scales,
                self.zeros,
                None,
                1.0,
                0,
                torch.float32,
                "none",
                [],
                "",
            )
            * scale
        )
        return y if self.bias is None else y + self.bias


def prepack_linear(dtype: str, weight: Tensor, bias: Tensor | None) -> PrepackedLinear:
    """The fastest layer for a matrix of this size."""
    if dtype in ("int8", "int8_compilable"):
        return (Int8Linear if dtype == "int8" else CompilableInt8Linear)(weight, bias)
    return (OneDNNLinear if dtype == "float32" and weight.numel() >= MIN_PREPACKED_WEIGHTS else PlainLinear)(
        weight, bias
    )


@cache
def weight_levels() -> int:
    """The largest int8 weight: 127, or 63 where the CPU's int8 products saturate.

    Without VNNI two uint8 x int8 products are added in int16, which overflows. Weights have a scale per
    channel, so they lose less by a missing bit than activations would. The kernels are asked, not the CPU:
    libraries can be told to leave instructions alone.
    """
    ones = torch.ones(16, 64)
    for engine in {"onednn", "fbgemm"} & QUANTIZED_ENGINES:
        with _quantized_engine(engine), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel")
            scales = torch.full((16,), 1 / 127, dtype=torch.double)
            largest = torch.quantize_per_channel(
                ones, scales, torch.zeros(16, dtype=torch.long), 0, torch.qint8
            )
            packed = torch.ops.quantized.linear_prepack(largest, None)
            if (torch.ops.quantized.linear_dynamic(ones[:1], packed, False) - 64).abs().max() > 1:
                return 63
    return 127


def unsupported_reason(dtype: str) -> str | None:
    """Why this PyTorch cannot prepack to `dtype`; None if it can."""
    if dtype == "float32":
        return None if torch.backends.mkldnn.is_available() else "oneDNN"
    return " and no ".join(sorted({"fbgemm", "onednn"} - QUANTIZED_ENGINES)) or None


@contextmanager
def _quantized_engine(name: str) -> Iterator[None]:
    previous = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = previous
