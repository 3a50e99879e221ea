"""What a model thinks of a text that is there: the log-probability of each token, and what else it expected, in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 512  # tokens whose scores over the whole vocabulary are held at a time


@dataclass(frozen=True)
class Thought:
    """Of one token."""

    token: int
    logprob: float
    likely: list[tuple[int, float]]  # the likeliest tokens in its place, with theirs


@torch.no_grad()
def rescored(model: Any, prompt: list[int], text: list[int], *, source: list[int] | None = None, likely: int = 0,
             window: int | None = None) -> list[Thought]:
    """Each token of a text after a prompt; an encoder-decoder reads the source, and its prompt is what the text begins with.

    Only as much of the prompt is read as the model can hold; a text that is longer than the model's reach is refused.
    """
    device, reach = next(model.parameters()).device, window or model.design.longest
    if not text:
        return []
    if not prompt:
        raise ValueError("the first token of a text cannot be foreseen from nothing: give a prompt, if only its beginning")
    if reach is not None and len(text) > reach:
        raise ValueError(f"the text has {len(text)} tokens, and the model reaches {reach}: shorten it")
    whole = [*prompt, *text][:-1]
    whole = whole if reach is None else whole[-reach:]
    tokens = torch.tensor([whole], device=device)
    given = () if source is None else (torch.tensor([source], device=device),)
    states = model.states(*given, tokens)[:, -len(text):]
    some = [slice(first, first + ROWS) for first in range(0, len(text), ROWS)]
    return [thought for part in some for thought in _thoughts(model.head(states[:, part], model.token)[0], text[part], likely)]


def _thoughts(scores: Tensor, text: list[int], likely: int) -> list[Thought]:
    chances = scores.float().log_softmax(-1)
    own = chances.gather(1, torch.tensor(text, device=scores.device)[:, None])[:, 0].tolist()
    top = chances.topk(min(likely, chances.shape[-1]))
    return [Thought(token, value, list(zip(some, values, strict=True)))
            for token, value, some, values in zip(text, own, top.indices.tolist(), top.values.tolist(), strict=True)]
