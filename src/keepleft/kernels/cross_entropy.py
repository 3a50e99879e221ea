"""Cross-entropy of a chunk of logits in Triton: loss and gradient in one pass, in place, before they leave
the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.kernels.triton_compat import jit, tl

BLOCK_SIZE, NUM_WARPS = 2048, 8


def cross_entropy_chunk(logits: Tensor, targets: Tensor, label_smoothing: float, needs_grad: bool) -> Tensor:
    """(n, V) logits → (3,) loss, cross-entropy and number correct.

    With `needs_grad` the logits are overwritten by their gradient.
    """
    out = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _cross_entropy_kernel[(len(logits),)](
        logits,
        targets,
        out,
        logits.stride(0),
        *logits.shape,
        label_smoothing,
        label_smoothing > 0,
        needs_grad,
        BLOCK_SIZE,
        num_warps=NUM_WARPS,
    )
    return out.sum(1)


@jit
def _cross_entropy_kernel(
    logits,
    targets,
    out,
    stride,
    rows,
    vocab,
    label_smoothing,
    has_smoothing: tl.constexpr,
    needs_grad: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    target = tl.load(targets + row)
    logits += row.to(tl.int64) * stride
    lane = tl.arange(0, block)
    if target < 0:  # ignored position
        tl.store(out + row, 0.0)
        tl.store(out + rows + row, 0.0)
        tl.store(out + 2 * rows + row, 0.0)
        if needs_grad:
            for begin in range(0, vocab, block):
                columns = begin + lane
                tl.store(logits + columns, tl.zeros([block], logits.dtype.element_ty), mask=columns < vocab)
    else:
        # each lane keeps its own maximum, its index, and the sum of exp(logit - maximum): one exp per logit
        lane_max = tl.full([block], -1e30, tl.float32)
        lane_argmax = tl.zeros([block], tl.int32)
        exp_sum = tl.zeros([block], tl.float32)
        logit_sum = tl.zeros([block], tl.float32)
        for begin in range(0, vocab, block):
            columns = begin + lane
            logit = tl.load(
                logits + columns, mask=columns < vocab, other=float("-inf"), eviction_policy="evict_last"
            ).to(tl.float32)
            if has_smoothing:
                logit_sum += tl.where(columns < vocab, logit, 0.0)
            is_higher = logit > lane_max
            rescale = tl.exp(-tl.abs(logit - lane_max))
            exp_sum = tl.where(is_higher, exp_sum * rescale + 1.0, exp_sum + rescale)
            lane_argmax = tl.where(is_higher, columns, lane_argmax)
            lane_max = tl.maximum(lane_max, logit)
        max_logit = tl.max(lane_max, 0)
        logsumexp = max_logit + tl.log(tl.sum(exp_sum * tl.exp(lane_max - max_logit), 0))
        prediction = tl.min(tl.where(lane_max == max_logit, lane_argmax, vocab), 0)
        target_logit = tl.load(logits + target).to(tl.float32)
        cross_entropy = logsumexp - target_logit
        tl.store(
            out + row,
            (1.0 - label_smoothing) * cross_entropy
            + label_smoothing * (logsumexp - tl.sum(logit_sum, 0) / vocab),
        )
        tl.store(out + rows + row, cross_entropy)
        tl.store(out + 2 * rows + row, (prediction == target).to(tl.float32))
        if needs_grad:
            tl.debug_barrier()  # the target's logit is read before it is overwritten
            for begin in range(0, vocab, block):
                columns = begin + lane
                logit = tl.load(
                    logits + columns, mask=columns < vocab, other=float("-inf"), eviction_policy="evict_first"
                ).to(tl.float32)
                grad = (
                    tl.exp(logit - logsumexp)
                    - label_smoothing / vocab
                    - tl.where(columns == target, 1.0 - label_smoothing, 0.0)
                )
                tl.store(logits + columns, grad.to(logits.dtype.element_ty), mask=columns < vocab)
