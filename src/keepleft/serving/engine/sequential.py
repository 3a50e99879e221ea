"""Sequential engine: one request after the other. It is slow, and defines what every engine must return."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator
from typing import TYPE_CHECKING

from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.beam import Beam
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.score import score_tokens
from keepleft.decoding.stopping import ended_by_itself
from keepleft.models.transformer import CausalModel, Model
from keepleft.pipelines.predictor import classify_rows, embed_rows
from keepleft.serving.engine.activity import KeyActivity, count_activity
from keepleft.serving.engine.request import (
    Events,
    FinishEvent,
    GenerationRequest,
    PromptRequest,
    PromptResult,
    Request,
    RequestHandle,
    TokenEvent,
    failure,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class SequentialEngine:
    """Serves one request at a time; the tokenizer is only needed for stop strings and grammars."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.waiting: deque[RequestHandle] = deque()
        self.current: Generator[Events, None, None] | None = None  # of the first waiting request
        self.prompt_tokens: Counter[str] = Counter()  # by API key
        self.generation_tokens: Counter[str] = Counter()

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def validate(self, request: Request) -> None:
        if isinstance(request, GenerationRequest):
            request.options.check()

    def submit(self, handle: RequestHandle) -> None:
        self.waiting.append(handle)

    def clear(self) -> None:
        self.waiting.clear()
        self.current = None

    def step(self) -> Events:
        """One more token of the first request."""
        if cancelled := [handle for handle in self.waiting if handle.cancelled]:
            if cancelled[0] is self.waiting[0] and self.current is not None:
                self.current.close()
                self.current = None
            self.waiting = deque(handle for handle in self.waiting if not handle.cancelled)
            return [(handle, FinishEvent(0, "cancelled", last=True)) for handle in cancelled]
        if not self.waiting:
            return []
        handle = self.waiting[0]
        if self.current is None:
            handle.started_at = time.monotonic()
            self.current = self._serve(handle)
        try:
            events: Events | None = next(self.current, None)
        except Exception as error:  # only this request fails; the next one is served
            events = [(handle, failure(error))]
        if events is None or any(isinstance(event, FinishEvent) and event.last for _, event in events):
            self.waiting.popleft()
            self.current = None
        return events or []

    def stats(self) -> dict[str, float]:
        return {
            "running": float(self.current is not None),
            "waiting": max(0, len(self.waiting) - 1),
            "prompt_tokens": self.prompt_tokens.total(),
            "generation_tokens": self.generation_tokens.total(),
        }

    def activity(self) -> dict[str, KeyActivity]:
        num_running = int(self.current is not None)
        handles = list(self.waiting)
        running = [(handle.request.tenant, 1) for handle in handles[:num_running]]
        return count_activity(running, [], handles[num_running:], time.monotonic())

    def _serve(self, handle: RequestHandle) -> Generator[Events, None, None]:
        request, model = handle.request, self.model
        if isinstance(request, PromptRequest):
            yield [(handle, FinishEvent(0, "stop", last=True, result=self._read_prompt(request)))]
            return
        assert isinstance(model, CausalModel)  # an encoder gets no others
        batch = DecodeBatch.build(model, [list(request.tokens)], request.options, [list(request.prefix)])
        self.prompt_tokens[request.tenant.key] += len(request.tokens)
        strategy = make_strategy(self.tokenizer, request.options, batch, request.compiled_grammar)
        previous: Hypotheses | None = None
        for hypotheses in decode_steps(model, batch, strategy, request.options):
            self.generation_tokens[request.tenant.key] += len(hypotheses.tokens)
            if not isinstance(strategy, Beam):
                yield [
                    (handle, self._token_event(request, batch, hypotheses, n))
                    for n in range(len(hypotheses.tokens))
                    if previous is None or not bool(previous.done[n])
                ]
            previous = hypotheses
        assert previous is not None
        results = strategy.results(previous)  # type: ignore[arg-type]
        sequences = [sequence for result in results for sequence in result]
        events: Events = []
        for n, sequence in enumerate(sequences):
            stopped = ended_by_itself(self.tokenizer, request.options, sequence.tokens)
            last = n == len(sequences) - 1
            events.append((handle, FinishEvent(n, "stop" if stopped else "length", sequence, last=last)))
        yield events

    def _read_prompt(self, request: PromptRequest) -> PromptResult:
        self.prompt_tokens[request.tenant.key] += len(request.tokens) + len(request.source)
        tokens = list(request.tokens)
        if request.task == "score":
            return score_tokens(
                self.model,
                tokens[: request.num_context],
                tokens[request.num_context :],
                source=list(request.source) or None,
                top_logprobs=request.top_logprobs,
            )
        read = classify_rows if request.task == "classify" else embed_rows
        return read(self.model, [tokens])[0]

    def _token_event(
        self, request: GenerationRequest, batch: DecodeBatch, hypotheses: Hypotheses, index: int
    ) -> TokenEvent:
        token = int(hypotheses.tokens[index, -1])
        if request.logprobs is None:
            return TokenEvent(index, token)
        new_tokens = hypotheses.tokens[index, hypotheses.prompt_width :].tolist()
        source = None if batch.source is None else list(request.tokens)
        token_logprob = score_tokens(
            self.model, batch.prompt[0].tolist(), new_tokens, source=source, top_logprobs=request.logprobs
        )[-1]
        return TokenEvent(index, token, token_logprob.logprob, list(token_logprob.top_logprobs))
