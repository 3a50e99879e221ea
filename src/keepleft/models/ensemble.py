"""An ensemble: several models that read and write the same tokens, with their predictions averaged.

It has the methods of a decoder or an encoder-decoder, so it goes wherever one of them goes: generation,
scoring, evaluation. Its hidden states are those of all members side by side, and its head takes them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from keepleft.attention.cross_memory import Memory
from keepleft.attention.kv_cache import Cache
from keepleft.models.design import Design
from keepleft.models.transformer import CausalModel, Decoder, EncoderDecoder, Model

# the mean of the probabilities, or of their logarithms, normalised again
EnsembleAverage = Literal["probabilities", "logprobs"]


class EnsembleMemory:
    """The cross-attention memory of each member."""

    def __init__(self, memories: Sequence[Memory]) -> None:
        self.memories = list(memories)

    @property
    def rows(self) -> int:
        return self.memories[0].rows


class EnsembleState:
    """The decoder state of each member, or the KV cache of each one's runner."""

    def __init__(self, states: Sequence[Any]) -> None:
        self.states = list(states)

    @property
    def caches(self) -> list[Cache]:
        return [cache for state in self.states for cache in state.caches]

    def reorder(self, rows: Tensor) -> None:
        """Reorder, drop or repeat batch rows."""
        for state in self.states:
            state.reorder(rows)

    def crop(self, n: int) -> None:
        """Remove the last n tokens, as if they had never been given; ValueError where a cache cannot."""
        for state in self.states:
            state.crop(n)


class Ensemble(CausalModel):
    """What `ensemble` makes. An ensemble of one model is that model."""

    def __init__(self, members: Sequence[Decoder | EncoderDecoder], average: EnsembleAverage) -> None:
        nn.Module.__init__(self)  # a CausalModel would build layers of its own
        # the member that reads the least sets the limits
        self.design = min((member.design for member in members), key=_max_positions)
        self.notes = dict(members[0].notes)
        self.compiled = False
        self.average = average
        self.members = nn.ModuleList(members)
        self.training = any(member.training for member in members)

    @property
    def models(self) -> list[Decoder | EncoderDecoder]:
        """The members."""
        return cast(list[Decoder | EncoderDecoder], list(self.members))

    @property
    def token(self) -> nn.Embedding:  # type: ignore[override]
        """The token table of the first member; each head uses its own."""
        return self.models[0].token

    def head(self, x: Tensor, token: nn.Embedding, segments: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """(…, dims of all members) → (…, V): the logits of the averaged distribution."""
        parts = x.split([model.design.dim for model in self.models], -1)
        return self.average_logits(
            [model.head(part, model.token, segments) for model, part in zip(self.models, parts, strict=True)]
        )

    def average_logits(self, logits: Sequence[Tensor]) -> Tensor:
        """(…, V) logits of each member → logits of the averaged distribution; of one member as they are.

        They are shifted to where the logits of the members lie: a repetition penalty asks for their sign.
        """
        if len(logits) == 1:
            return logits[0]
        stacked = torch.stack([part if part.dtype == torch.float64 else part.float() for part in logits])
        totals = stacked.logsumexp(-1, keepdim=True)
        logprobs = stacked - totals
        mean = (
            logprobs.mean(0) if self.average == "logprobs" else logprobs.logsumexp(0) - math.log(len(logits))
        )
        return mean + totals.mean(0)

    def forward(self, *args: Tensor, segments: Tensor | None = None, **kwargs: Tensor | None) -> Tensor:
        """What a member takes → (B, T, V)"""
        return self.head(self.hidden_states(*args, segments=segments, **kwargs), self.token, segments)

    def hidden_states(self, *args: Tensor, **kwargs: Tensor | None) -> Tensor:
        """What a member takes → (B, T, dims of all members)"""
        return _join([cast(Any, model).hidden_states(*args, **kwargs) for model in self.models])

    def decoder_hidden_states(  # type: ignore[override]
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        memory: EnsembleMemory | None = None,
    ) -> Tensor:
        """(B, T) → (B, T, dims of all members)"""
        return _join(
            [
                model.decoder_hidden_states(tokens, positions=positions, segments=segments, memory=part)
                for model, part in zip(self.models, self.split_memory(memory), strict=True)
            ]
        )

    def encode_memory(self, source: Tensor, **kwargs: Tensor | None) -> EnsembleMemory:
        """(B, S) → the cross-attention memory of each member. Raises ValueError for decoders."""
        if not self.design.is_encoder_decoder:
            raise ValueError("these models have no source: give the text as the prompt")
        return EnsembleMemory(
            [cast(EncoderDecoder, model).encode_memory(source, **kwargs) for model in self.models]
        )

    def start(  # type: ignore[override]
        self, prompt: Tensor, *, memory: EnsembleMemory | None = None, **kwargs: Any
    ) -> tuple[Tensor, EnsembleState]:
        """Prefill a prompt, (B, T) → the logits of the next token, (B, V), and the state."""
        return self.start_with(self.models, prompt, memory=memory, **kwargs)

    def start_with(
        self, runners: Sequence[Any], prompt: Tensor, *, memory: EnsembleMemory | None = None, **kwargs: Any
    ) -> tuple[Tensor, EnsembleState]:
        """`start` by the members, or by something that runs each of them."""
        outputs = [
            runner.start(prompt, memory=part, **kwargs)
            for runner, part in zip(runners, self.split_memory(memory), strict=True)
        ]
        return self.average_logits([logits for logits, _ in outputs]), EnsembleState(
            [state for _, state in outputs]
        )

    def extend(  # type: ignore[override]
        self, tokens: Tensor, state: EnsembleState, **kwargs: Tensor | None
    ) -> Tensor:
        """Append (B, n) tokens to the state → their hidden states, (B, n, dims of all members)"""
        return _join(
            [
                model.extend(tokens, part, **kwargs)
                for model, part in zip(self.models, state.states, strict=True)
            ]
        )

    def split_memory(self, memory: EnsembleMemory | None) -> Sequence[Memory | None]:
        return [None] * len(self.members) if memory is None else memory.memories


def ensemble(models: Sequence[Model], *, average: EnsembleAverage = "probabilities") -> Ensemble:
    """One model of several, for kl.generate and kl.decode: the mean of what they predict.

    `average` is the mean of the probabilities, or with "logprobs" their geometric mean. An ensemble among the
    models counts as its members. Raises ValueError unless all read and write the same tokens; that these mean
    the same is up to the caller.
    """
    if average not in get_args(EnsembleAverage):
        raise ValueError(f"average is {average!r}: it must be {' or '.join(get_args(EnsembleAverage))}")
    if not models:
        raise ValueError("an ensemble needs at least one model: none was given")
    members = [
        member for model in models for member in (model.models if isinstance(model, Ensemble) else [model])
    ]
    first = members[0]
    for n, model in enumerate(members):
        if not isinstance(model, Decoder | EncoderDecoder):
            raise ValueError(f"model {n} is an encoder and writes no text: leave it out")
        for what, value in _interface(model.design).items():
            if value != (expected := _interface(first.design)[what]):
                raise ValueError(
                    f"model {n} and model 0 differ: {what} is {value} and {expected}; the models of an "
                    "ensemble read and write the same tokens"
                )
        if (device := next(model.parameters()).device) != next(first.parameters()).device:
            raise ValueError(f"model {n} is on {device}: put all models on one device")
    return Ensemble(cast(list[Decoder | EncoderDecoder], members), average)


def _interface(design: Design) -> dict[str, object]:
    return {
        "the kind": design.kind,
        "the vocabulary": design.vocab,
        "the vocabulary of the source": design.source_vocab,
    }


def _max_positions(design: Design) -> float:
    return math.inf if design.max_positions is None else design.max_positions


def _join(parts: Sequence[Tensor]) -> Tensor:
    """(…, dim) of each member side by side; of one member as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)
