"""Tokens that are heard, told as text: piece by piece as it can be shown, or whole texts at their end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from keepleft.decoding.options import start_of
from keepleft.decoding.rescore import rescored
from keepleft.serving.asks import Ask, ClosedError, End, Token
from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.hearing import Hearing
from keepleft.serving.http.recorded import Record
from keepleft.serving.http.service import Service
from keepleft.serving.http.settling import Order
from keepleft.serving.http.thoughts import Thought, thought
from keepleft.serving.http.writing import Writing

Why = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Piece:
    """A little more of one choice."""

    choice: int
    text: str
    thoughts: list[Thought] = field(default_factory=list)
    why: Why | None = None         # it has ended, and why
    score: float = 0.0             # of the whole, at its end
    length: int = 0                # its tokens, at its end


@dataclass
class Whole:
    """One choice at its end."""

    text: str = ""
    thoughts: list[Thought] = field(default_factory=list)
    why: Why = "length"
    score: float = 0.0
    length: int = 0


class Text:
    """One text while it is written."""

    def __init__(self, service: Service, ask: Ask, stops: Sequence[str]) -> None:
        self.tokenizer, self.ask = service.tokenizer, ask
        self.before = [] if service.pair else list(ask.tokens)
        self.writing = Writing(service.tokenizer, stops)
        self.first = self.writing.begin(ask.prefix)
        self.waiting: list[tuple[Thought, int]] = []  # thoughts of what is not shown yet, and where their text ends
        self.count = 0
        self.over = False

    def add(self, token: int, logprob: float | None = None,
            likely: Sequence[tuple[int, float]] = ()) -> tuple[str, list[Thought]]:
        offset, self.count = len(self.writing.text), self.count + 1
        before = [*self.before[-32:], *self.writing.tokens[-32:]]
        piece = self._taken() + self.writing.add(token)
        if self.ask.logprobs is not None and logprob is not None:
            self.waiting.append((thought(self.tokenizer, before, token, offset, logprob, likely), len(self.writing.text)))
        ready = [one for one, end in self.waiting if end <= self.writing.shown and not self.writing.stopped]
        self.waiting = self.waiting[len(ready):] if ready else self.waiting
        return piece, ready

    def end(self) -> tuple[str, list[Thought]]:
        piece, self.over = self._taken() + self.writing.end(), True
        cut = len(self.writing.text) if self.writing.stopped else None
        return piece, [one for one, _ in self.waiting if cut is None or one.offset < cut]

    def _taken(self) -> str:
        piece, self.first = self.first, ""
        return piece


class Telling:
    """An order on its way. Choice n * copies + k is text k of prompt n. `whole`: nobody looks before the end."""

    def __init__(self, service: Service, order: Order, record: Record, *, whole: bool = False) -> None:
        self.service, self.order, self.record = service, order, record
        self.texts = [[Text(service, ask, order.stops) for _ in range(order.made)] for ask in order.asks]
        self.busy = [n for n, ask in enumerate(order.asks) if ask.options.max_new_tokens]
        self.hearing = Hearing(service.running, [replace(order.asks[n], quiet=whole) for n in self.busy])
        record.read += sum(len(ask.tokens) for ask in order.asks)
        record.sent()

    def close(self) -> None:
        self.hearing.close()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Everything that is written, as it can be shown."""
        for n, texts in enumerate(self.texts):
            if n not in self.busy:
                for k, text in enumerate(texts):
                    for piece in self._spread(n, k, *text.end(), why="length"):
                        yield piece
        async for place, event in self.hearing.events():
            self.record.heard(self.hearing.tickets[place].began)
            n = self.busy[place]
            text = self.texts[n][event.text]
            if isinstance(event, Token):
                some = self._token(n, place, event, text)
            elif event.why in ("stop", "length"):
                some = await self._ended(n, event, text)
            elif all(one.over or one.writing.stopped for one in self.texts[n]):
                some = [piece for k, one in enumerate(self.texts[n]) if not one.over
                        for piece in self._spread(n, k, *one.end(), why="stop", length=one.count)]
            else:
                raise _broken(event)
            for piece in some:
                yield piece

    def _token(self, n: int, place: int, event: Token, text: Text) -> list[Piece]:
        if text.writing.stopped:  # the engine reads otherwise and goes on: it need not
            if all(one.over or one.writing.stopped for one in self.texts[n]):
                self.hearing.drop(place)
            return []
        self.record.token()
        shown, thoughts = text.add(event.token, event.logprob, event.likely)
        return self._spread(n, event.text, shown, thoughts) if shown or thoughts else []

    async def _ended(self, n: int, event: End, text: Text) -> list[Piece]:
        """The end of a text; what was found by beams comes all at once."""
        tokens = event.written.tokens if event.written is not None else []
        rest = [] if text.writing.stopped else tokens[text.count:]
        known: list[Any] = [None] * len(rest)
        if rest and text.ask.logprobs is not None:
            known = (await self.service.errand(partial(_reconsidered, self.service.model, text.ask, tokens)))[text.count:]
        shown, thoughts = "", list[Thought]()
        for token, one in zip(rest, known, strict=True):
            self.record.token()
            piece, ready = text.add(token, *(() if one is None else (one.logprob, one.likely)))
            shown, thoughts = shown + piece, thoughts + ready
        piece, more = text.end()
        why: Why = "stop" if event.why == "stop" or text.writing.stopped else "length"
        score = 0.0 if event.written is None else event.written.score
        return self._spread(n, event.text, shown + piece, thoughts + more, why=why, score=score, length=len(tokens))

    def _spread(self, n: int, k: int, text: str, thoughts: list[Thought], **more: Any) -> list[Piece]:
        """The choices that a text is: one, or all where there is one way to be greedy."""
        made = self.order.copies if self.order.repeated else self.order.made
        each = range(self.order.copies) if self.order.repeated else [k]
        return [Piece(n * made + choice, text, thoughts, **more) for choice in each]

    async def wholes(self) -> list[list[Whole]]:
        """For each prompt its choices; of more texts than choices, those of the highest log-probability per token."""
        order = self.order
        made = order.copies if order.repeated else order.made
        found = [Whole() for _ in range(made * len(order.asks))]
        try:
            async for piece in self.pieces():
                one = found[piece.choice]
                one.text += piece.text
                one.thoughts += piece.thoughts
                if piece.why is not None:
                    one.why, one.score, one.length = piece.why, piece.score, piece.length
        finally:
            self.close()
        rows = [found[first:first + made] for first in range(0, len(found), made)]
        if made > order.copies and not any(ask.options.beams > 1 for ask in order.asks):
            rows = [sorted(row, key=lambda one: -one.score / max(1, one.length)) for row in rows]
        return [row[:order.copies] for row in rows]


def _reconsidered(model: Any, ask: Ask, tokens: list[int]) -> list[Any]:
    pair = model.design.encoder is not None
    before = [start_of(ask.options), *ask.prefix] if pair else [*ask.tokens, *ask.prefix]
    return list(rescored(model, before, tokens, source=list(ask.tokens) if pair else None, likely=ask.logprobs or 0))


def _broken(event: End) -> Exception:
    if event.why == "cancelled":
        return ClosedError("the server is shutting down, and this text was not finished in time: ask another one")
    if event.why == "refused":
        return RefusedError(400, event.message, code="refused")
    return RefusedError(500, event.message or "the model could not go on", code="model_failed")
