"""The slow definition: each request by itself, one after the other. Whatever serves many at once must say the same."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from keepleft.decoding.beam import Beam
from keepleft.decoding.generate import Work, chosen, steps
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.rescore import rescored
from keepleft.decoding.stops import stopped
from keepleft.serving.asks import Ask, End, Heard, Ticket, Token


class Alone:
    """A model and its tokenizer (only stop strings and rules need it)."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.waiting: deque[Ticket] = deque()
        self.now: Iterator[Heard] | None = None
        self.read = self.written = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def look(self, ask: Ask) -> None:
        ask.options.check()

    def take(self, ticket: Ticket) -> None:
        self.waiting.append(ticket)

    def clear(self) -> None:
        self.waiting.clear()
        self.now = None

    def step(self) -> Heard:
        """One token of the request whose turn it is."""
        if gone := [ticket for ticket in self.waiting if ticket.dropped]:
            if gone[0] is self.waiting[0] and self.now is not None:
                self.now.close()  # type: ignore[attr-defined]
                self.now = None
            self.waiting = deque(ticket for ticket in self.waiting if not ticket.dropped)
            return [(ticket, End(0, "cancelled", last=True)) for ticket in gone]
        if not self.waiting:
            return []
        ticket = self.waiting[0]
        if self.now is None:
            ticket.began = time.monotonic()
            self.now = self._served(ticket)
        try:
            heard: Heard | None = next(self.now, None)
        except ValueError as error:  # our own words
            heard = [(ticket, End(0, "refused", message=str(error), last=True))]
        except Exception as error:  # a request that fails is told so, and the next one is served
            heard = [(ticket, End(0, "failed", message=f"the model could not go on: {type(error).__name__}", last=True))]
        if heard is None or any(isinstance(event, End) and event.last for _, event in heard):
            self.waiting.popleft()
            self.now = None
        return heard or []

    def counts(self) -> dict[str, float]:
        return {"running": float(self.now is not None), "waiting": max(0, len(self.waiting) - 1),
                "read": self.read, "written": self.written}

    def _served(self, ticket: Ticket) -> Iterator[Heard]:
        ask = ticket.ask
        work = Work.of(self.model, [list(ask.tokens)], ask.options, [list(ask.prefix)])
        self.read += len(ask.tokens)
        strategy = chosen(self.tokenizer, ask.options, work)
        before: Hypotheses | None = None
        for texts in steps(self.model, work, strategy, ask.options):
            self.written += len(texts.tokens)
            if not isinstance(strategy, Beam):
                yield [(ticket, self._token(ask, work, texts, n)) for n in range(len(texts.tokens))
                       if before is None or not bool(before.done[n])]
            before = texts
        assert before is not None
        found = strategy.results(before)  # type: ignore[arg-type]
        several = [one for each in found for one in each]
        yield [(ticket, End(n, "stop" if stopped(self.tokenizer, ask.options, one.tokens) else "length", one,
                            last=n == len(several) - 1))
               for n, one in enumerate(several)]

    def _token(self, ask: Ask, work: Work, texts: Hypotheses, n: int) -> Token:
        token = int(texts.tokens[n, -1])
        if ask.logprobs is None:
            return Token(n, token)
        written = texts.tokens[n, texts.begin:].tolist()
        source = None if work.source is None else list(ask.tokens)
        thought = rescored(self.model, work.prompt[0].tolist(), written, source=source, likely=ask.logprobs)[-1]
        return Token(n, token, thought.logprob, list(thought.likely))
