"""Writing for a measurement: the likeliest token each time, until a stop string, the end, or enough tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.evaluate.foreseen import reader


def laid(texts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Texts as rows, padded on the right: (B, T) tokens and (B, T) segments"""
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    segments = torch.zeros_like(tokens)
    for row, text in enumerate(texts):
        tokens[row, :len(text)] = torch.tensor(text)
        segments[row, :len(text)] = 1
    return tokens.to(device), segments.to(device)


@torch.no_grad()
def until(model: nn.Module, tokenizer: Any, prompts: Sequence[Sequence[int]], *, limits: Sequence[int],
          stops: Sequence[Sequence[str]], end: Collection[int] = ()) -> list[str]:
    """What follows each prompt: at most so many tokens, cut before the first of its stop strings. Rows that are done leave."""
    known, device = reader(model), next(model.parameters()).device
    written: list[list[int]] = [[] for _ in prompts]
    texts = [""] * len(prompts)
    rows = list(range(len(prompts)))
    tokens, segments = laid(prompts, device)
    scores, state = known.start(tokens, segments=segments)
    while True:
        going = []
        for place, (row, token) in enumerate(zip(rows, scores.argmax(-1).tolist(), strict=True)):
            if token in end or len(written[row]) == limits[row]:
                continue
            written[row].append(token)
            whole = tokenizer.decode(written[row])
            texts[row] = cut(whole, stops[row])
            if texts[row] == whole and len(written[row]) < limits[row]:
                going.append(place)
        if not going:
            return texts
        if len(going) < len(rows):
            state.keep(torch.tensor(going, device=device))
            rows = [rows[place] for place in going]
        scores = known.step(torch.tensor([[written[row][-1]] for row in rows], device=device), state)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    return text[:min([place for stop in stops if stop and (place := text.find(stop)) >= 0], default=len(text))]
