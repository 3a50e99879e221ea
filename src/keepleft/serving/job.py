"""A request that is being served: what is still to be read, what was written, and when each of its texts ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from keepleft.decoding.beam import Beam
from keepleft.decoding.generate import USUAL, Work, chosen
from keepleft.decoding.hypotheses import Written
from keepleft.decoding.options import Options, start_of
from keepleft.decoding.single import Single
from keepleft.decoding.stops import completed, stopped
from keepleft.models.leaf import Leaf
from keepleft.serving.asks import End, Event, Ticket, Token, Why


class Job:
    """Made when its turn has come; `begun` is what its texts begin with, and grows when it is put back and read again."""

    def __init__(self, ticket: Ticket, model: Any, tokenizer: Any) -> None:
        ask = ticket.ask
        options = ask.options
        self.ticket, self.ask, self.tokenizer = ticket, ask, tokenizer
        self.pair = model.design.encoder is not None
        self.device = model.token.weight.device
        self.begun = [start_of(options), *ask.prefix] if self.pair else [*ask.tokens, *ask.prefix]
        self.prompt, self.limit, _ = lengths(model, options, len(ask.tokens), len(ask.prefix))
        work = Work(torch.tensor([self.begun]), None, [self.limit])
        if options.encoder_repetition_penalty is not None or options.encoder_no_repeat_ngram_size is not None:
            work = replace(work, source=torch.tensor([list(ask.tokens)], device=self.device) if self.pair else None)
        self.beams = options.beams > 1
        # texts that are not beams are ended here, by strings and by time, not by the strategy
        here = options if self.beams else replace(options, stop_strings=None, max_time=None)
        self.strategy: Single | Beam = chosen(tokenizer, here, work)
        self.deadline = None if options.max_time is None else time.monotonic() + options.max_time
        self.width = options.beams if self.beams else options.copies
        self.slots = most_slots(self.prompt, self.width, self.limit)  # all that it can ever need
        self.seeds = [] if self.strategy.seeds is None else self.strategy.seeds.tolist()
        self.leaf = Leaf(width=self.width)
        self.texts: Any = None                                   # of a group, while it is not in one
        self.written: list[list[int]] = [[] for _ in range(self.width)]
        self.score = [0.0] * self.width
        self.over = [False] * self.width
        self.next = [self.begun[-1]] * self.width                # the token that each text feeds next
        self.quiet = ask.quiet and ask.logprobs is None
        self.order = 0                                           # when it was let in
        self.end, self.strings = frozenset(options.end), options.strings
        # its tokens are chosen from scores alone: nothing of the text so far is looked at
        self.plain = not self.beams and all(getattr(transform, "blind", False) for transform in self.strategy.transforms)
        self.kind = tuple(map(id, self.strategy.transforms)), bool(self.seeds)  # what is chosen together has it in common

    @property
    def unread(self) -> list[int]:
        """What must be in its pages before it takes steps, and is not yet."""
        return self.begun[self.leaf.length:-1]

    def put_back(self) -> None:
        """Its pages are gone: what it wrote is read again, as if it had been in the prompt. For requests of one text."""
        self.begun = [*self.begun[:self.prompt], *self.written[0]]

    def told(self, text: int, token: int, gain: float, thought: tuple[float, list[tuple[int, float]]] | None) -> list[Event]:
        """One more token of a text, and its end where it has come."""
        self.written[text].append(token)
        self.score[text] += gain
        self.next[text] = token
        out: list[Event] = []
        if not self.quiet or len(self.written[text]) == 1:
            out.append(Token(text, token) if thought is None else Token(text, token, *thought))
        why = self._why(text, token)
        if why is not None:
            out += self.ended(text, why)
        return out

    def ended(self, text: int, why: Why) -> list[Event]:
        self.over[text] = True
        return [End(text, why, Written(self.written[text], self.score[text]), last=all(self.over))]

    def results(self, texts: Any) -> list[Event]:
        """What beams found."""
        found = self.strategy.results(texts)[0]
        self.over = [True] * self.width
        why: list[Why] = ["stop" if stopped(self.tokenizer, self.ask.options, one.tokens) else "length" for one in found]
        return [End(n, why[n], one, last=n == len(found) - 1) for n, one in enumerate(found)]

    def _why(self, text: int, token: int) -> Why | None:
        if token in self.end or (self.strings and completed(self.tokenizer, self.strings, [self.written[text]])[0]):
            return "stop"
        if len(self.written[text]) >= self.limit or (self.deadline is not None and time.monotonic() >= self.deadline):
            return "length"
        return None


def most_slots(begun: int, width: int, limit: int) -> int:
    """Slots for the prompt but its last token, and for all that each text feeds: that token, and all it writes but the last."""
    return begun - 1 + width * max(1, limit)


def lengths(model: Any, options: Options, tokens: int, prefix: int) -> tuple[int, int, int]:
    """Of a request: tokens that its text begins with, tokens that may be added, and tokens of its source."""
    reach = model.design.longest
    if model.design.encoder is None:
        return tokens + prefix, options.limit(tokens + prefix, USUAL, reach), 0
    start_of(options)
    return 1 + prefix, options.limit(1 + prefix, 2 * tokens + 10, reach), tokens

