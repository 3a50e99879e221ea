"""Log-probabilities that a decoder gives to known next tokens, and whether each is the greedy choice."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from keepleft.models.design import LMHead
from keepleft.models.transformer import Decoder, Model
from keepleft.nn.loss import IGNORE_INDEX

MAX_LOGITS = 1 << 27  # logits held at once: half a gigabyte in float32


def require_language_model(model: Model) -> Decoder:
    """The model, as a decoder. Raises ValueError if it is no language model, or in training mode."""
    design = model.design
    if design.kind != "decoder" or not isinstance(design.head, LMHead):
        raise ValueError(
            f"{type(model).__name__} with {type(design.head).__name__} is no left-to-right language model: a "
            "decoder with a vocabulary is needed (for an encoder-decoder there is likelihood)"
        )
    if model.training:
        raise ValueError(
            "the model is in training mode, and its dropout would blur the numbers: call model.eval() first"
        )
    return cast(Decoder, model)


def default_window(model: Model) -> int | None:
    """The context length that the model was made for; None where its design does not say."""
    return getattr(model.design.position, "length", None)


@torch.no_grad()
def target_logprobs(
    model: Model, tokens: Tensor, targets: Tensor, segments: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scored,) log-probabilities of the targets, row after row, and whether each is the likeliest token.

    tokens: (B, T)   targets: (B, T) the token that follows each, IGNORE_INDEX where it is not to be scored.
    Logits are computed only for what is scored, at most MAX_LOGITS at a time.
    """
    language_model = require_language_model(model)
    scored = targets != IGNORE_INDEX
    hidden = language_model.hidden_states(tokens, segments=segments)[scored]
    labels = targets[scored]
    chunk_size = max(1, MAX_LOGITS // language_model.design.vocab)
    logprobs, is_greedy = [], []
    for hidden_chunk, label_chunk in zip(hidden.split(chunk_size), labels.split(chunk_size), strict=True):
        logits = language_model.head(hidden_chunk, language_model.token)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        logprobs.append(logits.gather(-1, label_chunk[:, None])[:, 0] - logits.logsumexp(-1))
        is_greedy.append(logits.argmax(-1) == label_chunk)
    return torch.cat(logprobs), torch.cat(is_greedy)
