"""Linear layers whose weights were laid out once for a CPU: as they are, or rounded to 8 bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 1 << 20  # weights from which a packed matrix is quicker than a plain one, in spite of the dearer call
WIDE = 4096      # outputs from which oneDNN's 8-bit product is quicker than FBGEMM's
ENGINES = frozenset(torch.backends.quantized.supported_engines)
# without these instructions sums of two 8-bit products may overflow, and what comes in is rounded to 7 bits
VNNI: bool = getattr(torch.cpu, "_is_vnni_supported", lambda: False)()


class Fixed(nn.Module):
    """What all packed layers share: they say no to training and to saving. (…, in) → (…, out)"""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.training = False

    def train(self, mode: bool = True) -> Fixed:
        if mode:
            raise RuntimeError("a packed model cannot learn: train the model that it was packed from, and pack it again")
        return self

    def _save_to_state_dict(self, *given: object) -> None:
        raise RuntimeError("a packed model has no weights to save: save the model that it was packed from")

    def hold(self, **tensors: Tensor | None) -> None:
        """Keep tensors where a compiler takes them for what never changes."""
        for name, tensor in tensors.items():
            self.register_buffer(name, None if tensor is None else tensor.detach(), persistent=False)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class Plain(Fixed):
    """float32 as it was."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        self.hold(weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Packed32(Plain):
    """float32 through oneDNN, in blocks laid out once; a single row reads each weight once anyway and needs no blocks."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight, bias)
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.in_features:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.blocks, self.bias, "none", [], "")  # type: ignore[no-any-return]


class Packed8(Fixed):
    """8 bits: a scale for each output in the weights, one for all of x in what comes in, sums in whole numbers."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        weight = weight.detach()
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        with _engine("onednn" if len(weight) >= WIDE else "fbgemm"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel")
            rounded = torch.quantize_per_channel(weight, scales.double(), torch.zeros(len(weight), dtype=torch.long), 0,
                                                 torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic(x, self.packed, not VNNI)  # type: ignore[no-any-return]


class Open8(Fixed):
    """8 bits for compilers, which see all of it: a scale for each output in the weights, and for each row in what comes in."""

    blocks: Tensor
    scales: Tensor
    zeros: Tensor
    one: Tensor
    middle: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight)
        weight = weight.detach()
        scales = (weight.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        rounded = (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        self.hold(blocks=torch.ops.onednn.qlinear_prepack(rounded, None), scales=scales, one=torch.ones(1), bias=bias,
                  zeros=torch.zeros(len(weight), dtype=torch.int32), middle=torch.tensor([128], dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) * (1 / 127)
        whole = ((x / size).round() + 128).to(torch.uint8)
        y = torch.ops.onednn.qlinear_pointwise.tensor(whole, self.one, self.middle, self.blocks, self.scales, self.zeros, None,
                                                      1.0, 0, torch.float32, "none", [], "") * size
        return y if self.bias is None else y + self.bias


def packed(dtype: str, weight: Tensor, bias: Tensor | None) -> Fixed:
    """The quickest layer for a matrix of this size."""
    if dtype in ("int8", "open8"):
        return (Packed8 if dtype == "int8" else Open8)(weight, bias)
    return (Packed32 if dtype == "float32" and weight.numel() >= LARGE else Plain)(weight, bias)


def missing(dtype: str) -> str | None:
    """What PyTorch lacks here to pack so, in words; None where it lacks nothing."""
    if dtype == "float32":
        return None if torch.backends.mkldnn.is_available() else "oneDNN"
    return " and no ".join(sorted({"fbgemm", "onednn"} - ENGINES)) or None


@contextmanager
def _engine(name: str) -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before
