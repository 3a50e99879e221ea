"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.decoding.rescore import rescored
from keepleft.serving.http.answered import Completion, documented
from keepleft.serving.http.asked import CompletionRequest
from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.events import Events, while_there
from keepleft.serving.http.recorded import Log, Record
from keepleft.serving.http.service import Service
from keepleft.serving.http.settling import Order, Prompt, limited, ordered, settled
from keepleft.serving.http.telling import Piece, Telling
from keepleft.serving.http.thoughts import Thought, of_completion, thought
from keepleft.serving.http.writing import Writing

USUAL = 16  # tokens, as OpenAI has it


def routes(service: Service, log: Log) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/completions", tags=["OpenAI"], summary="Go on with a text", **documented(Completion, stream=True))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        record: Record = request.state.record
        service.named(body.model)
        service.can("completions")
        return await while_there(request, service.limits, _answer(service, body, record, request.state.tenant, log))

    return router


async def _answer(service: Service, body: CompletionRequest, record: Record, tenant: str, log: Log) -> Response:
    prompts = several(body.prompt)
    _check(service, body)
    options = settled(service.model, body, drawn=True)
    most = body.max_tokens if body.max_tokens is not None else body.max_new_tokens
    limited(most, service.limits.new_tokens, "max_tokens")
    order = await service.apart(partial(
        ordered, service, body, prompts, options, most=USUAL if most is None else most, stop=body.stop,
        tenant=whose(service, tenant, body.user), copies=body.n or 1, best_of=body.best_of, logprobs=body.logprobs))
    echoes = await _echoes(service, body, prompts, order)
    head = {"id": f"cmpl-{record.number}", "object": "text_completion", "created": int(time.time()), "model": service.name,
            "system_fingerprint": service.fingerprint, "seed": order.seed}
    telling = Telling(service, order, record, whole=not body.stream)
    if not body.stream:
        rows = await telling.wholes()
        choices = [_choice(n * order.copies + k, *echoes[n], one.text, one.thoughts, body.logprobs, one.why)
                   for n, row in enumerate(rows) for k, one in enumerate(row)]
        return JSONResponse({**head, "choices": choices, "usage": used(record)})
    shaped = _Stream(head, echoes, order, body, record)
    return Events(shaped.events(telling), service.limits, record, log, close=telling.close, broken=shaped.broken)


class _Stream:
    """Pieces as chunks; each choice begins with its echo, if one was asked for."""

    def __init__(self, head: dict[str, Any], echoes: list[tuple[str, list[Thought]]], order: Order, body: CompletionRequest,
                 record: Record) -> None:
        self.head, self.echoes, self.order, self.body, self.record = head, echoes, order, body, record
        self.usage = bool(body.stream_options and body.stream_options.include_usage)
        self.open = set(range(order.copies * len(order.asks)))
        self.begun: set[int] = set()

    async def events(self, telling: Telling) -> AsyncIterator[Any]:
        async for piece in telling.pieces():
            yield self._chunk(piece)
        if self.usage:
            yield {**self.head, "choices": [], "usage": used(self.record)}

    def broken(self) -> list[Any]:
        return [self._chunk(Piece(choice, "", why="cancelled")) for choice in sorted(self.open)]

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        echo = self.echoes[piece.choice // self.order.copies]
        before, known = echo if piece.choice not in self.begun else ("", [])
        self.begun.add(piece.choice)
        if piece.why is not None:
            self.open.discard(piece.choice)
        choice = _choice(piece.choice, before, known, piece.text, piece.thoughts, self.body.logprobs, piece.why, len(echo[0]))
        return {**self.head, "choices": [choice], **({"usage": None} if self.usage else {})}


def _choice(index: int, echo: str, known: Sequence[Thought], text: str, thoughts: Sequence[Thought], logprobs: int | None,
            why: str | None, shift: int | None = None) -> dict[str, Any]:
    told = None
    if logprobs is not None:
        told = of_completion([*known, *thoughts])
        moved = len(echo) if shift is None else shift
        told["text_offset"][len(known):] = [one.offset + moved for one in thoughts]
    return {"index": index, "text": echo + text, "logprobs": told, "finish_reason": why}


def _check(service: Service, body: CompletionRequest) -> None:
    if body.suffix:
        raise RefusedError(400, "suffix was given, and no text is put between two others here: leave it out", param="suffix")
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise RefusedError(400, "which text is the best is known when all are written, so they cannot be streamed: leave "
                                "best_of or stream out", param="best_of")
    if body.stream_options is not None and not body.stream:
        raise RefusedError(400, "stream_options are for streams: set stream, or leave them out", param="stream_options")
    if body.max_tokens is not None and body.max_new_tokens is not None:
        raise RefusedError(400, "max_tokens and max_new_tokens mean the same: give one of them", param="max_new_tokens")
    if body.echo and body.logprobs is not None and service.pair:
        raise RefusedError(400, "the prompt of this model is a source, which it does not write: leave echo or logprobs out",
                           param="echo")


async def _echoes(service: Service, body: CompletionRequest, prompts: Sequence[Prompt],
                  order: Order) -> list[tuple[str, list[Thought]]]:
    """What each choice of a prompt begins with: the prompt, and what the model thinks of it."""
    if not body.echo:
        return [("", [])] * len(prompts)
    decoded = lambda tokens: service.voice.reading.decode(tokens, skip_special_tokens=True)
    texts = [prompt if isinstance(prompt, str) else decoded(prompt) for prompt in prompts]
    if body.logprobs is None:
        return [(text, []) for text in texts]
    out = []
    for text, ask in zip(texts, order.asks, strict=True):
        row = list(ask.tokens)
        known = await service.errand(partial(rescored, service.model, row[:1], row[1:], likely=body.logprobs))
        out.append((text, await service.apart(partial(_considered, service.tokenizer, row, known))))
    return out


def _considered(tokenizer: Any, row: list[int], known: Sequence[Any]) -> list[Thought]:
    """Of the first token nothing can be thought."""
    writing = Writing(tokenizer)
    out = [thought(tokenizer, [], row[0], 0, None, ())]
    for n, one in enumerate(known, 1):
        writing.add(row[n - 1])
        out.append(thought(tokenizer, row[max(0, n - 32):n], one.token, len(writing.text), one.logprob, one.likely))
    return out


def several(prompt: Any) -> list[Prompt]:
    """One prompt or many, texts or tokens."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    if not prompt or [] in prompt:
        raise RefusedError(400, "there is an empty list where a text or tokens should be: give at least one of them",
                           param="prompt")
    return list(prompt)


def whose(service: Service, tenant: str, user: str | None) -> str:
    """The caller: a user inside an API key."""
    limited(len(user or ""), service.limits.user, "user")
    return f"{tenant}:{user or ''}"


def used(record: Record) -> dict[str, int]:
    return {"prompt_tokens": record.read, "completion_tokens": record.written, "total_tokens": record.read + record.written}
