"""Contrastive search (Su et al.

2022): of the most likely tokens, the one least similar to what is there already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, apply_processors
from keepleft.decoding.loop import right_align
from keepleft.decoding.sampling import SamplingStrategy, append_tokens
from keepleft.models.transformer import CausalModel


def contrastive_search(
    model: CausalModel,
    prompt: Tensor,
    strategy: SamplingStrategy,
    *,
    alpha: float,
    k: int,
    max_new_tokens: int | Sequence[int],
    segments: Tensor | None = None,
    **start_kwargs: Any,
) -> Iterator[Hypotheses]:
    """Yield the texts after each new token: argmax of (1 - alpha) · probability - alpha · likeness, over the
    k likeliest.

    Likeness is the largest cosine between the hidden state that a token would have and those of all tokens
    before it.
    """
    tokens, prompt_mask = right_align(prompt, segments)
    num_rows = len(tokens)
    limits = [max_new_tokens] * num_rows if isinstance(max_new_tokens, int) else list(max_new_tokens)
    hypotheses, _ = strategy.begin(tokens, prompt_mask, torch.tensor(limits, device=tokens.device))
    prompt_segments = None if prompt_mask is None else prompt_mask.long()
    with torch.no_grad():
        logits, state = model.start(tokens, segments=prompt_segments, **start_kwargs)
        hidden_states = model.decoder_hidden_states(
            tokens, segments=prompt_segments, memory=start_kwargs.get("memory")
        )
        context_states = F.normalize(hidden_states.float(), dim=-1)  # (B, T, dim)
    text_mask = torch.ones_like(tokens, dtype=torch.bool) if prompt_mask is None else prompt_mask
    row_index = torch.arange(num_rows, device=tokens.device)
    for _ in range(max(limits)):
        with torch.no_grad():
            logits = apply_processors(logits, hypotheses, strategy.processors)
            probs, candidates = logits.float().softmax(-1).topk(min(k, logits.shape[-1]))
            num_candidates = candidates.shape[1]
            state.reorder(row_index.repeat_interleave(num_candidates))
            hidden = model.extend(candidates.reshape(-1, 1), state)
            candidate_states = F.normalize(hidden[:, 0].float(), dim=-1).view(num_rows, num_candidates, -1)
            similarity = (
                (candidate_states @ context_states.mT).masked_fill(~text_mask[:, None], -1.0).amax(-1)
            )
            best_candidate = (
                ((1 - alpha) * probs - alpha * similarity).masked_fill(probs == 0, float("-inf")).argmax(-1)
            )
            picked_rows = row_index * num_candidates + best_candidate
            state.reorder(picked_rows)
            next_tokens = torch.where(
                hypotheses.done, hypotheses.tokens[:, -1], candidates[row_index, best_candidate]
            )
            logprobs = probs[row_index, best_candidate].log().masked_fill(hypotheses.done, 0.0)
            hypotheses = append_tokens(
                hypotheses, next_tokens, hypotheses.score + logprobs, strategy.eos_ids, strategy.stop
            )
            context_states = torch.cat(
                [context_states, candidate_states[row_index, best_candidate][:, None]], 1
            )
            text_mask = torch.cat([text_mask, text_mask.new_ones(num_rows, 1)], 1)
            logits = model.head(hidden[picked_rows][:, 0], model.token)
        yield hypotheses
        if bool(hypotheses.done.all()):
            return
