"""How well a decoder foresees long texts: perplexity and bits per byte, through a window that slides over
each text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.evaluation.token_logprobs import max_positions, require_language_model, target_logprobs
from keepleft.models.embedding import check_tokens
from keepleft.nn.loss import IGNORE_INDEX


@dataclass(frozen=True)
class Perplexity:
    """What was found over all texts."""

    nats: float  # minus the log-probability of all scored tokens together
    tokens: int  # that were scored
    bytes: int  # of the texts in UTF-8

    @property
    def perplexity(self) -> float:
        """For each token: as if it were chosen among so many. Depends on the tokenizer."""
        return math.exp(min(self.nats / self.tokens, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between models of different tokenizers."""
        return self.nats / math.log(2) / self.bytes


def perplexity(
    model: nn.Module,
    tokenizer: Any,
    texts: str | Sequence[str],
    *,
    prefix_token_id: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Perplexity:
    """Texts, each on its own, by a decoder and its tokenizers.Tokenizer (whose marks around a text are left
    out).

    `start` is a token put before each text; without one the first token of a text follows nothing and goes
    unscored. `window` is the most tokens the model sees at once, by default the positions it was made for;
    `stride`, by default half of that, how far the window moves: from the second on, each scores `stride`
    tokens, each of which has at least window - stride before it.
    """
    text_list = [texts] if isinstance(texts, str) else list(texts)
    nats, tokens = 0.0, 0
    for text in text_list:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        nll = token_nll(
            model, ids, prefix_token_id=prefix_token_id, window=window, stride=stride, batch_size=batch_size
        )
        nats, tokens = nats + float(nll.sum()), tokens + len(nll)
    if not tokens:
        raise ValueError("these texts have no token that follows another: there is nothing to foresee")
    return Perplexity(nats, tokens, sum(len(text.encode()) for text in text_list))


def token_nll(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    prefix_token_id: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> Tensor:
    """(scored,) minus the log-probability of each token of one text, given those before it, in float64."""
    design = require_language_model(model).design
    sequence = torch.tensor(
        [*([] if prefix_token_id is None else [prefix_token_id]), *tokens], dtype=torch.long
    )
    if len(sequence) < 2:
        return torch.zeros(0, dtype=torch.float64)
    check_tokens("the text", sequence[None], design.vocab)
    window_size = (max_positions(model) or len(sequence)) if window is None else window
    stride_size = max(1, window_size // 2) if stride is None else stride
    if not 1 <= stride_size <= window_size:
        raise ValueError(
            f"a stride of {stride_size} in a window of {window_size} would leave tokens out: it lies between 1 and the window"
        )
    if design.max_positions is not None and min(window_size, len(sequence) - 1) > design.max_positions:
        raise ValueError(
            f"a window of {window_size} is more than the {design.max_positions} positions of this model: give a smaller one"
        )
    device = next(model.parameters()).device
    spans = sliding_windows(len(sequence), window_size, stride_size)
    out = []
    for n in range(0, len(spans), max(1, batch_size)):
        batch_spans = spans[n : n + max(1, batch_size)]
        inputs = torch.stack([sequence[begin:end] for begin, end, _ in batch_spans])
        targets = torch.stack([sequence[begin + 1 : end + 1] for begin, end, _ in batch_spans])
        # how many of a row were scored before
        num_scored = torch.tensor([first - 1 - begin for begin, _, first in batch_spans])
        targets = targets.masked_fill(torch.arange(inputs.shape[1])[None] < num_scored[:, None], IGNORE_INDEX)
        out.append(-target_logprobs(model, inputs.to(device), targets.to(device))[0].double().cpu())
    return torch.cat(out)


def sliding_windows(length: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, end, first) of each window over `length` tokens: inputs begin … end - 1 foretell tokens first …
    end.

    Each token but the first is foretold once. All windows are equally long, so they batch without padding.
    """
    end = min(window, length - 1)
    out = [(0, end, 1)]
    while end < length - 1:
        first, end = end + 1, min(end + stride, length - 1)
        out.append((end - window, end, first))
    return out
