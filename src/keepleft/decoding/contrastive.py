"""Contrastive search (Su et al. 2022): of the likeliest tokens the one whose meaning is least like what is there already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, changed
from keepleft.decoding.loop import aligned
from keepleft.decoding.single import Single, grown


def contrast(model: Any, prompt: Tensor, strategy: Single, *, alpha: float, k: int, limit: int | Sequence[int],
             segments: Tensor | None = None, **given: Any) -> Iterator[Hypotheses]:
    """Yield the texts after each new token: argmax of (1 - alpha) · probability - alpha · likeness, over the k likeliest.

    Likeness is the largest cosine between the hidden state that a token would have and those of all tokens before it.
    """
    tokens, real = aligned(prompt, segments)
    rows = len(tokens)
    limits = [limit] * rows if isinstance(limit, int) else list(limit)
    texts, _ = strategy.begin(tokens, real, torch.tensor(limits, device=tokens.device))
    marks = {} if real is None else {"segments": real.long()}
    with torch.no_grad():
        scores, state = model.start(tokens, **marks, **given)
        memory = {"memory": given["memory"]} if "memory" in given else {}
        context = F.normalize(model.hidden(tokens, **marks, **memory).float(), dim=-1)  # (B, T, dim)
    known = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
    each = torch.arange(rows, device=tokens.device)
    for _ in range(max(limits)):
        with torch.no_grad():
            scores = changed(scores, texts, strategy.transforms)
            chances, likely = scores.float().softmax(-1).topk(min(k, scores.shape[-1]))
            wide = likely.shape[1]
            state.keep(each.repeat_interleave(wide))
            hidden = model.extend(likely.reshape(-1, 1), state)
            new = F.normalize(hidden[:, 0].float(), dim=-1).view(rows, wide, -1)
            like = (new @ context.mT).masked_fill(~known[:, None], -1.0).amax(-1)
            best = ((1 - alpha) * chances - alpha * like).masked_fill(chances == 0, float("-inf")).argmax(-1)
            picked = each * wide + best
            state.keep(picked)
            chosen = torch.where(texts.done, texts.tokens[:, -1], likely[each, best])
            gain = chances[each, best].log().masked_fill(texts.done, 0.0)
            texts = grown(texts, chosen, texts.score + gain, strategy.end, strategy.stop)
            context = torch.cat([context, new[each, best][:, None]], 1)
            known = torch.cat([known, known.new_ones(rows, 1)], 1)
            scores = model.head(hidden[picked][:, 0], model.token)
        yield texts
        if bool(texts.done.all()):
            return
