"""What a call is made of: how often attention is computed, and in which precision."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FUSED_ATTENTION_OPS = ("_softmax", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")


def op_name(func: Any) -> str:
    """The bare name of an operation: softmax for aten::softmax.int"""
    name: str = func.name().partition("::")[2].partition(".")[0]
    return name


class OpCounter(TorchDispatchMode):
    """Counts while calls are made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attentions = 0
        self.has_low_precision = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op_name(func)
        if "scaled_dot_product" in name or name in _FUSED_ATTENTION_OPS:
            self.num_attentions += 1
        out = func(*args, **(kwargs or {}))
        if (
            isinstance(out, Tensor)
            and out.dtype in (torch.float32, torch.bfloat16, torch.float16)
            and out.dim() > 1
        ):
            self.has_low_precision = True
        return out
