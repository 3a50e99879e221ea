"""A request being served: its pending prompt, the tokens generated so far, and when each sequence ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from keepleft.decoding.batch import DecodeBatch, default_new_tokens
from keepleft.decoding.beam import Beam
from keepleft.decoding.dispatch import make_strategy
from keepleft.decoding.generation_config import GenerationConfig, decoder_start_token
from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.decoding.stopping import ended_by_itself, hits_stop_string
from keepleft.models.design import Design
from keepleft.models.transformer import CausalModel
from keepleft.serving.engine.request import (
    Event,
    FinishEvent,
    FinishReason,
    GenerationRequest,
    RequestHandle,
    TokenEvent,
)
from keepleft.serving.engine.scheduled_request import ScheduledRequest

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SampledLogprobs = tuple[float, list[tuple[int, float]]]  # of a token, and the likeliest tokens with theirs


class RequestLengths(NamedTuple):
    """Lengths of a request, in tokens."""

    prompt: int  # tokens that each sequence starts with
    max_new_tokens: int
    source: int  # 0 for a decoder


class SequenceGroup(ScheduledRequest):
    """The sequences of one request: its beams, or its `num_return_sequences` samples.

    `prompt_tokens` is what every sequence starts with; when the request is preempted, it grows by what was
    generated.
    """

    def __init__(self, handle: RequestHandle, model: CausalModel, tokenizer: Tokenizer | None) -> None:
        request = handle.request
        assert isinstance(request, GenerationRequest)
        options = request.options
        self.request = request
        self.tokenizer = tokenizer
        self.is_encoder_decoder = model.design.is_encoder_decoder
        self.device = model.token.weight.device
        self.prompt_tokens = (
            [decoder_start_token(options), *request.prefix]
            if self.is_encoder_decoder
            else [*request.tokens, *request.prefix]
        )
        lengths = request_lengths(model.design, options, len(request.tokens), len(request.prefix))
        self.prompt_length = lengths.prompt
        self.max_new_tokens = lengths.max_new_tokens
        self.is_beam_search = options.beam_count > 1
        self.strategy = self._make_strategy()
        self.deadline = None if options.max_time is None else time.monotonic() + options.max_time
        num_rows = options.beam_count if self.is_beam_search else options.num_sequences
        super().__init__(
            handle,
            inputs=self.prompt_tokens[:-1],  # the last one is left to the first decode step
            source=request.tokens if self.is_encoder_decoder else (),
            num_rows=num_rows,
            max_slots=max_slots(self.prompt_length, num_rows, self.max_new_tokens),
        )
        self.is_deterministic = bool(options.deterministic)
        self.seeds = [] if self.strategy.seeds is None else self.strategy.seeds.tolist()
        self.hypotheses: Hypotheses | None = None  # set while it is between two strategy batches
        self.new_tokens: list[list[int]] = [[] for _ in range(self.num_rows)]
        self.cumulative_logprobs = [0.0] * self.num_rows
        self.finished = [False] * self.num_rows
        self.next_tokens = [self.prompt_tokens[-1]] * self.num_rows  # each sequence's input to the next step
        self.only_at_end = request.only_at_end and request.logprobs is None
        self.eos_ids = frozenset(options.eos_ids)
        self.stop_strings = options.stop_list
        # tokens are selected from the logits alone, whatever was generated before
        self.logits_only = not self.is_beam_search and all(
            getattr(processor, "logits_only", False) for processor in self.strategy.processors
        )
        # requests with equal keys are sampled in one batch
        self.sampling_key = (tuple(map(id, self.strategy.processors)), bool(self.seeds))

    def preempt(self) -> None:
        """Its pages are gone: what it generated is prefilled again with the prompt. For a single sequence."""
        self.prompt_tokens = [*self.prompt_tokens[: self.prompt_length], *self.new_tokens[0]]
        self.inputs = self.prompt_tokens[:-1]

    def append(
        self, index: int, token: int, logprob: float, raw_logprobs: SampledLogprobs | None
    ) -> list[Event]:
        """Add a token to a sequence; events of the token, and of the sequence's end if it ends with it."""
        self.new_tokens[index].append(token)
        self.cumulative_logprobs[index] += logprob
        self.next_tokens[index] = token
        events: list[Event] = []
        if not self.only_at_end or len(self.new_tokens[index]) == 1:
            events.append(
                TokenEvent(index, token) if raw_logprobs is None else TokenEvent(index, token, *raw_logprobs)
            )
        finish_reason = self._finish_reason(index, token)
        if finish_reason is not None:
            events.append(self._finish(index, finish_reason))
        return events

    def finish_beams(self, hypotheses: Hypotheses) -> list[Event]:
        """End of a beam search: an event for each of its results, the best first."""
        results = self.strategy.results(hypotheses)[0]  # type: ignore[arg-type]
        self.finished = [True] * self.num_rows
        return [
            FinishEvent(
                n,
                "stop"
                if ended_by_itself(self.tokenizer, self.request.options, sequence.tokens)
                else "length",
                sequence,
                last=n == len(results) - 1,
            )
            for n, sequence in enumerate(results)
        ]

    def _make_strategy(self) -> SamplingStrategy | Beam:
        options = self.request.options
        source = None
        if self.is_encoder_decoder and (
            options.encoder_repetition_penalty is not None or options.encoder_no_repeat_ngram_size is not None
        ):
            source = torch.tensor([list(self.request.tokens)], device=self.device)
        batch = DecodeBatch(torch.tensor([self.prompt_tokens]), None, [self.max_new_tokens], source)
        if not self.is_beam_search:  # stop strings and time limits are checked here, not by the strategy
            options = replace(options, stop_strings=None, max_time=None)
        return make_strategy(self.tokenizer, options, batch, self.request.compiled_grammar)

    def _finish(self, index: int, finish_reason: FinishReason) -> FinishEvent:
        self.finished[index] = True
        sequence = FinishedSequence(self.new_tokens[index], self.cumulative_logprobs[index])
        return FinishEvent(index, finish_reason, sequence, last=all(self.finished))

    def _finish_reason(self, index: int, token: int) -> FinishReason | None:
        if token in self.eos_ids:
            return "stop"
        if self.stop_strings:
            assert self.tokenizer is not None  # refused at the start otherwise
            if hits_stop_string(self.tokenizer, self.stop_strings, [self.new_tokens[index]])[0]:
                return "stop"
        if len(self.new_tokens[index]) >= self.max_new_tokens or (
            self.deadline is not None and time.monotonic() >= self.deadline
        ):
            return "length"
        return None


def max_slots(prompt_length: int, num_rows: int, max_new_tokens: int) -> int:
    """KV slots that a request can need: its prompt but the last token, and all inputs of decode steps.

    The inputs of a sequence are the last prompt token and all new tokens but the last.
    """
    return prompt_length - 1 + num_rows * max(1, max_new_tokens)


def request_lengths(
    design: Design, options: GenerationConfig, num_tokens: int, num_prefix: int
) -> RequestLengths:
    """Lengths of a request; ValueError for an encoder-decoder without a decoder start token."""
    if design.is_encoder_decoder:
        decoder_start_token(options)  # raises if there is none
        prompt_length, source_length = 1 + num_prefix, num_tokens
    else:
        prompt_length, source_length = num_tokens + num_prefix, 0
    max_new_tokens = options.resolve_max_new_tokens(
        prompt_length, default_new_tokens(design, options, num_tokens), design.max_positions
    )
    return RequestLengths(prompt_length, max_new_tokens, source_length)
