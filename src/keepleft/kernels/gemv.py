"""GEMV and skinny GEMM in Triton: one or a few rows times a matrix, with the activation or residual in the
same kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepleft.kernels.add_norm import PendingResidual
from keepleft.kernels.triton_compat import (
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    next_power_of_2,
    pdl_kwargs,
    tl,
)

MAX_FUSED_ROWS = 128  # rows up to which a linear layer and what follows it are one kernel
ACTIVATION_IDS = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}  # 0: none


def linear_activation(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    residual: Tensor | None = None,
    activation_id: int = 0,
    gated: bool = False,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """activation(x Wᵀ + b), or residual + x Wᵀ + b, for a few rows: (R, inputs) → (R, outputs)"""
    rows, inputs = x.shape
    outputs = weight.shape[0] // (2 if gated else 1)
    out = torch.empty(rows, outputs, dtype=x.dtype if dtype is None else dtype, device=x.device)
    or_placeholder = lambda tensor: x if tensor is None else tensor
    arguments = (x, weight, or_placeholder(bias), or_placeholder(residual), out, outputs, inputs, scale)
    flags = (bias is not None, residual is not None, activation_id, gated, x.is_cuda)
    if rows == 1:
        block, block_inputs, warps = gemv_config(outputs, inputs, gated)
        _gemv_kernel[(cdiv(outputs, block),)](
            *arguments, *flags, block, block_inputs, num_warps=warps, **pdl_kwargs(x)
        )
    else:
        _launch_skinny_gemm(x, weight, arguments, rows, flags, out, 1)
    return out


def linear_add(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The residual x with y Wᵀ + b pending: programs compute partial sums, which the next norm adds."""
    rows, inputs = y.shape
    if rows == 1:
        return linear_activation(y, weight, bias, residual=x)
    splits = max(1, min(4, inputs // 768))
    out = torch.empty(splits, rows, len(weight), dtype=torch.float32, device=y.device)
    arguments = (y, weight, y if bias is None else bias, y, out, len(weight), inputs, 1.0)
    _launch_skinny_gemm(
        y, weight, arguments, rows, (bias is not None, False, 0, False, y.is_cuda), out, splits
    )
    return PendingResidual(x, out)


def _launch_skinny_gemm(
    x: Tensor,
    weight: Tensor,
    arguments: tuple[Any, ...],
    rows: int,
    flags: tuple[Any, ...],
    out: Tensor,
    splits: int,
) -> None:
    outputs = out.shape[-1]
    inputs = x.shape[1]
    padded_rows = max(16, next_power_of_2(rows))
    block, block_inputs, warps, stages = skinny_gemm_config(
        outputs, inputs // splits, padded_rows, weight.element_size()
    )
    inputs_per_split = cdiv(cdiv(inputs, splits), block_inputs) * block_inputs
    _skinny_gemm_kernel[(cdiv(outputs, block), splits)](
        *arguments,
        rows,
        inputs_per_split,
        *flags,
        padded_rows,
        block,
        block_inputs,
        128 // weight.element_size(),
        outputs * inputs < 1 << 23,
        num_warps=warps,
        num_stages=stages,
        **pdl_kwargs(x),
    )


def gemv_config(outputs: int, inputs: int, gated: bool) -> tuple[int, int, int]:
    """Outputs per program, inputs read at a time, and warps: found by trial on an H200."""
    if outputs * inputs >= 1 << 23:
        if inputs >= 2048:
            return (2, 2048, 4) if gated else (2, 2048, 2) if outputs >= 1 << 14 else (4, 1024, 4)
        return (8 if inputs <= 512 else 4), 512, 2
    return (4, next_power_of_2(inputs), 2) if inputs <= 1024 else (2, min(4096, next_power_of_2(inputs)), 2)


def skinny_gemm_config(
    outputs: int, inputs: int, padded_rows: int, element_size: int
) -> tuple[int, int, int, int]:
    """The same for several rows, and the pipeline stages; 4-byte weights take twice the shared memory."""
    block_inputs = max(
        64, min(next_power_of_2(inputs), 256 if padded_rows <= 32 else 128) * 2 // element_size
    )
    if outputs > 8192:
        return 64, max(64, block_inputs // 2), 4, 3
    return (
        (16, block_inputs, 4, 3) if outputs < 1024 else (32, block_inputs, 4, 5 if padded_rows <= 32 else 3)
    )


@jit
def _apply_activation(y, activation_id: tl.constexpr):
    if activation_id == 1:
        y = tl.maximum(y, 0.0)
    elif activation_id == 2:
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif activation_id == 3:
        inner = 0.7978845608028654 * (y + 0.044715 * y * y * y)
        y = y * tl.sigmoid(2.0 * inner)
    elif activation_id == 4:
        y = y * tl.sigmoid(y)
    return y


@jit
def _prefetch(pointers):
    """Prefetch the cache line that a pointer points to into L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def _gemv_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    outputs,
    inputs,
    scale,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    activation_id: tl.constexpr,
    gated: tl.constexpr,
    use_pdl: tl.constexpr,
    block: tl.constexpr,
    block_inputs: tl.constexpr,
):
    n = tl.program_id(0) * block + tl.arange(0, block)
    output_mask = n < outputs
    lane = tl.arange(0, block_inputs)
    weight_pointers = weight + n[:, None].to(tl.int64) * inputs + lane[None, :]
    up_offset = outputs.to(tl.int64) * inputs if gated else 0
    if use_pdl:
        gdc_launch_dependents()
    mask = output_mask[:, None] & (lane < inputs)[None, :]
    w = tl.load(weight_pointers, mask=mask, other=0.0)  # weights can be read before x is there
    u = tl.load(weight_pointers + up_offset, mask=mask, other=0.0) if gated else w
    if use_pdl:
        gdc_wait()
    sums = tl.zeros([block, block_inputs], tl.float32)
    up_sums = tl.zeros([block, block_inputs], tl.float32)
    for begin in range(0, inputs, block_inputs):
        k = begin + lane
        a = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        next_mask = output_mask[:, None] & (k + block_inputs < inputs)[None, :]
        weight_pointers += block_inputs
        w_next = tl.load(weight_pointers, mask=next_mask, other=0.0)
        u_next = tl.load(weight_pointers + up_offset, mask=next_mask, other=0.0) if gated else w_next
        sums += w.to(tl.float32) * a[None, :]
        if gated:
            up_sums += u.to(tl.float32) * a[None, :]
        w = w_next
        u = u_next
    y = tl.sum(sums, 1) * scale
    if has_bias:
        y += tl.load(bias + n, mask=output_mask, other=0.0).to(tl.float32)
    y = _apply_activation(y, activation_id)
    if gated:
        z = tl.sum(up_sums, 1) * scale
        if has_bias:
            z += tl.load(bias + outputs + n, mask=output_mask, other=0.0).to(tl.float32)
        y *= z
    if has_residual:
        y += tl.load(residual + n, mask=output_mask, other=0.0).to(tl.float32)
    tl.store(out + n, y.to(out.dtype.element_ty), mask=output_mask)


@jit
def _skinny_gemm_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    outputs,
    inputs,
    scale,
    rows,
    inputs_per_split,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    activation_id: tl.constexpr,
    gated: tl.constexpr,
    use_pdl: tl.constexpr,
    padded_rows: tl.constexpr,
    block: tl.constexpr,
    block_inputs: tl.constexpr,
    line_elements: tl.constexpr,
    use_prefetch: tl.constexpr,
):
    n = tl.program_id(0) * block + tl.arange(0, block)
    output_mask = n < outputs
    r = tl.arange(0, padded_rows)
    row_mask = r < rows
    lane = tl.arange(0, block_inputs)
    weight_pointers = weight + n[None, :].to(tl.int64) * inputs + lane[:, None]
    x_pointers = x + r[:, None] * inputs + lane[None, :]
    up_offset = outputs.to(tl.int64) * inputs if gated else 0
    split = tl.program_id(1)
    start = split * inputs_per_split
    stop = tl.minimum(start + inputs_per_split, inputs)
    if use_pdl:
        gdc_launch_dependents()
        if use_prefetch:  # weights into L2 before x is there
            line_offsets = tl.arange(0, block_inputs // line_elements) * line_elements
            for begin in range(start, stop, block_inputs):
                _prefetch(
                    tl.where(
                        output_mask[None, :] & (begin + line_offsets < stop)[:, None],
                        weight + n[None, :].to(tl.int64) * inputs + line_offsets[:, None] + begin,
                        weight,
                    )
                )
        gdc_wait()
    sums = tl.zeros([padded_rows, block], tl.float32)
    up_sums = tl.zeros([padded_rows, block], tl.float32)
    for begin in range(start, stop, block_inputs):
        remaining = stop - begin
        w = tl.load(
            weight_pointers + begin, mask=output_mask[None, :] & (lane < remaining)[:, None], other=0.0
        )
        a = tl.load(x_pointers + begin, mask=row_mask[:, None] & (lane < remaining)[None, :], other=0.0)
        sums = tl.dot(a, w, sums, input_precision="ieee")
        if gated:
            u = tl.load(
                weight_pointers + up_offset + begin,
                mask=output_mask[None, :] & (lane < remaining)[:, None],
                other=0.0,
            )
            up_sums = tl.dot(a, u, up_sums, input_precision="ieee")
    y = sums * scale
    if has_bias:
        y += tl.load(bias + n, mask=output_mask & (split == 0), other=0.0).to(tl.float32)[None, :]
    y = _apply_activation(y, activation_id)
    if gated:
        z = up_sums * scale
        if has_bias:
            z += tl.load(bias + outputs + n, mask=output_mask, other=0.0).to(tl.float32)[None, :]
        y *= z
    mask = row_mask[:, None] & output_mask[None, :]
    offsets = r[:, None] * outputs + n[None, :]
    tl.store(out + split * rows * outputs + offsets, y.to(out.dtype.element_ty), mask=mask)
