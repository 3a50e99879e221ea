"""Perplexity and bits per byte of a decoder on long texts, through a sliding window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keepleft.evaluation.token_logprobs import default_window, require_language_model, target_logprobs
from keepleft.models.embedding import check_tokens
from keepleft.models.transformer import Model
from keepleft.nn.loss import IGNORE_INDEX

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Perplexity:
    """Totals over all texts."""

    nats: float  # negative log-likelihood of all scored tokens
    tokens: int  # scored tokens
    bytes: int  # of the texts in UTF-8

    @property
    def perplexity(self) -> float:
        """exp of the mean nats per token. Depends on the tokenizer."""
        return math.exp(min(self.nats / self.tokens, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between models with different tokenizers."""
        return self.nats / math.log(2) / self.bytes


def perplexity(
    model: Model,
    tokenizer: Tokenizer,
    texts: str | Sequence[str],
    *,
    prefix_token_id: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Perplexity of a decoder on texts, each scored on its own.

    Special tokens that the tokenizer adds are left out. `prefix_token_id` is put before each text; without
    one, the first token of a text follows nothing and is not scored. `window` is the most tokens the model
    sees at once, by default the positions it was made for. `stride`, by default half a window, is how far the
    window moves: from the second on, each scores `stride` tokens, and each of these has at least window -
    stride tokens before it. Raises ValueError if no token can be scored.
    """
    text_list = [texts] if isinstance(texts, str) else list(texts)
    nats, tokens = 0.0, 0
    for text in text_list:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        nll = token_nll(
            model, ids, prefix_token_id=prefix_token_id, window=window, stride=stride, batch_size=batch_size
        )
        nats += float(nll.sum())
        tokens += len(nll)
    if not tokens:
        raise ValueError("these texts have no token that follows another: there is nothing to predict")
    return Perplexity(nats, tokens, sum(len(text.encode()) for text in text_list))


def token_nll(
    model: Model,
    tokens: Sequence[int],
    *,
    prefix_token_id: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Tensor:
    """(scored,) float64 negative log-likelihoods of the tokens of one text, given those before in the window.

    Options as in `perplexity`. Raises ValueError for a token outside the vocabulary, a stride longer than the
    window, or a window longer than the model's positions.
    """
    design = require_language_model(model).design
    prefix = [] if prefix_token_id is None else [prefix_token_id]
    sequence = torch.tensor([*prefix, *tokens], dtype=torch.long)
    if len(sequence) < 2:
        return torch.zeros(0, dtype=torch.float64)
    check_tokens("the text", sequence[None], design.vocab)
    window_size = (default_window(model) or len(sequence)) if window is None else window
    stride_size = max(1, window_size // 2) if stride is None else stride
    if not 1 <= stride_size <= window_size:
        raise ValueError(
            f"a stride of {stride_size} in a window of {window_size} would leave tokens out: it lies between "
            "1 and the window"
        )
    if design.max_positions is not None and min(window_size, len(sequence) - 1) > design.max_positions:
        raise ValueError(
            f"a window of {window_size} is more than the {design.max_positions} positions of this model: "
            "give a smaller one"
        )
    device = next(model.parameters()).device
    spans = sliding_windows(len(sequence), window_size, stride_size)
    out = []
    for n in range(0, len(spans), max(1, batch_size)):
        batch_spans = spans[n : n + max(1, batch_size)]
        inputs = torch.stack([sequence[begin:end] for begin, end, _ in batch_spans])
        targets = torch.stack([sequence[begin + 1 : end + 1] for begin, end, _ in batch_spans])
        # targets of each row that an earlier window has scored
        num_scored = torch.tensor([first - 1 - begin for begin, _, first in batch_spans])
        targets = targets.masked_fill(torch.arange(inputs.shape[1])[None] < num_scored[:, None], IGNORE_INDEX)
        out.append(-target_logprobs(model, inputs.to(device), targets.to(device))[0].double().cpu())
    return torch.cat(out)


def sliding_windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, first) of each window over `length` tokens.

    Inputs begin … end - 1 predict tokens first … end. Each token but the first is predicted once. All windows
    are equally long, so they batch without padding.
    """
    end = min(window, length - 1)
    out = [(0, end, 1)]
    while end < length - 1:
        first, end = end + 1, min(end + stride, length - 1)
        out.append((end - window, end, first))
    return out
