"""What is asked of an engine, and what it says: requests in, tokens and ends out.

No HTTP, no text: tokens only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.hypotheses import FinishedSequence

# invalid: by its own fault; failed: by ours
FinishReason = Literal["stop", "length", "cancelled", "invalid", "failed"]


class OverloadedError(RuntimeError):
    """There is no room for one more request now; `retry_after` says after how many seconds it is worth a try."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDownError(RuntimeError):
    """No more requests are taken: the engine is being shut down."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Options are settled already: nothing is looked up in the model directory any more."""

    tokens: Sequence[int]  # the prompt; for an encoder-decoder the source
    options: GenerationConfig
    prefix: Sequence[int] = ()  # encoder-decoders: what the written text begins with
    tenant: str = ""  # beginnings of texts are shared within one tenant, never between two
    logprobs: int | None = None  # with each token its log-probability, and so many of the likeliest
    only_at_end: bool = False  # only its first token is told when it comes; the others come with the end


@dataclass(frozen=True)
class TokenEvent:
    """One more token of one of the request's texts. Beams say nothing before their end."""

    index: int  # which of them, from 0
    token: int
    logprob: float | None = (
        None  # by the model's own scores, before penalties and filters; where it was asked for
    )
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FinishEvent:
    """One of the request's texts has ended; after the last of them nothing more comes."""

    index: int
    finish_reason: FinishReason
    sequence: FinishedSequence | None = None  # all its tokens; None where there is nothing to show
    message: str = ""  # what went wrong, in words fit for the one who asked
    last: bool = False


Event = TokenEvent | FinishEvent


@dataclass(eq=False)
class RequestHandle:
    """A request on its way. `on_event` is called with each event, from the engine's thread."""

    request: GenerationRequest
    on_event: Callable[[Event], None] = lambda event: None
    cancelled: bool = False  # nobody waits for it any more: the next step lets it go
    started_at: float | None = None  # when the engine turned to it, by time.monotonic(); until then it waited


Events = list[tuple[RequestHandle, Event]]


class Engine(Protocol):
    """What serves requests, in one thread.

    `SequentialEngine` is the definition, `ContinuousBatchingEngine` the one to use.
    """

    def validate(self, request: GenerationRequest) -> None:
        """A ValueError for what can never be served: too long, too large, contradictory.

        May be called from any thread.
        """
        ...

    def submit(self, handle: RequestHandle) -> None:
        """One more request."""
        ...

    def step(self) -> Events:
        """Some work for those that wait, and what is to be told of it."""
        ...

    def clear(self) -> None:
        """Forget everything: no request is on its way any more."""
        ...

    @property
    def busy(self) -> bool:
        """Is there anything to do?"""
        ...

    def stats(self) -> dict[str, float]:
        """How many requests run and wait, how many tokens were read and written, how full the memory is."""
        ...
