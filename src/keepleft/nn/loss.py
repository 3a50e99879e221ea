"""Chunked linear cross-entropy: the loss of hidden states over a vocabulary, without holding all logits."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100  # a target that counts for nothing

MAX_LOGITS = {"cpu": 1 << 22, "cuda": 1 << 29}  # logits held at a time, unless a chunk size is given


R_DROP_TEMPORARIES = 4  # tensors of the size of the logits that two passes are compared with


class LossSums(NamedTuple):
    """Sums over the targets that are not ignored: divide by their number."""

    loss: Tensor  # what to minimise: label-smoothed
    cross_entropy: Tensor  # without label smoothing and without a gradient
    correct: Tensor  # how often the target had the highest logit


def reference_loss(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
) -> LossSums:
    """The definition of linear_cross_entropy: all logits at once."""
    logits = F.linear(x, weight, bias)
    if r_drop:
        return r_drop_loss(logits.flatten(0, -3), targets.flatten(), label_smoothing, r_drop)
    return classification_loss(logits.flatten(0, -2), targets.flatten(), label_smoothing)


def r_drop_loss(logits: Tensor, labels: Tensor, label_smoothing: float, r_drop: float) -> LossSums:
    """The loss of (N, 2, labels) logits, of two passes that differ in their dropout, against (N,) labels.

    The mean cross-entropy of both passes, and `r_drop` / 4 times the sum of both Kullback-Leibler divergences
    between them: half of what Liang et al. 2021 (arXiv 2106.14448) minimise with alpha = r_drop.
    """
    logits = logits.to(accumulation_dtype(logits.dtype))
    sums = classification_loss(logits.flatten(0, 1), labels.repeat_interleave(2), label_smoothing)
    first, second = logits.log_softmax(-1).unbind(1)
    divergence = ((first.exp() - second.exp()) * (first - second)).sum(-1)
    loss = sums.loss / 2 + r_drop / 4 * (divergence * (labels != IGNORE_INDEX)).sum()
    return LossSums(loss, sums.cross_entropy / 2, sums.correct // 2)


def classification_loss(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> LossSums:
    """Cross-entropy of (N, labels) logits against (N,) labels, where the labels are few."""
    logits = logits.to(accumulation_dtype(logits.dtype))
    loss = F.cross_entropy(
        logits, labels, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )
    detached = logits.detach()
    cross_entropy = (
        F.cross_entropy(detached, labels, ignore_index=IGNORE_INDEX, reduction="sum")
        if label_smoothing
        else loss.detach()
    )
    return LossSums(loss, cross_entropy, (detached.argmax(-1) == labels).sum())


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    label_smoothing: float = 0.0,
    r_drop: float = 0.0,
    chunk: int | None = None,
) -> LossSums:
    """The cross-entropy of F.linear(x, weight, bias) against the targets, a chunk of tokens at a time.

    x: (…, dim) hidden states   weight: (V, dim)   bias: (V,)   targets: (…) integers, IGNORE_INDEX to skip
    With `r_drop`, x is (…, 2, dim), the hidden states of two passes, and the loss is that of `r_drop_loss`.
    The gradients are computed in the forward pass, beside the logits, so that these are neither stored nor
    recomputed. Matrices are multiplied in the type of x, or of autocast; softmax and sums are in float32 at
    least.
    """
    expected_shape = (*targets.shape, 2) if r_drop else targets.shape
    if x.shape[:-1] != expected_shape:
        raise ValueError(
            f"the targets have shape {tuple(targets.shape)}, the hidden states {tuple(x.shape)}: "
            f"one target is needed for each, (…) beside (…, {'2, ' if r_drop else ''}dim)"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing is {label_smoothing}: it must be at least 0 and below 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be a number of tokens, at least 1")
    device = x.device.type
    compute_dtype = (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64
        else x.dtype
    )
    needs_grad = [
        torch.is_grad_enabled() and tensor is not None and tensor.requires_grad
        for tensor in (x, weight, bias)
    ]
    max_logits = MAX_LOGITS.get(device, MAX_LOGITS["cpu"])
    passes = 2 if r_drop else 1
    tokens_per_chunk = chunk or chunk_size(
        targets.numel(), passes * weight.shape[0], max_logits // (R_DROP_TEMPORARIES if r_drop else 1)
    )
    loss, cross_entropy, correct, *_ = _linear_cross_entropy_op(
        x.flatten(0, -2),
        weight,
        bias,
        targets.flatten() if passes == 1 else targets.flatten().repeat_interleave(passes),
        label_smoothing,
        r_drop,
        passes * tokens_per_chunk,
        compute_dtype,
        needs_grad,
    )
    return LossSums(loss, cross_entropy, correct)


def chunk_size(tokens: int, vocab: int, max_logits: int) -> int:
    """Tokens per chunk: chunks of equal size, a multiple of 64, of about `max_logits` logits at most."""
    num_chunks = -(-tokens * vocab // max_logits)
    chunk_tokens = -(-tokens // max(1, num_chunks))
    return max(1, chunk_tokens) if num_chunks <= 1 else max(64, -(-chunk_tokens // 64) * 64)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# To torch.compile the work below is one custom op: it has its own gradients, and loops over chunks


def loss_and_grads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    r_drop: float,
    chunk: int,
    compute_dtype: torch.dtype,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    """(N, dim) against (N,): the three LossSums, and the gradients of x, weight and bias where needed.

    With `r_drop`, rows 2n and 2n + 1 are two passes over the same token.
    """
    sum_dtype = accumulation_dtype(compute_dtype)
    target_rows = None
    if not x.is_cuda and bool((targets == IGNORE_INDEX).any()):  # on a GPU this would synchronise
        target_rows = (targets != IGNORE_INDEX).nonzero()[:, 0]
        targets = targets[target_rows]
    hidden = (x if target_rows is None else x[target_rows]).to(compute_dtype)
    matrix = weight.to(compute_dtype)
    cast_bias = None if bias is None else bias.to(compute_dtype)
    sums = torch.zeros(3, dtype=sum_dtype, device=x.device)
    # a tensor each, even where it is empty: the outputs of a custom op may not alias
    grad_x = torch.empty_like(hidden) if needs_grad[0] else x.new_empty(0)
    grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if needs_grad[1] else x.new_empty(0)
    grad_bias = (
        torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needs_grad[2] else x.new_empty(0)
    )
    for begin in range(0, len(hidden), chunk):
        hidden_chunk = hidden[begin : begin + chunk]
        chunk_sums, grad_logits = _dispatch_chunk_loss(
            F.linear(hidden_chunk, matrix, cast_bias),
            targets[begin : begin + chunk],
            label_smoothing,
            r_drop,
            any(needs_grad),
        )
        sums += chunk_sums
        if needs_grad[0]:
            torch.mm(grad_logits, matrix, out=grad_x[begin : begin + chunk])
        if needs_grad[1]:
            _accumulate_matmul(grad_weight, grad_logits, hidden_chunk)
        if bias is not None and needs_grad[2]:
            grad_bias += grad_logits.sum(0, dtype=sum_dtype)
    grad_x = grad_x.to(x.dtype)
    if target_rows is not None and needs_grad[0]:
        grad_x = torch.zeros_like(x).index_copy_(0, target_rows, grad_x)
    return (
        sums[0].clone(),
        sums[1].clone(),
        sums[2].long(),
        grad_x,
        grad_weight.to(weight.dtype),
        grad_bias if bias is None else grad_bias.to(bias.dtype),
    )


_linear_cross_entropy_op = torch.library.custom_op(
    "keepleft::linear_cross_entropy",
    loss_and_grads,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor targets, float label_smoothing, float r_drop, "
    "int chunk, ScalarType compute_dtype, bool[] needs_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


@_linear_cross_entropy_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    label_smoothing: float,
    r_drop: float,
    chunk: int,
    compute_dtype: torch.dtype,
    needs_grad: list[bool],
) -> tuple[Tensor, ...]:
    sum_dtype = accumulation_dtype(compute_dtype)
    return (
        x.new_empty((), dtype=sum_dtype),
        x.new_empty((), dtype=sum_dtype),
        x.new_empty((), dtype=torch.int64),
        x.new_empty(x.shape if needs_grad[0] else 0),
        weight.new_empty(weight.shape if needs_grad[1] else 0),
        bias.new_empty(bias.shape) if bias is not None and needs_grad[2] else x.new_empty(0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.needs_grad = inputs[-1]
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    grads = [
        saved * gradient.to(saved.dtype) if needed and gradient is not None else None
        for needed, saved in zip(ctx.needs_grad, ctx.saved_tensors, strict=True)
    ]
    return (*grads, None, None, None, None, None, None)


_linear_cross_entropy_op.register_autograd(_backward, setup_context=_setup_context)


def _accumulate_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ right, accumulated in the type of total."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total += left.T @ right


def _dispatch_chunk_loss(
    logits: Tensor, targets: Tensor, label_smoothing: float, r_drop: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """The three LossSums of (n, V) logits, (3,), and their gradient where needed; overwrites the logits."""
    if r_drop:
        divergence, divergence_grad = chunk_divergence(logits, targets, needs_grad)
        sums, grad = _dispatch_chunk_loss(logits, targets, label_smoothing, 0.0, needs_grad)
        sums = sums / 2
        sums[0] += r_drop / 4 * divergence
        return sums, grad.mul_(0.5).add_(divergence_grad, alpha=r_drop / 4) if needs_grad else grad
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from keepleft.kernels.cross_entropy import cross_entropy_chunk

        return cross_entropy_chunk(logits, targets, label_smoothing, needs_grad), logits
    return chunk_loss(logits, targets, label_smoothing, needs_grad)


def chunk_divergence(logits: Tensor, targets: Tensor, needs_grad: bool) -> tuple[Tensor, Tensor]:
    """The sum of both divergences between rows 2n and 2n + 1 of (2n, V) logits, and its gradient."""
    sum_dtype = accumulation_dtype(logits.dtype)
    logprobs = F.log_softmax(logits, -1, dtype=sum_dtype).unflatten(0, (-1, 2))
    probs = logprobs.exp()
    log_ratio = logprobs[:, 0] - logprobs[:, 1]
    forward = torch.linalg.vecdot(probs[:, 0], log_ratio)[:, None]
    backward = -torch.linalg.vecdot(probs[:, 1], log_ratio)[:, None]
    is_target = (targets[::2] != IGNORE_INDEX)[:, None]
    divergence = ((forward + backward) * is_target).sum()
    if not needs_grad:
        return divergence, logits
    grad = logprobs  # its memory is free now
    grad[:, 0] = (log_ratio - forward + 1).mul_(probs[:, 0]).sub_(probs[:, 1])
    grad[:, 1] = (-log_ratio - backward + 1).mul_(probs[:, 1]).sub_(probs[:, 0])
    grad *= is_target[..., None]
    return divergence, grad.flatten(0, 1).to(logits.dtype)


def chunk_loss(
    logits: Tensor, targets: Tensor, label_smoothing: float, needs_grad: bool
) -> tuple[Tensor, Tensor]:
    """The same in torch operations, for any device and type."""
    sum_dtype = accumulation_dtype(logits.dtype)
    vocab = logits.shape[1]
    is_target = targets != IGNORE_INDEX
    target_index = targets.clamp(min=0)[:, None]
    logprobs = F.log_softmax(logits, -1, dtype=sum_dtype)
    target_logprobs = logprobs.gather(1, target_index)[:, 0]
    cross_entropy = -(target_logprobs * is_target).sum()
    loss = cross_entropy
    if label_smoothing:
        loss = (1 - label_smoothing) * cross_entropy - label_smoothing / vocab * (
            logprobs.sum(-1) * is_target
        ).sum()
    # argmax breaks ties, but is slow: it runs only where the target's logit is among the highest
    is_highest = (target_logprobs >= logprobs.amax(-1)) & is_target
    correct = (logprobs[is_highest].argmax(-1) == targets[is_highest]).sum()
    if needs_grad:
        logprobs.exp_()
        if label_smoothing:
            logprobs -= label_smoothing / vocab
        logprobs.scatter_add_(
            1, target_index, logprobs.new_full((), label_smoothing - 1).expand_as(target_index)
        )
        if logits.is_cuda:  # elsewhere ignored targets were dropped before
            logprobs *= is_target[:, None]
    return torch.stack([loss, cross_entropy, correct.to(sum_dtype)]), logprobs.to(logits.dtype)
