"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.serving.http import templates
from keepleft.serving.http.answered import ChatCompletion, documented
from keepleft.serving.http.asked import ChatRequest
from keepleft.serving.http.completions import used, whose
from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.events import Events, while_there
from keepleft.serving.http.recorded import Log, Record
from keepleft.serving.http.service import Service
from keepleft.serving.http.settling import Order, limited, ordered, settled
from keepleft.serving.http.telling import Piece, Telling
from keepleft.serving.http.thoughts import Thought, of_chat


def routes(service: Service, log: Log) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", tags=["OpenAI"], summary="Answer in a chat", **documented(ChatCompletion, stream=True))
    async def chat(request: Request, body: ChatRequest) -> Response:
        record: Record = request.state.record
        service.named(body.model)
        if service.template is None:
            raise RefusedError(400, "this model has no chat template and was not made for chats: ask /v1/completions, or put a "
                                    "chat_template.jinja into its directory", param="model", code="no_chat_template")
        return await while_there(request, service.limits, _answer(service, body, record, request.state.tenant, log))

    return router


async def _answer(service: Service, body: ChatRequest, record: Record, tenant: str, log: Log) -> Response:
    body = _formatted(_checked(service, body))
    options = settled(service.model, body, drawn=True)
    most = next((n for n in (body.max_completion_tokens, body.max_tokens, body.max_new_tokens) if n is not None), None)
    limited(most, service.limits.new_tokens, "max_completion_tokens")
    prompt = await service.apart(partial(templates.chat, service, body.messages))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    order = await service.apart(partial(
        ordered, service, body, [prompt], options, most=service.limits.new_tokens if most is None else most, stop=body.stop,
        tenant=whose(service, tenant, body.user), copies=body.n or 1, logprobs=logprobs))
    head = {"id": f"chatcmpl-{record.number}", "created": int(time.time()), "model": service.name,
            "system_fingerprint": service.fingerprint, "seed": order.seed}
    told = lambda thoughts: None if logprobs is None else of_chat(service.tokenizer, thoughts)
    telling = Telling(service, order, record, whole=not body.stream)
    if not body.stream:
        row, = await telling.wholes()
        choices = [{"index": n, "message": {"role": "assistant", "content": one.text, "refusal": None},
                    "logprobs": told(one.thoughts), "finish_reason": one.why} for n, one in enumerate(row)]
        return JSONResponse({**head, "object": "chat.completion", "choices": choices, "usage": used(record)})
    shaped = _Stream(head, order, bool(body.stream_options and body.stream_options.include_usage), record, told)
    return Events(shaped.events(telling), service.limits, record, log, close=telling.close, broken=shaped.broken)


class _Stream:
    """Pieces as chunks; each choice begins with its role and ends with its reason."""

    def __init__(self, head: dict[str, Any], order: Order, usage: bool, record: Record, told: Any) -> None:
        self.head, self.usage, self.record, self.told = {**head, "object": "chat.completion.chunk"}, usage, record, told
        self.open = set(range(order.copies))

    async def events(self, telling: Telling) -> AsyncIterator[Any]:
        for choice in sorted(self.open):
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})
        async for piece in telling.pieces():
            for chunk in self._chunks(piece):
                yield chunk
        if self.usage:
            yield {**self.head, "choices": [], "usage": used(self.record)}

    def broken(self) -> list[Any]:
        return [chunk for choice in sorted(self.open) for chunk in self._chunks(Piece(choice, "", why="cancelled"))]

    def _chunks(self, piece: Piece) -> list[Any]:
        out = []
        if piece.text or piece.thoughts:
            out.append(self._chunk(piece.choice, {"content": piece.text}, piece.thoughts))
        if piece.why is not None:
            self.open.discard(piece.choice)
            out.append(self._chunk(piece.choice, {}, why=piece.why))
        return out

    def _chunk(self, choice: int, delta: dict[str, Any], thoughts: Sequence[Thought] = (), why: str | None = None) -> Any:
        told = self.told(thoughts) if thoughts else None
        return {**self.head, "choices": [{"index": choice, "delta": delta, "logprobs": told, "finish_reason": why}],
                **({"usage": None} if self.usage else {})}


def _checked(service: Service, body: ChatRequest) -> ChatRequest:
    if body.tools or body.functions or body.tool_choice not in (None, "none", "auto"):
        raise RefusedError(400, "tools were given, and no tools are called here: leave them out, or ask for JSON with "
                                "response_format", param="tools" if body.tools else "tool_choice", code="tools_not_supported")
    if body.top_logprobs is not None and not body.logprobs:
        raise RefusedError(400, "top_logprobs are told with logprobs: set that too, or leave them out", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise RefusedError(400, "stream_options are for streams: set stream, or leave them out", param="stream_options")
    if sum(n is not None for n in (body.max_completion_tokens, body.max_tokens, body.max_new_tokens)) > 1:
        raise RefusedError(400, "max_completion_tokens, max_tokens and max_new_tokens mean the same: give one of them",
                           param="max_tokens")
    templates.check(body.messages, service.limits)
    return body


def _formatted(body: ChatRequest) -> ChatRequest:
    """response_format as the rule that it is."""
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return body
    if body.regex is not None or body.grammar is not None or body.json_schema is not None:
        raise RefusedError(400, "response_format and regex, grammar or json_schema each rule the whole text: give one of them",
                           param="response_format")
    if wanted.type == "json_object":
        return body.model_copy(update={"json_schema": {"type": "object"}})
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise RefusedError(400, "response_format is json_schema, and there is no schema in it: give json_schema.schema",
                           param="response_format")
    return body.model_copy(update={"json_schema": wanted.json_schema.schema_})
