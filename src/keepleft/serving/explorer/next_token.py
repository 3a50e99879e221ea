"""What could come next: the scores of every token, after a text and what was written so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.masks import is_causal
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.params import Params
from keepleft.serving.explorer.text_cache import weights_version

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


class IncrementalScorer:
    """The model's state after the last text is kept: one token more costs one step, one less nothing."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.use_cache = all(map(is_causal, model.decoder.masks))
        self.reset()

    def reset(self) -> None:
        self.cache_key: Any = None  # the source and the weights that the state belongs to
        self.tokens: list[int] = []
        self.state: Any = None
        self.logits: Tensor | None = None

    def next_logits(self, tokens: list[int], source_tokens: list[int]) -> Tensor:
        """(V,) the scores of what follows."""
        device = next(self.model.parameters()).device
        to_batch = lambda row: torch.tensor([row], device=device)
        if not self.use_cache:
            inputs = [to_batch(source_tokens)] if source_tokens else []
            return self.model.head(
                self.model.hidden_states(*inputs, to_batch(tokens))[0, -1:], self.model.token
            )[0]
        cache_key = (source_tokens, weights_version(self.model))
        shared_length = _common_prefix_length(self.tokens, tokens) if cache_key == self.cache_key else 0
        if self.logits is not None and shared_length == len(tokens) == len(self.tokens):
            return self.logits
        prefix_length, old_length = min(shared_length, len(tokens) - 1), len(self.tokens)
        state = self.state
        self.reset()  # should the model refuse the tokens, nothing half-done is left
        if prefix_length:
            state.crop(old_length - prefix_length)
            logits = self.model.step(to_batch(tokens[prefix_length:]), state)
        else:
            logits, state = self.model.start(
                to_batch(tokens),
                **({"memory": self.model.encode_memory(to_batch(source_tokens))} if source_tokens else {}),
            )
        self.cache_key = cache_key
        self.tokens = list(tokens)
        self.state = state
        self.logits = logits[0]
        return logits[0]


def next_token(explorer: Explorer, params: Params) -> dict[str, Any]:
    display = explorer.require_generative("next")
    prompt_tokens, tokens = display.encode_prompt(explorer.input_text(params)), explorer.new_tokens(params)
    scorer = explorer.unmasked_scorer if params.flag("unmasked", False) else explorer.scorer
    is_encoder_decoder, options = explorer.generator.is_encoder_decoder, display.options
    sequence = [*display.start_tokens, *tokens] if is_encoder_decoder else [*prompt_tokens, *tokens]
    explorer.check_length(sequence)
    logits = scorer.next_logits(sequence, prompt_tokens if is_encoder_decoder else [])
    return {
        "prompt": display.describe_source(prompt_tokens)
        if is_encoder_decoder
        else display.describe(prompt_tokens),
        "written": display.describe(tokens, display.start_tokens if is_encoder_decoder else prompt_tokens),
        "scores_f32": wire.f32(logits),
        "ends": list(options.eos_ids),
        "start": display.start_tokens[0] if is_encoder_decoder else -1,
    }


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    """How many tokens two texts have in common from the beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
