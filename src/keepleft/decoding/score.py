"""Log-probabilities of given tokens, with the most likely alternatives: scoring text instead of generating
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.models.ensemble import Ensemble
from keepleft.models.transformer import CausalModel, EncoderDecoder, Model

MAX_LOGITS_ROWS = 512  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class ScoredToken:
    """The log-probability of one token and its alternatives."""

    token: int
    logprob: float
    top_logprobs: list[tuple[int, float]]  # the most likely tokens in its place


@torch.no_grad()
def score_tokens(
    model: Model,
    prompt: list[int],
    continuation: list[int],
    *,
    source: list[int] | None = None,
    top_logprobs: int = 0,
    window: int | None = None,
) -> list[ScoredToken]:
    """Each token of a text after a prompt; an encoder-decoder reads the source, and its prompt is what the
    text begins with.

    Only as much of the prompt is read as the model has positions for; a text that is longer itself is
    refused.
    """
    device, max_positions = next(model.parameters()).device, window or model.design.max_positions
    if not continuation:
        return []
    if not prompt:
        raise ValueError(
            "the first token of a text cannot be foreseen from nothing: give a prompt, if only its beginning"
        )
    if max_positions is not None and len(continuation) > max_positions:
        raise ValueError(
            f"the text has {len(continuation)} tokens, and the model reaches {max_positions}: shorten it"
        )
    sequence = [*prompt, *continuation][:-1]
    sequence = sequence if max_positions is None else sequence[-max_positions:]
    tokens = torch.tensor([sequence], device=device)
    if not isinstance(model, CausalModel):
        raise ValueError("an encoder does not score text: take a decoder or an encoder-decoder")
    memory: Any = None
    if isinstance(model, EncoderDecoder | Ensemble) and model.design.is_encoder_decoder:
        if source is None:
            raise ValueError("an encoder-decoder scores a text for its source: give one")
        memory = model.encode_memory(torch.tensor([source], device=device))
    hidden_states = model.decoder_hidden_states(tokens, memory=memory)
    hidden_states = hidden_states[:, -len(continuation) :]
    chunks = [slice(start, start + MAX_LOGITS_ROWS) for start in range(0, len(continuation), MAX_LOGITS_ROWS)]
    return [
        scored_token
        for chunk in chunks
        for scored_token in score_logits(
            model.head(hidden_states[:, chunk], model.token)[0], continuation[chunk], top_logprobs
        )
    ]


def score_logits(logits: Tensor, continuation: list[int], top_logprobs: int) -> list[ScoredToken]:
    """The log-probability of each token by its row of the (n, V) logits."""
    logprobs = logits.float().log_softmax(-1)
    token_logprobs = logprobs.gather(1, torch.tensor(continuation, device=logits.device)[:, None])[
        :, 0
    ].tolist()
    top = logprobs.topk(min(top_logprobs, logprobs.shape[-1]))
    return [
        ScoredToken(token, logprob, list(zip(top_tokens, top_values, strict=True)))
        for token, logprob, top_tokens, top_values in zip(
            continuation, token_logprobs, top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]
