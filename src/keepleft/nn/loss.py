"""What a model is taught by: the cross-entropy of hidden states against a vocabulary, without ever holding all scores."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # the target where nothing is asked

AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 29}  # scores held at a time, unless a chunk is asked for


class Sums(NamedTuple):
    """Sums over the targets that are asked for: divide by their number."""

    loss: Tensor   # what to send back: label-smoothed
    plain: Tensor  # the cross-entropy itself, without a gradient
    right: Tensor  # how often the target had the highest score


def plain_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0) -> Sums:
    """The definition of vocabulary_loss: all scores at once."""
    scores, targets = F.linear(x, weight, bias).flatten(0, -2), targets.flatten()
    return label_loss(scores, targets, smoothing)


def label_loss(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Sums:
    """(N, labels) scores against (N,) labels, where the labels are few."""
    scores = scores.to(precise(scores.dtype))
    loss = F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    known = scores.detach()
    plain = F.cross_entropy(known, labels, ignore_index=IGNORED, reduction="sum") if smoothing else loss.detach()
    return Sums(loss, plain, (known.argmax(-1) == labels).sum())


def vocabulary_loss(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, smoothing: float = 0.0,
                    chunk: int | None = None) -> Sums:
    """F.linear(x, weight, bias) against the targets, some tokens at a time.

    x: (…, dim) hidden states   weight: (V, dim)   bias: (V,)   targets: (…) whole numbers, -100 where nothing is asked
    The gradients are worked out on the way, beside the scores, so that these need not be kept or computed again. The
    matrices are multiplied in the type of x, or of autocast; softmax and sums are in float32 at least.
    """
    if x.shape[:-1] != targets.shape:
        raise ValueError(f"the targets have shape {tuple(targets.shape)}, the hidden states {tuple(x.shape)}: one target is "
                         f"needed for each, (…) beside (…, dim)")
    if not 0.0 <= smoothing < 1.0:
        raise ValueError(f"smoothing is {smoothing}: it must be at least 0 and below 1")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is {chunk}: it must be a number of tokens, at least 1")
    device = x.device.type
    work = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) and x.dtype != torch.float64 else x.dtype
    back = [torch.is_grad_enabled() and given is not None and given.requires_grad for given in (x, weight, bias)]
    rows = chunk or share(targets.numel(), weight.shape[0], AT_ONCE.get(device, AT_ONCE["cpu"]))
    loss, plain, right, *_ = _sums(x.flatten(0, -2), weight, bias, targets.flatten(), smoothing, rows, work, back)
    return Sums(loss, plain, right)


def share(tokens: int, vocab: int, most: int) -> int:
    """How many tokens at a time: equal shares, of a round number of tokens, that hold no more scores than `most`."""
    shares = -(-tokens * vocab // most)
    rows = -(-tokens // max(1, shares))
    return max(1, rows) if shares <= 1 else max(64, -(-rows // 64) * 64)


def precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# To a compiler the work below is one operation: it has its own gradients, and loops over chunks ------------------


def work_out(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, chunk: int, work: torch.dtype,
             back: list[bool]) -> tuple[Tensor, ...]:
    """(N, dim) against (N,): loss, plain, right, and the gradients of x, weight and bias where they are wanted."""
    exact, real = precise(work), None
    if not x.is_cuda and bool((targets == IGNORED).any()):  # a GPU would have to wait for the answer
        real = (targets != IGNORED).nonzero()[:, 0]
        targets = targets[real]
    some = (x if real is None else x[real]).to(work)
    table = weight.to(work)
    offset = None if bias is None else bias.to(work)
    sums = torch.zeros(3, dtype=exact, device=x.device)
    to_x = torch.empty_like(some) if back[0] else x.new_empty(0)  # each its own: no two results may be one tensor
    to_weight = torch.zeros_like(weight, dtype=exact) if back[1] else x.new_empty(0)
    to_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and back[2] else x.new_empty(0)
    for begin in range(0, len(some), chunk):
        part = some[begin:begin + chunk]
        found, slopes = _measure(F.linear(part, table, offset), targets[begin:begin + chunk], smoothing, any(back))
        sums += found
        if back[0]:
            torch.mm(slopes, table, out=to_x[begin:begin + chunk])
        if back[1]:
            _add_product(to_weight, slopes, part)
        if bias is not None and back[2]:
            to_bias += slopes.sum(0, dtype=exact)
    to_x = to_x.to(x.dtype)
    if real is not None and back[0]:
        to_x = torch.zeros_like(x).index_copy_(0, real, to_x)
    return (sums[0].clone(), sums[1].clone(), sums[2].long(), to_x, to_weight.to(weight.dtype),
            to_bias if bias is None else to_bias.to(bias.dtype))


_sums = torch.library.custom_op(
    "keepleft::vocabulary_loss", work_out, mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor targets, float smoothing, int chunk, ScalarType work, bool[] back)"
           " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")


@_sums.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, chunk: int, work: torch.dtype,
      back: list[bool]) -> tuple[Tensor, ...]:
    exact = precise(work)
    return (x.new_empty((), dtype=exact), x.new_empty((), dtype=exact), x.new_empty((), dtype=torch.int64),
            x.new_empty(x.shape if back[0] else 0), weight.new_empty(weight.shape if back[1] else 0),
            bias.new_empty(bias.shape) if bias is not None and back[2] else x.new_empty(0))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.back = inputs[-1]
    ctx.save_for_backward(*output[3:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _return(ctx: Any, gradient: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    given = [saved * gradient.to(saved.dtype) if wanted and gradient is not None else None
             for wanted, saved in zip(ctx.back, ctx.saved_tensors, strict=True)]
    return (*given, None, None, None, None, None)


_sums.register_autograd(_return, setup_context=_keep)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += leftᵀ right, added up in the type of the total."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total += left.T @ right


def _measure(scores: Tensor, targets: Tensor, smoothing: float, back: bool) -> tuple[Tensor, Tensor]:
    """(3,) loss, plain and right of (n, V) scores, which are used up, and their gradient where one is wanted."""
    if scores.is_cuda and scores.dtype != torch.float64 and find_spec("triton") is not None:
        from keepleft.nn import kernel

        return kernel.measure(scores, targets, smoothing, back), scores
    return measure(scores, targets, smoothing, back)


def measure(scores: Tensor, targets: Tensor, smoothing: float, back: bool) -> tuple[Tensor, Tensor]:
    """The same in plain operations, for any device and type."""
    exact, vocab, asked = precise(scores.dtype), scores.shape[1], targets != IGNORED
    at = targets.clamp(min=0)[:, None]
    chances = F.log_softmax(scores, -1, dtype=exact)
    own = chances.gather(1, at)[:, 0]
    plain = -(own * asked).sum()
    loss = plain
    if smoothing:
        loss = (1 - smoothing) * plain - smoothing / vocab * (chances.sum(-1) * asked).sum()
    top = (own >= chances.amax(-1)) & asked  # quick to find; which of several equal scores counts is asked of these few
    right = (chances[top].argmax(-1) == targets[top]).sum()
    if back:
        chances.exp_()
        if smoothing:
            chances -= smoothing / vocab
        chances.scatter_add_(1, at, chances.new_full((), smoothing - 1).expand_as(at))
        if scores.is_cuda:  # elsewhere only what is asked comes here
            chances *= asked[:, None]
    return torch.stack([loss, plain, right.to(exact)]), chances.to(scores.dtype)
