"""Requests, events and the `Engine` protocol. No HTTP and no text: tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.hypotheses import FinishedSequence

# invalid: the request is at fault; failed: the engine is
FinishReason = Literal["stop", "length", "cancelled", "invalid", "failed"]


class OverloadedError(RuntimeError):
    """The queue is full; `retry_after` is the number of seconds after which to try again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDownError(RuntimeError):
    """The engine is shutting down and accepts no more requests."""


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Its options are final: defaults of the model directory are already merged in."""

    tokens: Sequence[int]  # the prompt; for an encoder-decoder the source
    options: GenerationConfig
    prefix: Sequence[int] = ()  # encoder-decoders: tokens that the target starts with
    tenant: str = ""  # the prefix cache is shared within one tenant, never between two
    logprobs: int | None = None  # report each token's log-probability, and this many of the likeliest
    only_at_end: bool = False  # report the first token when it comes, the others only with the finish event


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one of the request's sequences. Beam search sends none before its end."""

    index: int  # of the sequence, from 0
    token: int
    logprob: float | None = None  # by the raw logits, before processors; None where not requested
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FinishEvent:
    """One of the request's sequences has finished; after the one marked `last` no event follows."""

    index: int
    finish_reason: FinishReason
    sequence: FinishedSequence | None = None  # all its tokens; None if it was cancelled or failed
    message: str = ""  # what went wrong, in words fit for the client
    last: bool = False


Event = TokenEvent | FinishEvent


@dataclass(eq=False)
class RequestHandle:
    """A submitted request. `on_event` is called with each event, from the engine's thread."""

    request: GenerationRequest
    on_event: Callable[[Event], None] = lambda event: None
    cancelled: bool = False  # the client is gone: the next step drops it
    started_at: float | None = None  # time.monotonic() when it left the queue; None while it waits


Events = list[tuple[RequestHandle, Event]]


class Engine(Protocol):
    """Serves requests, in one thread.

    `SequentialEngine` is the definition, `ContinuousBatchingEngine` the one to use.
    """

    def validate(self, request: GenerationRequest) -> None:
        """Raise ValueError for a request that can never be served: too long, too large, contradictory.

        May be called from any thread.
        """
        ...

    def submit(self, handle: RequestHandle) -> None:
        """Queue a request."""
        ...

    def step(self) -> Events:
        """Do one step of work and return its events."""
        ...

    def clear(self) -> None:
        """Drop all requests, without events."""
        ...

    @property
    def busy(self) -> bool:
        """True while a request is running or waiting."""
        ...

    def stats(self) -> dict[str, float]:
        """Requests running and waiting, tokens processed so far, memory in use."""
        ...
