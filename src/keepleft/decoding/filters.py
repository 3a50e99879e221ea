"""What narrows a distribution before a token is drawn from it. Each leaves at least `least` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, Transform

OUT = float("-inf")


def temperature(value: float) -> Transform:
    """Below 1 the likely becomes likelier."""
    return lambda scores, texts: scores / value


def top_k(k: int, least: int = 1) -> Transform:
    """The k likeliest, and those just as likely as the last of them."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        return scores.masked_fill(scores < _lowest(scores, max(k, least)), OUT)
    return apply


def top_p(p: float, least: int = 1) -> Transform:
    """The likeliest that together have a probability of at least p."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        ordered, order = scores.sort(dim=-1, stable=True)
        drop = ordered.softmax(-1).cumsum(-1) <= 1.0 - p
        drop[..., -least:] = False
        return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), OUT)
    return apply


def min_p(p: float, least: int = 1) -> Transform:
    """Those at least p times as likely as the likeliest."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        chances = scores.softmax(-1)
        return _without(scores, chances < p * chances.amax(-1, keepdim=True), least)
    return apply


def typical(p: float, least: int = 1) -> Transform:
    """Those whose surprise is nearest to the expected one, together at least p (Meister et al. 2022)."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        logs = scores.log_softmax(-1)
        chances = logs.exp()
        expected = -(logs * chances).nansum(-1, keepdim=True)
        ordered, order = (-logs - expected).abs().sort(dim=-1, stable=True)
        sums = chances.gather(-1, order).cumsum(-1)
        last = (sums < p).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
        drop = ordered > ordered.gather(-1, last)
        drop[..., :least] = False
        return scores.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), OUT)
    return apply


def epsilon(cutoff: float, least: int = 1) -> Transform:
    """Those of at least this probability (Hewitt et al. 2022)."""
    return lambda scores, texts: _without(scores, scores.softmax(-1) < cutoff, least)


def eta(cutoff: float, least: int = 1) -> Transform:
    """The same, where a flat distribution lowers the bar: min(cutoff, √cutoff · exp(-entropy))."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        logs = scores.log_softmax(-1)
        entropy = -(logs.exp() * logs).nansum(-1, keepdim=True)
        return _without(scores, logs.exp() < (cutoff ** 0.5 * (-entropy).exp()).clamp(max=cutoff), least)
    return apply


def top_h(share: float) -> Transform:
    """Of the 100 likeliest as many as hold this share of their entropy, counted from the likeliest."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        best, at = scores.topk(min(100, scores.shape[-1]))
        logs = best.log_softmax(-1)
        surprise = -(logs.exp() * logs).nan_to_num()
        keep = surprise.cumsum(-1) <= share * surprise.sum(-1, keepdim=True)
        keep[..., 0] = True
        return scores.masked_fill(~torch.zeros_like(scores, dtype=torch.bool).scatter(-1, at, keep), OUT)
    return apply


def _lowest(scores: Tensor, k: int) -> Tensor:
    """(N, 1) the score of the k-th best."""
    return scores.topk(min(k, scores.shape[-1])).values[..., -1:]


def _without(scores: Tensor, drop: Tensor, least: int) -> Tensor:
    return scores.masked_fill(drop & (scores < _lowest(scores, least)), OUT)
