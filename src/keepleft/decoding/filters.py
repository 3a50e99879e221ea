"""Sampling filters: what narrows a distribution before a token is sampled.

Each keeps `min_tokens_to_keep` tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, LogitsProcessor

NEG_INF = float("-inf")


def temperature(value: float) -> LogitsProcessor:
    """Divide the logits: below 1 the distribution gets sharper."""
    return lambda logits, hypotheses: logits / value


def top_k(k: int, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Keep the k most likely tokens, and those just as likely as the last of them."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        return logits.masked_fill(logits < _kth_largest(logits, max(k, min_tokens_to_keep)), NEG_INF)

    return apply


def top_p(p: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Nucleus sampling: keep the most likely tokens with a total probability of at least p."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        sorted_logits, order = logits.sort(dim=-1, stable=True)
        drop = sorted_logits.softmax(-1).cumsum(-1) <= 1.0 - p
        drop[..., -min_tokens_to_keep:] = False
        return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), NEG_INF)

    return apply


def min_p(p: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Keep tokens at least p times as likely as the most likely one."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        probs = logits.softmax(-1)
        return _drop_tokens(logits, probs < p * probs.amax(-1, keepdim=True), min_tokens_to_keep)

    return apply


def typical_p(p: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Locally typical sampling: the tokens nearest to the expected surprise, together p (Meister et al.

    2022).
    """

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
    """Keep tokens of at least this probability (Hewitt et al. 2022)."""
    return lambda logits, hypotheses: _drop_tokens(logits, logits.softmax(-1) < cutoff, min_tokens_to_keep)


def eta_cutoff(cutoff: float, min_tokens_to_keep: int = 1) -> LogitsProcessor:
    """Eta sampling: the cutoff is min(cutoff, √cutoff · exp(-entropy)), lower for a flat distribution."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).nansum(-1, keepdim=True)
        return _drop_tokens(
            logits, logprobs.exp() < (cutoff**0.5 * (-entropy).exp()).clamp(max=cutoff), min_tokens_to_keep
        )

    return apply


def top_h(entropy_fraction: float) -> LogitsProcessor:
    """Of the 100 most likely tokens, keep the first that hold this share of their entropy."""

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
    """(N, 1) the k-th highest logit."""
    return logits.topk(min(k, logits.shape[-1])).values[..., -1:]


def _drop_tokens(logits: Tensor, drop: Tensor, min_tokens_to_keep: int) -> Tensor:
    return logits.masked_fill(drop & (logits < _kth_largest(logits, min_tokens_to_keep)), NEG_INF)
