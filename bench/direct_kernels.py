"""PyTorch's attention kernels called directly, by an expert who knows the workload: the peers of attend()."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attention_workloads import Workload


class DirectKernel(NamedTuple):
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    to_layout: Callable[[Tensor], Tensor]  # (B, H, T, D) → the memory layout the kernel prefers; not timed


def direct_kernel(backend: str, workload: Workload, device: str) -> DirectKernel:
    return {"sdpa": _sdpa, "flex": _flex, "varlen": _varlen}[backend](workload, device)


def _identity(x: Tensor) -> Tensor:
    return x


def _sdpa(workload: Workload, device: str) -> DirectKernel:
    """is_causal, or a boolean mask made beforehand."""
    if workload.window is None and workload.segments is None:
        return DirectKernel(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _identity
        )
    positions = torch.arange(workload.length, device=device)
    mask = (positions <= positions[:, None])[None, None]
    if workload.window is not None:
        mask = mask & (positions[:, None] - positions < workload.window)
    if workload.segments is not None:
        segments = workload.segments[:, None]
        mask = mask & (segments[..., None] == segments[..., None, :]) & (segments[..., None, :] != 0)
    return DirectKernel(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), _identity)


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(workload: Workload, device: str) -> DirectKernel:
    """FlexAttention with a mask_mod written for the workload, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window_size, segments = workload.window, workload.segments

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i

    def sliding_window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (i - j < window_size)

    def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (segments[b, i] == segments[b, j]) & (segments[b, j] != 0)

    mask_mod = same_document if segments is not None else causal if window_size is None else sliding_window
    batch = None if segments is None else workload.batch
    block_mask = create_block_mask(mask_mod, batch, None, workload.length, workload.length, device=device)
    kernel = _compiled_flex() if device == "cuda" else flex_attention
    return DirectKernel(lambda q, k, v: kernel(q, k, v, block_mask=block_mask), _identity)


def _varlen(workload: Workload, device: str) -> DirectKernel:
    """Variable-length attention over tokens that are contiguous without padding from the start."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any]
    if "window_size" in parameters:
        options = {"window_size": (-1 if workload.window is None else workload.window - 1, 0)}
    elif workload.window is None:
        options = {"is_causal": True}
    else:
        raise ValueError("variable-length attention of this PyTorch has no sliding window")
    if workload.segments is None:
        is_token, lengths = slice(None), torch.full((workload.batch,), workload.length, device=device)
    else:
        is_token = (workload.segments != 0).flatten()
        lengths = torch.cat(
            [row[row != 0].unique_consecutive(return_counts=True)[1] for row in workload.segments]
        )
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    max_length = int(lengths.max())

    def to_layout(x: Tensor) -> Tensor:
        tokens = x.detach().transpose(1, 2).flatten(0, 1)[is_token]
        return tokens.contiguous().requires_grad_(x.requires_grad)

    return DirectKernel(
        lambda q, k, v: varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_length, max_length, **options),
        to_layout,
    )
