"""How likely a decoder holds each token that follows: log-probabilities of given tokens, and which of them it
would write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keepleft.models.design import LMHead
from keepleft.nn.loss import IGNORE_INDEX

MAX_LOGITS = 1 << 27  # scores held at once: half a gigabyte in float32


def require_language_model(model: nn.Module) -> Any:
    """The model, if it reads from left to right, says what comes next, and says the same each time."""
    language_model: Any = model
    design = language_model.design
    if design.kind != "decoder" or not isinstance(design.head, LMHead):
        raise ValueError(
            f"{type(model).__name__} with {type(design.head).__name__} is no language model from left to right: a "
            "decoder with a vocabulary is needed (for an encoder-decoder there is likelihood)"
        )
    if model.training:
        raise ValueError(
            "the model is in training mode, and its dropout would blur the numbers: call model.eval() first"
        )
    return language_model


def max_positions(model: nn.Module) -> int | None:
    """The positions that a model was made for; None where its design does not say."""
    language_model: Any = model
    return getattr(language_model.design.position, "length", None)


@torch.no_grad()
def target_logprobs(
    model: nn.Module, tokens: Tensor, targets: Tensor, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and what follows each, IGNORE_INDEX where that is not asked → (asked,) log-probabilities,
    row after row, and whether each is the likeliest. Scores are worked out for what is asked only, some at a
    time.
    """
    language_model = require_language_model(model)
    scored = targets != IGNORE_INDEX
    hidden, labels = language_model.hidden_states(tokens, segments=segments)[scored], targets[scored]
    logprobs, is_greedy = [], []
    for hidden_chunk, label_chunk in zip(
        *(tensor.split(max(1, MAX_LOGITS // language_model.design.vocab)) for tensor in (hidden, labels)),
        strict=True,
    ):
        logits = language_model.head(hidden_chunk, language_model.token)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logprobs.append(logits.gather(-1, label_chunk[:, None])[:, 0] - logits.logsumexp(-1))
        is_greedy.append(logits.argmax(-1) == label_chunk)
    return torch.cat(logprobs), torch.cat(is_greedy)
