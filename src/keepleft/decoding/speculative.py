"""Speculative decoding: draft tokens are made cheaply and verified by the model in one pass.

The output does not change.

The model selects every token itself, from its own logits and with the random number that belongs to the
position; a draft token that equals its choice saves a pass. So greedy and sampled text alike is exactly what
it would generate alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.hypotheses import Hypotheses, StepModel
from keepleft.decoding.prefix_reuse import PrefixReuseModel
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.models.transformer import CausalModel

# hypotheses so far and the maximum number of tokens → draft tokens
Drafter = Callable[[Hypotheses, int], list[int]]


def speculative_decode(
    model: CausalModel,
    prompt: Tensor,
    strategy: SamplingStrategy,
    drafter: Drafter,
    *,
    max_new_tokens: int,
    **start_kwargs: Any,
) -> Iterator[Hypotheses]:
    """One prompt, (1, T): yield the hypotheses after each new token."""
    if len(prompt) != 1 or strategy.num_sequences != 1:
        raise ValueError(
            f"{len(prompt)} prompts with {strategy.num_sequences} texts each: speculative decoding takes one "
            "at a "
            "time"
        )
    hypotheses, _ = strategy.begin(prompt, None, torch.tensor([max_new_tokens], device=prompt.device))
    with torch.no_grad():
        logits, state = model.start(prompt, **start_kwargs)
        hypotheses, _ = strategy.choose(logits, hypotheses)
    yield hypotheses
    while hypotheses.new_width < max_new_tokens and not bool(hypotheses.done):
        draft = drafter(hypotheses, max_new_tokens - hypotheses.new_width - 1)
        with torch.no_grad():
            new_tokens = torch.cat(
                [hypotheses.tokens[:, -1:], torch.tensor([draft], dtype=torch.long, device=prompt.device)], 1
            )
            all_logits = model.head(model.extend(new_tokens, state), model.token)[0]
        for n, logits in enumerate(all_logits):
            with torch.no_grad():
                hypotheses, _ = strategy.choose(logits[None], hypotheses)
            yield hypotheses
            if bool(hypotheses.done):
                return
            if n < len(draft) and int(hypotheses.tokens[0, -1]) != draft[n]:
                state.crop(len(draft) - n)
                break


def make_drafter(
    draft_model: CausalModel | None,
    options: GenerationConfig,
    strategy: SamplingStrategy,
    source: Tensor | None = None,
    **start_kwargs: Any,
) -> Drafter:
    """A drafter: a smaller model, or prompt lookup in the text itself."""
    if draft_model is not None:
        return DraftModel(draft_model, strategy, options.num_assistant_tokens or 5, start_kwargs)
    return prompt_lookup(options.prompt_lookup_num_tokens or 10, options.max_matching_ngram_size or 2, source)


def prompt_lookup(num_tokens: int, max_ngram_size: int, source: Tensor | None = None) -> Drafter:
    """Prompt lookup: draft what followed the last tokens when they occurred before, in the source or the
    text.
    """
    source_tokens = [] if source is None else source[0].tolist()

    def draft(hypotheses: Hypotheses, max_tokens: int) -> list[int]:
        sequence = hypotheses.tokens[0].tolist()
        history = [*source_tokens, *sequence]
        for size in range(min(max_ngram_size, len(sequence)), 0, -1):
            tail = sequence[-size:]
            for start in range(len(history) - size - 1, -1, -1):
                if history[start : start + size] == tail:
                    return history[start + size : start + size + min(num_tokens, max_tokens)]
        return []

    return draft


class DraftModel:
    """A smaller model with the same vocabulary drafts by the same strategy."""

    def __init__(
        self, model: StepModel, strategy: SamplingStrategy, num_tokens: int, start_kwargs: dict[str, Any]
    ) -> None:
        self.model = PrefixReuseModel(model)
        self.strategy = strategy
        self.num_tokens = num_tokens
        self.start_kwargs = start_kwargs
        self.max_positions = getattr(getattr(model, "design", None), "max_positions", None)

    def __call__(self, hypotheses: Hypotheses, max_tokens: int) -> list[int]:
        draft: list[int] = []
        limit = (
            max_tokens
            if self.max_positions is None
            else min(max_tokens, self.max_positions - hypotheses.tokens.shape[1])
        )
        with torch.no_grad():
            for _ in range(min(self.num_tokens, limit)):
                logits, _ = self.model.start(hypotheses.tokens, **self.start_kwargs)
                hypotheses, _ = self.strategy.choose(logits, hypotheses)
                draft.append(int(hypotheses.tokens[0, -1]))
                if bool(hypotheses.done):
                    break
        return draft
