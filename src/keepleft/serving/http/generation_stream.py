"""Tokens that are heard, told as text: piece by piece as it can be shown, or whole texts at their end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keepleft.decoding.detokenizer import IncrementalDetokenizer
from keepleft.decoding.generation_config import decoder_start_token
from keepleft.decoding.score import ScoredToken, score_tokens
from keepleft.serving.engine.request import FinishEvent, GenerationRequest, ShuttingDownError, TokenEvent
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.logprobs import TokenLogprob, token_logprob
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import RequestPlan
from keepleft.serving.http.request_streams import RequestStreams
from keepleft.serving.http.schemas.responses import ChoiceFinishReason
from keepleft.serving.http.service import Service


@dataclass(frozen=True)
class ChoiceDelta:
    """A little more of one choice."""

    choice: int
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: ChoiceFinishReason | None = None  # it has ended, and why
    score: float = 0.0  # of the whole, at its end
    length: int = 0  # its tokens, at its end


@dataclass
class FinishedChoice:
    """One choice at its end."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: ChoiceFinishReason = "length"
    score: float = 0.0
    length: int = 0


class ChoiceText:
    """One text while it is written."""

    def __init__(self, service: Service, request: GenerationRequest, stop_strings: Sequence[str]) -> None:
        self.tokenizer = service.tokenizer
        self.request = request
        self.prompt_tokens = [] if service.is_encoder_decoder else list(request.tokens)
        self.detokenizer = IncrementalDetokenizer(service.tokenizer, stop_strings)
        self.pending_prefix = self.detokenizer.begin(request.prefix)
        self.pending_logprobs: list[
            tuple[TokenLogprob, int]
        ] = []  # thoughts of what is not shown yet, and where their text ends
        self.num_tokens = 0
        self.finished = False

    def add(
        self, token: int, logprob: float | None = None, top_logprobs: Sequence[tuple[int, float]] = ()
    ) -> tuple[str, list[TokenLogprob]]:
        offset = len(self.detokenizer.text)
        self.num_tokens = self.num_tokens + 1
        previous_tokens = [*self.prompt_tokens[-32:], *self.detokenizer.tokens[-32:]]
        piece = self._take_prefix() + self.detokenizer.add(token)
        if self.request.logprobs is not None and logprob is not None:
            self.pending_logprobs.append(
                (
                    token_logprob(self.tokenizer, previous_tokens, token, offset, logprob, top_logprobs),
                    len(self.detokenizer.text),
                )
            )
        ready = [
            entry
            for entry, end in self.pending_logprobs
            if end <= self.detokenizer.shown_length and not self.detokenizer.stopped
        ]
        self.pending_logprobs = self.pending_logprobs[len(ready) :] if ready else self.pending_logprobs
        return piece, ready

    def end(self) -> tuple[str, list[TokenLogprob]]:
        piece = self._take_prefix() + self.detokenizer.end()
        self.finished = True
        cut = len(self.detokenizer.text) if self.detokenizer.stopped else None
        return piece, [entry for entry, _ in self.pending_logprobs if cut is None or entry.text_offset < cut]

    def _take_prefix(self) -> str:
        piece = self.pending_prefix
        self.pending_prefix = ""
        return piece


class GenerationStream:
    """An order on its way. Choice n * num_sequences + k is text k of prompt n.

    `only_at_end`: nobody looks before the end.
    """

    def __init__(
        self, service: Service, plan: RequestPlan, record: RequestRecord, *, only_at_end: bool = False
    ) -> None:
        self.service = service
        self.plan = plan
        self.record = record
        self.choice_texts = [
            [ChoiceText(service, request, plan.stop_strings) for _ in range(plan.num_sequences)]
            for request in plan.requests
        ]
        self.active = [n for n, request in enumerate(plan.requests) if request.options.max_new_tokens]
        self.request_streams = RequestStreams(
            service.engine_thread, [replace(plan.requests[n], only_at_end=only_at_end) for n in self.active]
        )
        record.prompt_tokens += sum(len(request.tokens) for request in plan.requests)
        record.mark_submitted()

    def close(self) -> None:
        self.request_streams.close()

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """Everything that is written, as it can be shown."""
        for n, choice_texts in enumerate(self.choice_texts):
            if n not in self.active:
                for k, choice_text in enumerate(choice_texts):
                    for delta in self._to_choices(n, k, *choice_text.end(), finish_reason="length"):
                        yield delta
        async for index, event in self.request_streams.events():
            self.record.mark_scheduled(self.request_streams.handles[index].started_at)
            n = self.active[index]
            choice_text = self.choice_texts[n][event.index]
            if isinstance(event, TokenEvent):
                deltas = self._on_token(n, index, event, choice_text)
            elif event.finish_reason in ("stop", "length"):
                deltas = await self._on_finish(n, event, choice_text)
            elif all(sibling.finished or sibling.detokenizer.stopped for sibling in self.choice_texts[n]):
                deltas = [
                    delta
                    for k, sibling in enumerate(self.choice_texts[n])
                    if not sibling.finished
                    for delta in self._to_choices(
                        n, k, *sibling.end(), finish_reason="stop", length=sibling.num_tokens
                    )
                ]
            else:
                raise _finish_error(event)
            for delta in deltas:
                yield delta

    def _on_token(self, n: int, index: int, event: TokenEvent, choice_text: ChoiceText) -> list[ChoiceDelta]:
        if choice_text.detokenizer.stopped:  # the engine reads otherwise and goes on: it need not
            if all(sibling.finished or sibling.detokenizer.stopped for sibling in self.choice_texts[n]):
                self.request_streams.cancel(index)
            return []
        self.record.count_token()
        text, logprobs = choice_text.add(event.token, event.logprob, event.top_logprobs)
        return self._to_choices(n, event.index, text, logprobs) if text or logprobs else []

    async def _on_finish(self, n: int, event: FinishEvent, choice_text: ChoiceText) -> list[ChoiceDelta]:
        """The end of a text; what was found by beams comes all at once."""
        tokens = event.sequence.tokens if event.sequence is not None else []
        remaining = [] if choice_text.detokenizer.stopped else tokens[choice_text.num_tokens :]
        scored: Sequence[ScoredToken | None] = [None] * len(remaining)
        if remaining and choice_text.request.logprobs is not None:
            scored = (
                await self.service.in_engine_thread(
                    partial(_score_tokens, self.service.model, choice_text.request, tokens)
                )
            )[choice_text.num_tokens :]
        text, logprobs = "", list[TokenLogprob]()
        for token, entry in zip(remaining, scored, strict=True):
            self.record.count_token()
            piece, ready = choice_text.add(
                token, *(() if entry is None else (entry.logprob, entry.top_logprobs))
            )
            text, logprobs = text + piece, logprobs + ready
        piece, last_logprobs = choice_text.end()
        finish_reason: ChoiceFinishReason = (
            "stop" if event.finish_reason == "stop" or choice_text.detokenizer.stopped else "length"
        )
        score = 0.0 if event.sequence is None else event.sequence.score
        return self._to_choices(
            n,
            event.index,
            text + piece,
            logprobs + last_logprobs,
            finish_reason=finish_reason,
            score=score,
            length=len(tokens),
        )

    def _to_choices(
        self, n: int, k: int, text: str, logprobs: list[TokenLogprob], **finish_fields: Any
    ) -> list[ChoiceDelta]:
        """The choices that a text is: one, or all where there is one way to be greedy."""
        choices_per_prompt = self.plan.num_choices if self.plan.repeats_sequence else self.plan.num_sequences
        choices = range(self.plan.num_choices) if self.plan.repeats_sequence else [k]
        return [
            ChoiceDelta(n * choices_per_prompt + choice, text, logprobs, **finish_fields)
            for choice in choices
        ]

    async def choices(self) -> list[list[FinishedChoice]]:
        """For each prompt its choices; of more texts than choices, those of the highest log-probability per
        token.
        """
        plan = self.plan
        choices_per_prompt = plan.num_choices if plan.repeats_sequence else plan.num_sequences
        finished = [FinishedChoice() for _ in range(choices_per_prompt * len(plan.requests))]
        try:
            async for delta in self.deltas():
                choice = finished[delta.choice]
                choice.text += delta.text
                choice.logprobs += delta.logprobs
                if delta.finish_reason is not None:
                    choice.finish_reason = delta.finish_reason
                    choice.score = delta.score
                    choice.length = delta.length
        finally:
            self.close()
        rows = [
            finished[start : start + choices_per_prompt]
            for start in range(0, len(finished), choices_per_prompt)
        ]
        if choices_per_prompt > plan.num_choices and not any(
            request.options.beam_count > 1 for request in plan.requests
        ):
            rows = [sorted(row, key=lambda choice: -choice.score / max(1, choice.length)) for row in rows]
        return [row[: plan.num_choices] for row in rows]


def _score_tokens(model: Any, request: GenerationRequest, tokens: list[int]) -> list[ScoredToken]:
    is_encoder_decoder = model.design.is_encoder_decoder
    prefix_tokens = (
        [decoder_start_token(request.options), *request.prefix]
        if is_encoder_decoder
        else [*request.tokens, *request.prefix]
    )
    return list(
        score_tokens(
            model,
            prefix_tokens,
            tokens,
            source=list(request.tokens) if is_encoder_decoder else None,
            top_logprobs=request.logprobs or 0,
        )
    )


def _finish_error(event: FinishEvent) -> Exception:
    if event.finish_reason == "cancelled":
        return ShuttingDownError(
            "the server is shutting down, and this text was not finished in time: ask another one"
        )
    if event.finish_reason == "invalid":
        return APIError(400, event.message, code="invalid_request")
    return APIError(500, event.message or "the model could not go on", code="model_failed")
