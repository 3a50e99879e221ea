"""A request that is being served: what is still to be read, what was written, and when each of its texts
ends.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from keepleft.decoding.batch import DEFAULT_NEW_TOKENS, DecodeBatch
from keepleft.decoding.beam import Beam
from keepleft.decoding.dispatch import make_strategy
from keepleft.decoding.generation_config import GenerationConfig, decoder_start_token
from keepleft.decoding.hypotheses import FinishedSequence
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.decoding.stopping import ended_by_itself, hits_stop_string
from keepleft.inference.page_table import PageTable
from keepleft.serving.engine.request import Event, FinishEvent, FinishReason, RequestHandle, TokenEvent


class Sequences:
    """Made when its turn has come; `prompt_tokens` is what its texts begin with, and grows when it is put
    back and read again.
    """

    def __init__(self, handle: RequestHandle, model: Any, tokenizer: Any) -> None:
        request = handle.request
        options = request.options
        self.handle = handle
        self.request = request
        self.tokenizer = tokenizer
        self.is_encoder_decoder = model.design.encoder is not None
        self.device = model.token.weight.device
        self.prompt_tokens = (
            [decoder_start_token(options), *request.prefix]
            if self.is_encoder_decoder
            else [*request.tokens, *request.prefix]
        )
        self.prompt_length, self.max_new_tokens, _ = request_lengths(
            model, options, len(request.tokens), len(request.prefix)
        )
        batch = DecodeBatch(torch.tensor([self.prompt_tokens]), None, [self.max_new_tokens])
        if options.encoder_repetition_penalty is not None or options.encoder_no_repeat_ngram_size is not None:
            batch = replace(
                batch,
                source=torch.tensor([list(request.tokens)], device=self.device)
                if self.is_encoder_decoder
                else None,
            )
        self.is_beam_search = options.beam_count > 1
        # texts that are not beams are ended here, by strings and by time, not by the strategy
        strategy_options = (
            options if self.is_beam_search else replace(options, stop_strings=None, max_time=None)
        )
        self.strategy: SamplingStrategy | Beam = make_strategy(tokenizer, strategy_options, batch)
        self.deadline = None if options.max_time is None else time.monotonic() + options.max_time
        self.num_rows = options.beam_count if self.is_beam_search else options.num_sequences
        # all that it can ever need
        self.max_slots = max_slots(self.prompt_length, self.num_rows, self.max_new_tokens)
        self.seeds = [] if self.strategy.seeds is None else self.strategy.seeds.tolist()
        self.page_table = PageTable(width=self.num_rows)
        self.hypotheses: Any = None  # of a group, while it is not in one
        self.new_tokens: list[list[int]] = [[] for _ in range(self.num_rows)]
        self.cumulative_logprobs = [0.0] * self.num_rows
        self.finished = [False] * self.num_rows
        self.next_tokens = [self.prompt_tokens[-1]] * self.num_rows  # the token that each text feeds next
        self.only_at_end = request.only_at_end and request.logprobs is None
        self.admission_order = 0  # when it was let in
        self.eos_ids = frozenset(options.eos_ids)
        self.stop_strings = options.stop_list
        # its tokens are chosen from scores alone: nothing of the text so far is looked at
        self.logits_only = not self.is_beam_search and all(
            getattr(processor, "logits_only", False) for processor in self.strategy.processors
        )
        # what is chosen together has it in common
        self.sampling_key = (tuple(map(id, self.strategy.processors)), bool(self.seeds))

    @property
    def pending_prompt(self) -> list[int]:
        """What must be in its pages before it takes steps, and is not yet."""
        return self.prompt_tokens[self.page_table.num_tokens : -1]

    def preempt(self) -> None:
        """Its pages are gone: what it wrote is read again, as if it had been in the prompt.

        For requests of one text.
        """
        self.prompt_tokens = [*self.prompt_tokens[: self.prompt_length], *self.new_tokens[0]]

    def append(
        self,
        index: int,
        token: int,
        logprob: float,
        raw_logprobs: tuple[float, list[tuple[int, float]]] | None,
    ) -> list[Event]:
        """One more token of a text, and its end where it has come."""
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
            events += self.finish(index, finish_reason)
        return events

    def finish(self, index: int, finish_reason: FinishReason) -> list[Event]:
        self.finished[index] = True
        return [
            FinishEvent(
                index,
                finish_reason,
                FinishedSequence(self.new_tokens[index], self.cumulative_logprobs[index]),
                last=all(self.finished),
            )
        ]

    def finish_beams(self, hypotheses: Any) -> list[Event]:
        """What beams found."""
        results = self.strategy.results(hypotheses)[0]
        self.finished = [True] * self.num_rows
        finish_reasons: list[FinishReason] = [
            "stop" if ended_by_itself(self.tokenizer, self.request.options, sequence.tokens) else "length"
            for sequence in results
        ]
        return [
            FinishEvent(n, finish_reasons[n], sequence, last=n == len(results) - 1)
            for n, sequence in enumerate(results)
        ]

    def _finish_reason(self, index: int, token: int) -> FinishReason | None:
        if token in self.eos_ids or (
            self.stop_strings
            and hits_stop_string(self.tokenizer, self.stop_strings, [self.new_tokens[index]])[0]
        ):
            return "stop"
        if len(self.new_tokens[index]) >= self.max_new_tokens or (
            self.deadline is not None and time.monotonic() >= self.deadline
        ):
            return "length"
        return None


def max_slots(prompt_length: int, num_rows: int, max_new_tokens: int) -> int:
    """Slots for the prompt but its last token, and for all that each text feeds: that token, and all it
    writes but the last.
    """
    return prompt_length - 1 + num_rows * max(1, max_new_tokens)


def request_lengths(
    model: Any, options: GenerationConfig, num_tokens: int, num_prefix: int
) -> tuple[int, int, int]:
    """Of a request: tokens that its text begins with, tokens that may be added, and tokens of its source."""
    max_positions = model.design.max_positions
    if model.design.encoder is None:
        return (
            num_tokens + num_prefix,
            options.resolve_max_new_tokens(num_tokens + num_prefix, DEFAULT_NEW_TOKENS, max_positions),
            0,
        )
    decoder_start_token(options)
    return (
        1 + num_prefix,
        options.resolve_max_new_tokens(1 + num_prefix, 2 * num_tokens + 10, max_positions),
        num_tokens,
    )
