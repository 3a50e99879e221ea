"""Top-k with logsumexp: the k highest logits of each row, their indices, and the log of the sum of
exponentials of all.

A library sorts, or reads all logits several times; here the maximum of each block is found first, in one
pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.kernels.triton_compat import cdiv, jit, lacks_triton, next_power_of_2, tl

CPU_BLOCK = 64  # on a CPU: logits per block, whose maximum is found first
ARGMAX_BLOCK = 4096
TOPK_BLOCK = 1024  # on a GPU: logits that one program reads, for k = 1 or more
MAX_K = 64  # largest k of the Triton kernels


class TopK(NamedTuple):
    values: Tensor  # (R, k), highest first
    tokens: Tensor  # (R, k)
    logsumexp: Tensor  # (R,) over all logits; undefined without `with_logsumexp`


def topk_logsumexp(logits: Tensor, k: int, *, with_logsumexp: bool = True) -> TopK:
    """(R, V) → the k highest of each row; of equal ones the first. NaN is never chosen."""
    k = min(k, logits.shape[1])
    if logits.is_cuda and logits.dtype != torch.float64 and k <= MAX_K and not lacks_triton(logits.device):
        return topk_triton(logits, k)
    logits = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
    top = logits.topk(k) if logits.is_cuda or logits.shape[1] < 4 * CPU_BLOCK * k else topk_blocked(logits, k)
    return TopK(*top, logits.logsumexp(-1) if with_logsumexp else top[0])


def topk_blocked(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Top-k by blocks: a block that holds one of the k highest has one of the k highest maxima."""
    vocab = logits.shape[1]
    aligned = vocab - vocab % CPU_BLOCK
    blocks = logits[:, :aligned].unflatten(1, (-1, CPU_BLOCK))
    block_max = blocks.amax(-1)
    block_ids = block_max.argmax(-1, keepdim=True) if k == 1 else block_max.topk(k).indices
    candidates = blocks.gather(1, block_ids[..., None].expand(-1, -1, CPU_BLOCK)).flatten(1)
    if aligned < vocab:
        candidates = torch.cat([candidates, logits[:, aligned:]], 1)
    values, index = candidates.max(-1, keepdim=True) if k == 1 else candidates.topk(k)
    block_index = index.clamp(max=k * CPU_BLOCK - 1)
    tokens = block_ids.gather(1, block_index // CPU_BLOCK) * CPU_BLOCK + block_index % CPU_BLOCK
    if aligned < vocab:
        tokens = torch.where(index < k * CPU_BLOCK, tokens, index - k * CPU_BLOCK + aligned)
    return values, tokens


def topk_triton(logits: Tensor, k: int) -> TopK:
    """On a GPU: each program finds the k highest of its split, a second kernel those of all splits."""
    rows, vocab = logits.shape
    block = ARGMAX_BLOCK if k == 1 else TOPK_BLOCK
    splits = cdiv(vocab, block)
    empty = lambda *shape, dtype=torch.float32: torch.empty(*shape, dtype=dtype, device=logits.device)
    out = TopK(empty(rows, k), empty(rows, k, dtype=torch.long), empty(rows))
    if splits == 1:
        _topk_split_kernel[(rows, 1)](
            logits,
            *out,
            vocab,
            logits.stride(0),
            1,
            k,
            next_power_of_2(vocab),
            True,
            num_warps=1 if vocab <= 256 else 4,
        )
        return out
    split_values = empty(rows, splits, k)
    split_tokens = empty(rows, splits, k, dtype=torch.int32)
    split_sums = empty(rows, splits, 2)
    _topk_split_kernel[(rows, splits)](
        logits,
        split_values,
        split_tokens,
        split_sums,
        vocab,
        logits.stride(0),
        splits,
        k,
        block,
        False,
        num_warps=4 if k == 1 else 1,
    )
    _topk_combine_kernel[(rows,)](
        split_values,
        split_tokens,
        split_sums,
        *out,
        splits,
        k,
        next_power_of_2(splits * k),
        next_power_of_2(splits),
        num_warps=1,
    )
    return out


@jit
def _topk_split_kernel(
    logits,
    split_values,
    split_tokens,
    split_sums,
    vocab,
    stride,
    splits,
    k: tl.constexpr,
    block: tl.constexpr,
    single_split: tl.constexpr,
):
    row = tl.program_id(0)
    split = tl.program_id(1)
    lane = tl.arange(0, block)
    columns = split * block + lane
    x = tl.load(logits + row.to(tl.int64) * stride + columns, mask=columns < vocab, other=float("-inf")).to(
        tl.float32
    )
    max_logit = tl.max(x, 0)
    finite_max = tl.maximum(max_logit, -3.0e38)
    out = row * splits + split
    exp_sum = tl.sum(tl.exp(x - finite_max), 0)
    if single_split:
        tl.store(split_sums + out, finite_max + tl.log(exp_sum))
    else:
        tl.store(split_sums + out * 2, finite_max)
        tl.store(split_sums + out * 2 + 1, exp_sum)
    # padding is never chosen, not even where every logit is -∞
    x = tl.where(columns < vocab, x, float("nan"))
    for n in range(k):
        max_logit = tl.max(tl.where(x == x, x, float("-inf")), 0)
        index = tl.min(tl.where(x == max_logit, lane, block), 0)
        tl.store(split_values + out * k + n, tl.where(index < block, max_logit, float("nan")))
        tl.store(
            split_tokens + out * k + n,
            (split * block + tl.minimum(index, block - 1)).to(split_tokens.dtype.element_ty),
        )
        x = tl.where(lane == index, float("nan"), x)


@jit
def _topk_combine_kernel(
    split_values,
    split_tokens,
    split_sums,
    values,
    tokens,
    logsumexp,
    splits,
    k: tl.constexpr,
    block: tl.constexpr,
    padded_splits: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, padded_splits)
    split_max = tl.load(split_sums + (row * splits + lane) * 2, mask=lane < splits, other=float("-inf"))
    exp_sum = tl.load(split_sums + (row * splits + lane) * 2 + 1, mask=lane < splits, other=0.0)
    max_logit = tl.max(split_max, 0)
    tl.store(logsumexp + row, max_logit + tl.log(tl.sum(exp_sum * tl.exp(split_max - max_logit), 0)))
    candidate = tl.arange(0, block)
    in_range = candidate < splits * k
    x = tl.load(split_values + row * splits * k + candidate, mask=in_range, other=float("nan"))
    token = tl.load(split_tokens + row * splits * k + candidate, mask=in_range, other=0)
    for n in range(k):
        top_value = tl.max(tl.where(x == x, x, float("-inf")), 0)
        index = tl.min(tl.where(x == top_value, candidate, block), 0)
        tl.store(values + row * k + n, top_value)
        tl.store(tokens + row * k + n, tl.sum(tl.where(candidate == index, token, 0), 0).to(tl.int64))
        x = tl.where(candidate == index, float("nan"), x)
