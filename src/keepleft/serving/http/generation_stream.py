"""The output of a request plan: engine events become deltas of text as they arrive, or finished choices."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from keepleft.data.token_text import CONTEXT_TOKENS
from keepleft.decoding.detokenizer import IncrementalDetokenizer
from keepleft.decoding.generation_config import decoder_start_token
from keepleft.decoding.score import ScoredToken
from keepleft.serving.engine.request import FinishEvent, GenerationRequest, PromptRequest, TokenEvent
from keepleft.serving.http.engine_requests import EngineRequests, finish_error, score_prompts
from keepleft.serving.http.logprobs import TokenLogprob, token_logprob
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import RequestPlan
from keepleft.serving.http.schemas.responses import ChoiceFinishReason
from keepleft.serving.http.service import Service


@dataclass(frozen=True)
class ChoiceDelta:
    """The next piece of one choice."""

    choice: int
    text: str
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: ChoiceFinishReason | None = None  # None: more follows
    score: float = 0.0  # of the whole sequence, in the last delta
    length: int = 0  # its tokens, in the last delta


@dataclass
class FinishedChoice:
    """One choice, complete."""

    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: ChoiceFinishReason = "length"
    score: float = 0.0
    length: int = 0


class SequenceText:
    """The text of one sequence while it is generated."""

    def __init__(self, service: Service, request: GenerationRequest, stop_strings: Sequence[str]) -> None:
        self.tokenizer = service.tokenizer
        self.request = request
        self.prompt_tokens = [] if service.is_encoder_decoder else list(request.tokens)
        self.detokenizer = IncrementalDetokenizer(service.tokenizer, stop_strings)
        self.pending_prefix = self.detokenizer.begin(request.prefix)
        self.pending_logprobs: list[tuple[TokenLogprob, int]] = []  # with the end of each token in the text
        self.num_tokens = 0
        self.finished = False

    def add(
        self, token: int, logprob: float | None = None, top_logprobs: Sequence[tuple[int, float]] = ()
    ) -> tuple[str, list[TokenLogprob]]:
        """The text that can be shown after one more token, and the logprobs of the tokens in it."""
        offset = len(self.detokenizer.text)
        self.num_tokens += 1
        previous_tokens = [*self.prompt_tokens[-CONTEXT_TOKENS:], *self.detokenizer.tokens[-CONTEXT_TOKENS:]]
        piece = self._take_prefix() + self.detokenizer.add(token)
        if self.request.logprobs is not None and logprob is not None:
            entry = token_logprob(self.tokenizer, previous_tokens, token, offset, logprob, top_logprobs)
            self.pending_logprobs.append((entry, len(self.detokenizer.text)))
        ready = [
            entry
            for entry, end in self.pending_logprobs
            if end <= self.detokenizer.shown_length and not self.detokenizer.stopped
        ]
        del self.pending_logprobs[: len(ready)]
        return piece, ready

    def end(self) -> tuple[str, list[TokenLogprob]]:
        """The text and logprobs that were held back; without those behind a stop string."""
        piece = self._take_prefix() + self.detokenizer.end()
        self.finished = True
        cut = len(self.detokenizer.text) if self.detokenizer.stopped else None
        return piece, [entry for entry, _ in self.pending_logprobs if cut is None or entry.text_offset < cut]

    @property
    def done(self) -> bool:
        """No more tokens are needed."""
        return self.finished or self.detokenizer.stopped

    def _take_prefix(self) -> str:
        piece = self.pending_prefix
        self.pending_prefix = ""
        return piece


class GenerationStream:
    """The output of a plan, after `start`. Choice n * num_sequences + k is sequence k of prompt n.

    `only_at_end`: the engine reports tokens when a sequence finishes, not one by one.
    """

    def __init__(
        self, service: Service, plan: RequestPlan, record: RequestRecord, *, only_at_end: bool = False
    ) -> None:
        self.service = service
        self.plan = plan
        self.record = record
        self.only_at_end = only_at_end
        self.sequences = [
            [SequenceText(service, request, plan.stop_strings) for _ in range(plan.num_sequences)]
            for request in plan.requests
        ]
        self.active = [n for n, request in enumerate(plan.requests) if request.options.max_new_tokens]
        self.engine_requests = EngineRequests(service.engine_thread)

    def start(self) -> None:
        """Submit the requests to the engine, from the event loop that reads the stream.

        Raises ValueError, OverloadedError or ShuttingDownError; then nothing is in flight.
        """
        requests = [replace(self.plan.requests[n], only_at_end=self.only_at_end) for n in self.active]
        self.engine_requests.submit(requests, max_in_flight=self.plan.max_in_flight)
        self.record.prompt_tokens += sum(len(request.tokens) for request in self.plan.requests)
        self.record.mark_submitted()

    def close(self) -> None:
        """Cancel what has not finished."""
        self.engine_requests.close()

    async def deltas(self) -> AsyncIterator[ChoiceDelta]:
        """The choices of all prompts, piece by piece, as text can be shown."""
        for n, sequences in enumerate(self.sequences):
            if n not in self.active:
                for k, sequence in enumerate(sequences):
                    for delta in self._to_deltas(n, k, *sequence.end(), finish_reason="length"):
                        yield delta
        async for index, event in self.engine_requests.events():
            self.record.mark_scheduled(self.engine_requests.handles[index].started_at)
            n = self.active[index]
            if isinstance(event, TokenEvent):
                deltas = self._on_token(n, index, event)
            elif event.finish_reason in ("stop", "length"):
                deltas = await self._on_finish(n, event)
            elif all(sequence.done for sequence in self.sequences[n]):  # cancelled at its stop strings
                deltas = [
                    delta
                    for k, sequence in enumerate(self.sequences[n])
                    if not sequence.finished
                    for delta in self._to_deltas(
                        n, k, *sequence.end(), finish_reason="stop", length=sequence.num_tokens
                    )
                ]
            else:
                raise finish_error(event)
            for delta in deltas:
                yield delta

    def _on_token(self, n: int, index: int, event: TokenEvent) -> list[ChoiceDelta]:
        sequence = self.sequences[n][event.index]
        if sequence.detokenizer.stopped:  # the engine decodes differently and continues: it need not
            if all(sibling.done for sibling in self.sequences[n]):
                self.engine_requests.cancel(index)
            return []
        self.record.count_token()
        text, logprobs = sequence.add(event.token, event.logprob, event.top_logprobs)
        return self._to_deltas(n, event.index, text, logprobs) if text or logprobs else []

    async def _on_finish(self, n: int, event: FinishEvent) -> list[ChoiceDelta]:
        """The end of a sequence, with the tokens that had no events of their own: those of beam search."""
        sequence = self.sequences[n][event.index]
        tokens = event.sequence.tokens if event.sequence is not None else []
        remaining = [] if sequence.detokenizer.stopped else tokens[sequence.num_tokens :]
        scored: Sequence[ScoredToken | None] = [None] * len(remaining)
        if remaining and sequence.request.logprobs is not None:
            (scored_tokens,) = await score_prompts(
                self.service.engine_thread, [_score_request(sequence.request, self.service, tokens)]
            )
            scored = scored_tokens[sequence.num_tokens :]
        text = ""
        logprobs: list[TokenLogprob] = []
        for token, entry in zip(remaining, scored, strict=True):
            await self.engine_requests.take_turns()
            self.record.count_token()
            piece, ready = (
                sequence.add(token)
                if entry is None
                else sequence.add(token, entry.logprob, entry.top_logprobs)
            )
            text += piece
            logprobs += ready
        piece, last_logprobs = sequence.end()
        stopped = event.finish_reason == "stop" or sequence.detokenizer.stopped
        return self._to_deltas(
            n,
            event.index,
            text + piece,
            logprobs + last_logprobs,
            finish_reason="stop" if stopped else "length",
            score=0.0 if event.sequence is None else event.sequence.score,
            length=len(tokens),
        )

    def _to_deltas(
        self,
        n: int,
        k: int,
        text: str,
        logprobs: list[TokenLogprob],
        *,
        finish_reason: ChoiceFinishReason | None = None,
        score: float = 0.0,
        length: int = 0,
    ) -> list[ChoiceDelta]:
        """One delta; one for each choice where a single greedy sequence stands for all of them."""
        choices = range(self.plan.num_choices) if self.plan.repeats_sequence else [k]
        return [
            ChoiceDelta(n * self.choices_per_prompt + choice, text, logprobs, finish_reason, score, length)
            for choice in choices
        ]

    @property
    def choices_per_prompt(self) -> int:
        return self.plan.num_choices if self.plan.repeats_sequence else self.plan.num_sequences

    async def choices(self) -> list[list[FinishedChoice]]:
        """The finished choices of each prompt.

        Where there are more sequences than choices (best_of), those of the highest log-probability per token.
        """
        plan = self.plan
        count = self.choices_per_prompt
        finished = [FinishedChoice() for _ in range(count * len(plan.requests))]
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
        rows = [finished[start : start + count] for start in range(0, len(finished), count)]
        is_beam_search = any(request.options.beam_count > 1 for request in plan.requests)
        if count > plan.num_choices and not is_beam_search:  # beams are ranked already
            rows = [sorted(row, key=lambda choice: -choice.score / max(1, choice.length)) for row in rows]
        return [row[: plan.num_choices] for row in rows]


def _score_request(request: GenerationRequest, service: Service, tokens: list[int]) -> PromptRequest:
    """A request for the log-probabilities of generated tokens."""
    if service.is_encoder_decoder:
        source = list(request.tokens)
        context = [decoder_start_token(request.options), *request.prefix]
    else:
        source = []
        context = [*request.tokens, *request.prefix]
    return PromptRequest(
        "score",
        [*context, *tokens],
        source,
        num_context=len(context),
        top_logprobs=request.logprobs or 0,
        tenant=request.tenant,
    )
