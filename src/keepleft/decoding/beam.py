"""Beam search: keep the few likeliest texts so far, and of those that end the best by score per length."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.greedy import Stepper


@torch.no_grad()
def beam(model: Stepper, prompt: Tensor, width: int, *, limit: int, end: int, penalty: float = 1.0,
         **given: Any) -> list[list[int]]:
    """The best continuation of each row of (B, T), without its end. Score: log-probability / length ** penalty.

    A row is done when no text still open can beat the best one that has ended.
    """
    if width < 1 or limit < 1:
        raise ValueError(f"a beam of {width} over {limit} tokens is none: both must be at least 1")
    rows, device = len(prompt), prompt.device
    scores, state = model.start(prompt, **given)
    state.keep(torch.arange(rows, device=device).repeat_interleave(width))
    scores = scores.float().log_softmax(-1).repeat_interleave(width, 0)
    vocab = scores.shape[-1]
    total = torch.full((rows, width), float("-inf"), device=device)
    total[:, 0] = 0.0  # all beams are the same text yet: only one of them goes on
    texts = torch.empty(rows, width, 0, dtype=torch.long, device=device)
    best: list[tuple[float, list[int]]] = [(float("-inf"), [])] * rows
    for length in range(1, limit + 1):
        grown, place = (total[..., None] + scores.view(rows, width, vocab)).flatten(1).topk(min(2 * width, width * vocab))
        beams, tokens = place // vocab, place % vocab
        ended = tokens == end
        told = torch.where(ended, grown, float("-inf"))[:, :width]  # an end that is not among the best is none
        top, which = told.max(1)
        for row, (value, n) in enumerate(zip(top.tolist(), which.tolist(), strict=True)):
            value /= length ** penalty
            if value > best[row][0]:
                best[row] = value, texts[row, int(beams[row, n])].tolist()
        total, kept = grown.masked_fill(ended, float("-inf")).topk(width)
        parents, tokens = beams.gather(1, kept), tokens.gather(1, kept)
        texts = torch.cat([texts.gather(1, parents[..., None].expand(-1, -1, length - 1)), tokens[..., None]], -1)
        most = limit if penalty > 0 else length  # the length that favours an open text most
        open_ = [value < above / most ** penalty for (value, _), above in zip(best, total[:, 0].tolist(), strict=True)]
        if length == limit or not any(open_):
            break
        flat = (parents + torch.arange(rows, device=device)[:, None] * width).flatten()
        state.keep(flat)
        scores = model.step(tokens.flatten()[:, None], state).float().log_softmax(-1)
    return [text if value > float("-inf") else texts[row, 0].tolist() for row, (value, text) in enumerate(best)]
