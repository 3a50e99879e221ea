"""The loop: scores in, a token out, until all texts have ended. A generator: whoever stops iterating stops it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, Stepper, Strategy


def decode(model: Stepper, prompt: Tensor, strategy: Strategy, *, limit: int | Sequence[int], segments: Tensor | None = None,
           chunk: int = 0, **given: Any) -> Iterator[Hypotheses]:
    """Yield the texts after each new token; none gets more than `limit`, which may be a number for each prompt.

    `prompt`: (B, T), padded on either side where `segments` say so. `chunk`: read the prompt in pieces of so many tokens.
    `given` goes to model.start(): the memory of a source, the kind of cache.
    """
    limits = [limit] * len(prompt) if isinstance(limit, int) else list(limit)
    if len(limits) != len(prompt) or min(limits) < 1:
        raise ValueError(f"limit is {limit}: at least one token must be asked for, of {len(prompt)} prompts")
    tokens, real = aligned(prompt, segments)
    texts, rows = strategy.begin(tokens, real, torch.tensor(limits, device=prompt.device))
    live: Tensor | None = None  # the rows that the model still goes on with; None: all
    with torch.no_grad():
        scores, state = _read(model, tokens, real, chunk, given)
    if rows is not None:
        scores = scores[rows]
    for n in range(max(limits)):
        with torch.no_grad():
            if n:
                if rows is not None and live is not None:
                    place = torch.full((len(texts.tokens),), -1, device=live.device).index_copy_(
                        0, live, torch.arange(len(live), device=live.device))
                    rows = place[rows[live]]
                if rows is not None:
                    state.keep(rows)
                live = _fewer(texts.done, live, state)
                last = texts.tokens[:, -1:]
                scores = _wide(model.step(last if live is None else last[live], state), live, len(last))
            elif rows is not None:
                state.keep(rows)
            texts, rows = strategy.choose(scores, texts)
        yield texts
        if bool(texts.done.all()):
            return


def aligned(prompt: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The prompts moved to the right, so that all end in the last column, and where they are text; None: everywhere."""
    if segments is None:
        return prompt, None
    there = segments != 0
    if bool(there.all()):
        return prompt, None
    if not bool(there.any(1).all()):
        raise ValueError(f"prompt {int((~there.any(1)).nonzero()[0])} is empty: give each at least one token")
    order = there.long().argsort(dim=1, stable=True)  # what is no text goes first, text keeps its order
    return prompt.gather(1, order), there.gather(1, order)


def _read(model: Stepper, prompt: Tensor, real: Tensor | None, chunk: int, given: dict[str, Any]) -> tuple[Tensor, Any]:
    """Scores of what follows the prompt."""
    parts: Any = model
    length = max(1, prompt.shape[1])  # the model itself says what is wrong with an empty prompt
    size = chunk or length
    pieces = [({} if real is None else {"segments": real[:, begin:begin + size].long()}, prompt[:, begin:begin + size])
              for begin in range(0, length, size)]
    (marks, first), *rest = pieces
    scores, state = model.start(first, **marks, **given)
    for marks, part in rest:
        scores = parts.head(parts.extend(part, state, **marks)[:, -1], parts.token)
    return scores, state


def _fewer(done: Tensor, live: Tensor | None, state: Any) -> Tensor | None:
    """Let the model go on without texts that have ended, once these are half of all."""
    if done.is_cuda:
        return live  # asking would mean waiting
    left = (~done).nonzero()[:, 0]
    now = len(done) if live is None else len(live)
    if 2 * len(left) > now or now == 1:
        return live
    place = left if live is None else torch.searchsorted(live, left)
    state.keep(place)
    return left


def _wide(scores: Tensor, live: Tensor | None, rows: int) -> Tensor:
    """Scores for all rows again; those of ended texts do not matter."""
    if live is None:
        return scores
    return scores.new_zeros(rows, scores.shape[1]).index_copy_(0, live, scores)
