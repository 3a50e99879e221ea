"""The eager decode loop: logits in, a token out, until all sequences have finished.

A generator: whoever stops iterating stops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, StepModel, Strategy


def decode(
    model: StepModel,
    prompt: Tensor,
    strategy: Strategy,
    *,
    max_new_tokens: int | Sequence[int],
    segments: Tensor | None = None,
    prefill_chunk_size: int = 0,
    **start_kwargs: Any,
) -> Iterator[Hypotheses]:
    """Yield the texts after each new token; none gets more than `limit`, which may be a number for each
    prompt.

    `prompt`: (B, T), padded on either side where `segments` say so. `chunk`: read the prompt in pieces of so
    many tokens. `given` goes to model.start(): the memory of a source, the kind of cache.
    """
    limits = [max_new_tokens] * len(prompt) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    if len(limits) != len(prompt) or min(limits) < 1:
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}: at least one token must be asked for, of {len(prompt)} "
            "prompts"
        )
    tokens, prompt_mask = right_align(prompt, segments)
    hypotheses, rows = strategy.begin(tokens, prompt_mask, torch.tensor(limits, device=prompt.device))
    active_rows: Tensor | None = None  # rows that the model still decodes; None: all
    with torch.no_grad():
        logits, state = _prefill(model, tokens, prompt_mask, prefill_chunk_size, start_kwargs)
    if rows is not None:
        logits = logits[rows]
    for n in range(max(limits)):
        with torch.no_grad():
            if n:
                if rows is not None and active_rows is not None:
                    active_index = torch.full(
                        (len(hypotheses.tokens),), -1, device=active_rows.device
                    ).index_copy_(0, active_rows, torch.arange(len(active_rows), device=active_rows.device))
                    rows = active_index[rows[active_rows]]
                if rows is not None:
                    state.reorder(rows)
                active_rows = _drop_finished(hypotheses.done, active_rows, state)
                last_tokens = hypotheses.tokens[:, -1:]
                logits = _scatter_rows(
                    model.step(last_tokens if active_rows is None else last_tokens[active_rows], state),
                    active_rows,
                    len(last_tokens),
                )
            elif rows is not None:
                state.reorder(rows)
            hypotheses, rows = strategy.choose(logits, hypotheses)
        yield hypotheses
        if bool(hypotheses.done.all()):
            return


def right_align(prompt: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The prompts moved to the right, so that all end in the last column, and where they are text; None:
    everywhere.
    """
    if segments is None:
        return prompt, None
    mask = segments != 0
    if bool(mask.all()):
        return prompt, None
    if not bool(mask.any(1).all()):
        raise ValueError(f"prompt {int((~mask.any(1)).nonzero()[0])} is empty: give each at least one token")
    order = mask.long().argsort(dim=1, stable=True)  # padding first, tokens keep their order
    return prompt.gather(1, order), mask.gather(1, order)


def _prefill(
    model: StepModel,
    prompt: Tensor,
    prompt_mask: Tensor | None,
    chunk_size: int,
    start_kwargs: dict[str, Any],
) -> tuple[Tensor, Any]:
    """Prefill the prompt, in chunks if asked → next-token logits and state."""
    untyped_model: Any = model
    length = max(1, prompt.shape[1])  # the model itself explains what is wrong with an empty prompt
    chunk_length = chunk_size or length
    chunks = [
        (
            {} if prompt_mask is None else {"segments": prompt_mask[:, start : start + chunk_length].long()},
            prompt[:, start : start + chunk_length],
        )
        for start in range(0, length, chunk_length)
    ]
    (segment_kwargs, first_chunk), *later_chunks = chunks
    logits, state = model.start(first_chunk, **segment_kwargs, **start_kwargs)
    for segment_kwargs, next_chunk in later_chunks:
        logits = untyped_model.head(
            untyped_model.extend(next_chunk, state, **segment_kwargs)[:, -1], untyped_model.token
        )
    return logits, state


def _drop_finished(done: Tensor, active_rows: Tensor | None, state: Any) -> Tensor | None:
    """Drop finished rows from the model's batch once they are half of it."""
    if done.is_cuda:
        return active_rows  # asking would wait for the device
    unfinished = (~done).nonzero()[:, 0]
    num_active = len(done) if active_rows is None else len(active_rows)
    if 2 * len(unfinished) > num_active or num_active == 1:
        return active_rows
    active_index = unfinished if active_rows is None else torch.searchsorted(active_rows, unfinished)
    state.reorder(active_index)
    return unfinished


def _scatter_rows(logits: Tensor, active_rows: Tensor | None, num_rows: int) -> Tensor:
    """Logits for all rows again; those of finished rows do not matter."""
    if active_rows is None:
        return logits
    return logits.new_zeros(num_rows, logits.shape[1]).index_copy_(0, active_rows, logits)
