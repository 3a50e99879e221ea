"""What narrows a distribution before a token is drawn from it. Each leaves at least `least` tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, LogitsProcessor

NEG_INF = float("-inf")


def temperature(value: float) -> LogitsProcessor:
    """Below 1 the likely becomes likelier."""
    return lambda logits, hypotheses: logits / value


def top_k(k: int, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """The k likeliest, and those just as likely as the last of them."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        return logits.masked_fill(logits < _kth_largest(logits, max(k, min_tokens_to_keep)), NEG_INF)

    return apply


def top_p(p: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """The likeliest that together have a probability of at least p."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        sorted_logits, order = logits.sort(dim=-1, stable=True)
        drop = sorted_logits.softmax(-1).cumsum(-1) <= 1.0 - p
        drop[..., -min_tokens_to_keep:] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), NEG_INF)

    return apply


def min_p(p: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Those at least p times as likely as the likeliest."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        probs = logits.softmax(-1)
        return _drop_tokens(logits, probs < p * probs.amax(-1, keepdim=True), min_tokens_to_keep)

    return apply


def typical_p(p: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Those whose surprise is nearest to the expected one, together at least p (Meister et al. 2022)."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        logprobs = logits.log_softmax(-1)
        probs = logprobs.exp()
        entropy = -(logprobs * probs).nansum(-1, keepdim=True)
        sorted_deviations, order = (-logprobs - entropy).abs().sort(dim=-1, stable=True)
        cumulative = probs.gather(-1, order).cumsum(-1)
        last_index = (cumulative < p).sum(-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
        drop = sorted_deviations > sorted_deviations.gather(-1, last_index)
        drop[..., :min_tokens_to_keep] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), NEG_INF)

    return apply


def epsilon_cutoff(cutoff: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Those of at least this probability (Hewitt et al. 2022)."""
    return lambda logits, hypotheses: _drop_tokens(logits, logits.softmax(-1) < cutoff, min_tokens_to_keep)


def eta_cutoff(cutoff: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """The same, where a flat distribution lowers the bar: min(cutoff, √cutoff · exp(-entropy))."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).nansum(-1, keepdim=True)
        return _drop_tokens(
            logits, logprobs.exp() < (cutoff**0.5 * (-entropy).exp()).clamp(max=cutoff), min_tokens_to_keep
        )

    return apply


def top_h(entropy_fraction: float) -> LogitsProcessor:
    """Of the 100 likeliest as many as hold this share of their entropy, counted from the likeliest."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        top_logits, indices = logits.topk(min(100, logits.shape[-1]))
        logprobs = top_logits.log_softmax(-1)
        entropy_terms = -(logprobs.exp() * logprobs).nan_to_num()
        keep = entropy_terms.cumsum(-1) <= entropy_fraction * entropy_terms.sum(-1, keepdim=True)
        keep[..., 0] = True
        return logits.masked_fill(
            ~torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, keep), NEG_INF
        )

    return apply


def _kth_largest(logits: Tensor, k: int) -> Tensor:
    """(N, 1) the score of the k-th best."""
    return logits.topk(min(k, logits.shape[-1])).values[..., -1:]


def _drop_tokens(logits: Tensor, drop: Tensor, min_tokens_to_keep: int) -> Tensor:
    return logits.masked_fill(drop & (logits < _kth_largest(logits, min_tokens_to_keep)), NEG_INF)
