"""How likely a decoder holds each token that follows: log-probabilities of given tokens, and which of them it would write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from keepleft.models.design import Vocabulary

NOTHING = -1        # a target that is not asked for
ROWS = 1 << 27      # scores held at once: half a gigabyte in float32


def reader(model: nn.Module) -> Any:
    """The model, if it reads from left to right, says what comes next, and says the same each time."""
    known: Any = model
    design = known.design
    if design.decoder is None or design.encoder is not None or not isinstance(design.head, Vocabulary):
        raise ValueError(f"{type(model).__name__} with {type(design.head).__name__} is no language model from left to right: a "
                         "decoder with a vocabulary is needed (for an encoder-decoder there is likelihood)")
    if model.training:
        raise ValueError("the model is in training mode, and its dropout would blur the numbers: call model.eval() first")
    return known


def room(model: nn.Module) -> int | None:
    """The positions that a model was made for; None where its design does not say."""
    known: Any = model
    return getattr(known.design.position, "length", None)


@torch.no_grad()
def foreseen(model: nn.Module, tokens: Tensor, targets: Tensor, segments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(B, T) tokens and what follows each, NOTHING where that is not asked → (asked,) log-probabilities, row after row, and
    whether each is the likeliest. Scores are worked out for what is asked only, some at a time."""
    known = reader(model)
    asked = targets != NOTHING
    x, wanted = known.states(tokens, segments=segments)[asked], targets[asked]
    logs, likeliest = [], []
    for part, goal in zip(*(whole.split(max(1, ROWS // known.design.vocab)) for whole in (x, wanted)), strict=True):
        scores = known.head(part, known.token)
        scores = scores if scores.dtype == torch.float64 else scores.float()
        logs.append(scores.gather(-1, goal[:, None])[:, 0] - scores.logsumexp(-1))
        likeliest.append(scores.argmax(-1) == goal)
    return torch.cat(logs), torch.cat(likeliest)
