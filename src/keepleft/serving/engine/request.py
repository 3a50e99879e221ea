"""Requests, events and the `Engine` protocol. No HTTP and no text: tokens only.

A `GenerationRequest` wants new tokens, a `PromptRequest` something about tokens that are there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from torch import Tensor

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.grammar import CompiledGrammar
from keepleft.decoding.hypotheses import FinishedSequence
from keepleft.decoding.score import ScoredToken

if TYPE_CHECKING:
    from keepleft.serving.engine.activity import KeyActivity

# invalid: the request is at fault; failed: the engine is
FinishReason = Literal["stop", "length", "cancelled", "invalid", "failed"]


class OverloadedError(RuntimeError):
    """The queue is full; `retry_after` is the number of seconds after which to try again."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ShuttingDownError(RuntimeError):
    """The engine is shutting down and accepts no more requests."""

    def __init__(self, message: str = "the server is shutting down: ask another one") -> None:
        super().__init__(message)


class Tenant(NamedTuple):
    """Whose request it is: an API key (its hash), and a user within it."""

    key: str = ""
    user: str = ""


NOBODY = Tenant()  # the tenant of a server without keys


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Its options are final: defaults of the model directory are already merged in."""

    tokens: Sequence[int]  # the prompt; for an encoder-decoder the source
    options: GenerationConfig
    prefix: Sequence[int] = ()  # encoder-decoders: tokens that the target starts with
    tenant: Tenant = NOBODY  # the prefix cache is shared within one tenant, never between two
    logprobs: int | None = None  # report each token's log-probability, and this many of the likeliest
    only_at_end: bool = False  # report the first token when it comes, the others only with the finish event
    compiled_grammar: CompiledGrammar | None = None  # of the options; None: the engine compiles it


PromptTask = Literal["score", "embed", "classify"]


@dataclass(frozen=True)
class PromptRequest:
    """A request that generates nothing.

    score: the log-probabilities of all tokens after the first `num_context`, as `score_tokens` returns them;
    embed: one vector, by the model's pooling head or the mean hidden state; classify: the probability of
    each label.
    """

    task: PromptTask
    tokens: Sequence[int]  # to embed with an encoder-decoder, the source
    source: Sequence[int] = ()  # encoder-decoders: what the tokens are scored for
    num_context: int = 1
    top_logprobs: int = 0  # report this many of the likeliest tokens with each log-probability
    tenant: Tenant = NOBODY


Request = GenerationRequest | PromptRequest
PromptResult = list[ScoredToken] | Tensor


@dataclass(frozen=True)
class TokenEvent:
    """One new token of one of the request's sequences. Beam search sends none before its end."""

    index: int  # of the sequence, from 0
    token: int
    logprob: float | None = None  # by the raw logits, before processors; None where not requested
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class FinishEvent:
    """One of the request's sequences has finished, or the prompt has been read.

    After the one marked `last` no event follows.
    """

    index: int
    finish_reason: FinishReason
    sequence: FinishedSequence | None = None  # all its tokens; None if it was cancelled or failed
    message: str = ""  # what went wrong, in words fit for the client
    last: bool = False
    result: PromptResult | None = None  # of a PromptRequest


Event = TokenEvent | FinishEvent


def failure(error: Exception) -> FinishEvent:
    """The end of a failed request.

    A ValueError is the request's fault, and its message is ours; of other errors only the type is reported.
    """
    if isinstance(error, ValueError):
        return FinishEvent(0, "invalid", message=str(error), last=True)
    message = f"the request could not be served: {type(error).__name__}"
    return FinishEvent(0, "failed", message=message, last=True)


@dataclass(eq=False)
class RequestHandle:
    """A submitted request. `on_event` is called with each event, from the engine's thread."""

    request: Request
    on_event: Callable[[Event], None] = lambda event: None
    cancelled: bool = False  # the client is gone: the next step drops it
    submitted_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None  # time.monotonic() when it left the queue; None while it waits


Events = list[tuple[RequestHandle, Event]]


class Engine(Protocol):
    """Serves requests, in one thread.

    `SequentialEngine` is the definition, `ContinuousBatchingEngine` the one to use.
    """

    prompt_tokens: Counter[str]  # processed so far, by API key
    generation_tokens: Counter[str]

    def validate(self, request: Request) -> None:
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

    def activity(self) -> dict[str, KeyActivity]:
        """What runs and waits, by API key."""
        ...
