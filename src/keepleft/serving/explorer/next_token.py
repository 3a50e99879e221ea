"""Question about the next token: the logits over the vocabulary after a text and the tokens added to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.masks import is_causal
from keepleft.models.state import DecoderState
from keepleft.models.transformer import Decoder, EncoderDecoder
from keepleft.serving.explorer import wire
from keepleft.serving.explorer.params import Params
from keepleft.serving.explorer.text_cache import weights_version

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer


class IncrementalScorer:
    """Next-token logits. It keeps the KV cache of the last text: a token more or less costs one step."""

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        self.model = model
        self.use_cache = all(map(is_causal, model.decoder.masks))
        self.reset()

    def reset(self) -> None:
        self.cache_key: tuple[list[int], int] | None = None  # source and weights that the state belongs to
        self.tokens: list[int] = []
        self.state: DecoderState | None = None
        self.logits: Tensor | None = None

    def next_logits(self, tokens: list[int], source_tokens: list[int]) -> Tensor:
        """(V,) logits of the token after these."""
        device = next(self.model.parameters()).device
        to_batch = lambda row: torch.tensor([row], device=device)
        if not self.use_cache:
            inputs = [to_batch(side) for side in (source_tokens, tokens) if side]
            hidden_states = self.model.hidden_states(*inputs)
            return self.model.head(hidden_states[0, -1:], self.model.token)[0]
        cache_key = (source_tokens, weights_version(self.model))
        shared_length = _common_prefix_length(self.tokens, tokens) if cache_key == self.cache_key else 0
        if self.logits is not None and shared_length == len(tokens) == len(self.tokens):
            return self.logits
        prefix_length = min(shared_length, len(tokens) - 1)
        num_dropped = len(self.tokens) - prefix_length
        state = self.state
        self.reset()  # should the model refuse the tokens, no half-updated state is left
        if prefix_length and state is not None:
            state.crop(num_dropped)
            logits = self.model.step(to_batch(tokens[prefix_length:]), state)
        else:
            memory = None
            if isinstance(self.model, EncoderDecoder):
                memory = self.model.encode_memory(to_batch(source_tokens))
            logits, state = self.model.start(to_batch(tokens), memory=memory)
        self.cache_key = cache_key
        self.tokens = list(tokens)
        self.state = state
        self.logits = logits[0]
        return logits[0]


def next_token(explorer: Explorer, params: Params) -> dict[str, Any]:
    """Logits of the next token, with the causal mask or without it."""
    display = explorer.require_generative("next_token")
    prompt_tokens = display.encode_prompt(explorer.input_text(params))
    tokens = explorer.new_tokens(params)
    scorer = explorer.unmasked_scorer if params.flag("unmasked", False) else explorer.scorer
    is_encoder_decoder, options = explorer.generator.is_encoder_decoder, display.options
    sequence = [*display.start_tokens, *tokens] if is_encoder_decoder else [*prompt_tokens, *tokens]
    explorer.check_length(sequence)
    logits = scorer.next_logits(sequence, prompt_tokens if is_encoder_decoder else [])
    return {
        "prompt": (
            display.describe_source(prompt_tokens) if is_encoder_decoder else display.describe(prompt_tokens)
        ),
        "new_tokens": display.describe(tokens, display.start_tokens if is_encoder_decoder else prompt_tokens),
        "logits_f32": wire.f32(logits),
        "eos_ids": list(options.eos_ids),
        "decoder_start_token_id": display.start_tokens[0] if is_encoder_decoder else -1,
    }


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    """Length of the longest common prefix."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
