"""The slow definition: each request by itself, one after the other.

Whatever serves many at once must say the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from keepleft.decoding.batch import DecodeBatch
from keepleft.decoding.beam import Beam
from keepleft.decoding.dispatch import decode_steps, make_strategy
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.score import score_tokens
from keepleft.decoding.stopping import ended_by_itself
from keepleft.serving.engine.request import Events, FinishEvent, GenerationRequest, RequestHandle, TokenEvent


class SequentialEngine:
    """A model and its tokenizer (only stop strings and rules need it)."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.waiting: deque[RequestHandle] = deque()
        self.current: Iterator[Events] | None = None
        self.prompt_tokens_total = self.generation_tokens_total = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def validate(self, request: GenerationRequest) -> None:
        request.options.check()

    def submit(self, handle: RequestHandle) -> None:
        self.waiting.append(handle)

    def clear(self) -> None:
        self.waiting.clear()
        self.current = None

    def step(self) -> Events:
        """One token of the request whose turn it is."""
        if cancelled := [handle for handle in self.waiting if handle.cancelled]:
            if cancelled[0] is self.waiting[0] and self.current is not None:
                self.current.close()  # type: ignore[attr-defined]
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
        except ValueError as error:  # our own words
            events = [(handle, FinishEvent(0, "invalid", message=str(error), last=True))]
        except Exception as error:  # a request that fails is told so, and the next one is served
            events = [
                (
                    handle,
                    FinishEvent(
                        0, "failed", message=f"the model could not go on: {type(error).__name__}", last=True
                    ),
                )
            ]
        if events is None or any(isinstance(event, FinishEvent) and event.last for _, event in events):
            self.waiting.popleft()
            self.current = None
        return events or []

    def stats(self) -> dict[str, float]:
        return {
            "running": float(self.current is not None),
            "waiting": max(0, len(self.waiting) - 1),
            "prompt_tokens": self.prompt_tokens_total,
            "generation_tokens": self.generation_tokens_total,
        }

    def _serve(self, handle: RequestHandle) -> Iterator[Events]:
        request = handle.request
        batch = DecodeBatch.build(self.model, [list(request.tokens)], request.options, [list(request.prefix)])
        self.prompt_tokens_total += len(request.tokens)
        strategy = make_strategy(self.tokenizer, request.options, batch)
        previous: Hypotheses | None = None
        for hypotheses in decode_steps(self.model, batch, strategy, request.options):
            self.generation_tokens_total += len(hypotheses.tokens)
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
        yield [
            (
                handle,
                FinishEvent(
                    n,
                    "stop" if ended_by_itself(self.tokenizer, request.options, sequence.tokens) else "length",
                    sequence,
                    last=n == len(sequences) - 1,
                ),
            )
            for n, sequence in enumerate(sequences)
        ]

    def _token_event(
        self, request: GenerationRequest, batch: DecodeBatch, hypotheses: Hypotheses, n: int
    ) -> TokenEvent:
        token = int(hypotheses.tokens[n, -1])
        if request.logprobs is None:
            return TokenEvent(n, token)
        new_tokens = hypotheses.tokens[n, hypotheses.prompt_width :].tolist()
        source = None if batch.source is None else list(request.tokens)
        token_logprob = score_tokens(
            self.model, batch.prompt[0].tolist(), new_tokens, source=source, top_logprobs=request.logprobs
        )[-1]
        return TokenEvent(n, token, token_logprob.logprob, list(token_logprob.top_logprobs))
