"""POST /v1/chat/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from keepleft.serving.http import chat_template
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.generation_stream import ChoiceDelta, FinishedChoice, GenerationStream
from keepleft.serving.http.json_response import count_text_values, json_response
from keepleft.serving.http.logprobs import TokenLogprob, chat_logprobs
from keepleft.serving.http.middleware.request_log import Log, RequestRecord
from keepleft.serving.http.request_builder import (
    RequestPlan,
    build_requests,
    check_fields,
    check_limit,
    prepare_plan,
    resolve_options,
    tenant_of,
    texts_in,
    usage,
)
from keepleft.serving.http.schemas.requests import ChatRequest
from keepleft.serving.http.schemas.responses import ChatCompletionResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import EventStream, sse_data, until_disconnect
from keepleft.serving.http.validated_route import validated_route


def routes(service: Service, log: Log) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/chat/completions",
        tags=["OpenAI"],
        summary="Chat completion",
        **response_docs(ChatCompletionResponse, stream=True),
    )
    async def chat(request: Request, body: ChatRequest) -> Response:
        record: RequestRecord = request.state.record
        service.check_model(body.model)
        if service.chat_template is None:
            raise APIError(
                400,
                "this model has no chat template: use /v1/completions, or put a chat_template.jinja into its "
                "directory",
                param="model",
                code="no_chat_template",
            )
        return await until_disconnect(
            request, service.limits, _answer(service, body, record, request.state.tenant, log)
        )

    return router


async def _answer(service: Service, body: ChatRequest, record: RequestRecord, key: str, log: Log) -> Response:
    tenant = tenant_of(service, key, body.user)
    _check(service, body)
    body = _apply_response_format(body)
    options = resolve_options(service.model, body, sample_by_default=True)
    max_tokens = next((n for n in _max_tokens_fields(body) if n is not None), None)
    check_limit(max_tokens, service.limits.new_tokens, "max_completion_tokens")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    num_choices = body.n or 1
    check = partial(
        check_fields, service, body, options, stop=body.stop, num_choices=num_choices, logprobs=logprobs
    )
    await service.in_thread(check, tenant)  # before the template is rendered for it
    chat = await service.templates.run(tenant, partial(chat_template.render_chat, service, body.messages))

    def build_plan() -> RequestPlan:
        return build_requests(
            service,
            body,
            [chat_template.encode_chat(service, chat)],
            options,
            max_tokens=service.limits.new_tokens if max_tokens is None else max_tokens,
            stop=body.stop,
            tenant=tenant,
            num_choices=num_choices,
            logprobs=logprobs,
        )

    plan = await prepare_plan(service, tenant, build_plan, texts_in([chat.text, body.prefix]))
    base_fields = {
        "id": f"chatcmpl-{record.request_id}",
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.fingerprint,
        "seed": plan.seed,
    }
    format_logprobs = lambda token_logprobs: (
        None if logprobs is None else chat_logprobs(service.tokenizer, token_logprobs)
    )
    stream = GenerationStream(service, plan, record, only_at_end=not body.stream)
    stream.start()
    if not body.stream:
        (finished,) = await stream.choices()

        def build() -> dict[str, Any]:
            choices = [
                {
                    "index": n,
                    "message": {"role": "assistant", "content": choice.text, "refusal": None},
                    "logprobs": format_logprobs(choice.logprobs),
                    "finish_reason": choice.finish_reason,
                }
                for n, choice in enumerate(finished)
            ]
            return {**base_fields, "object": "chat.completion", "choices": choices, "usage": usage(record)}

        num_values = sum(_count_values(choice) for choice in finished)
        return await json_response(service, tenant, build, num_values=num_values)
    chunks = _ChatChunks(
        service,
        base_fields,
        plan,
        bool(body.stream_options and body.stream_options.include_usage),
        record,
        format_logprobs,
    )
    return EventStream(
        chunks.events(stream),
        service.limits,
        record,
        log,
        stream.engine_requests,
        on_error=chunks.cancelled_chunks,
    )


class _ChatChunks:
    """Deltas as chunks. A choice begins with a chunk of its role and ends with one of its finish reason."""

    def __init__(
        self,
        service: Service,
        base_fields: dict[str, Any],
        plan: RequestPlan,
        include_usage: bool,
        record: RequestRecord,
        format_logprobs: Callable[[Sequence[TokenLogprob]], dict[str, Any] | None],
    ) -> None:
        self.service = service
        self.tenant = plan.requests[0].tenant
        self.base_fields = {**base_fields, "object": "chat.completion.chunk"}
        self.include_usage = include_usage
        self.record = record
        self.format_logprobs = format_logprobs
        self.unfinished = set(range(plan.num_choices))

    async def events(self, stream: GenerationStream) -> AsyncIterator[dict[str, Any] | bytes]:
        for choice in sorted(self.unfinished):
            yield self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})
        async for delta in stream.deltas():
            if delta.finish_reason is not None:
                self.unfinished.discard(delta.choice)
            encode = lambda delta=delta: b"".join(map(sse_data, self._chunks(delta)))
            if chunks := await self.service.build_response(encode, _count_values(delta), self.tenant):
                yield chunks
        if self.include_usage:
            yield {**self.base_fields, "choices": [], "usage": usage(self.record)}

    def cancelled_chunks(self) -> list[dict[str, Any]]:
        """The last chunks of the choices that have not finished."""
        return [
            chunk
            for choice in sorted(self.unfinished)
            for chunk in self._chunks(ChoiceDelta(choice, "", finish_reason="cancelled"))
        ]

    def _chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.logprobs:
            chunks.append(self._chunk(delta.choice, {"content": delta.text}, delta.logprobs))
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.choice, {}, finish_reason=delta.finish_reason))
        return chunks

    def _chunk(
        self,
        choice: int,
        delta: dict[str, Any],
        token_logprobs: Sequence[TokenLogprob] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        logprobs = self.format_logprobs(token_logprobs) if token_logprobs else None
        return {
            **self.base_fields,
            "choices": [
                {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
            ],
            **({"usage": None} if self.include_usage else {}),
        }


def _count_values(output: FinishedChoice | ChoiceDelta) -> int:
    """The bytes of each token count like its logprob."""
    num_logprobs = sum(1 + len(entry.top_logprobs) for entry in output.logprobs)
    return 2 * num_logprobs + count_text_values(len(output.text))


def _max_tokens_fields(body: ChatRequest) -> tuple[int | None, ...]:
    """The three names of one field."""
    return body.max_completion_tokens, body.max_tokens, body.max_new_tokens


def _check(service: Service, body: ChatRequest) -> None:
    """Raise APIError for what is not supported, and for fields that contradict each other."""
    if body.tools or body.functions or body.tool_choice not in (None, "none", "auto"):
        raise APIError(
            400,
            "tool calls are not supported: leave tools out, or ask for JSON with response_format",
            param="tools" if body.tools else "tool_choice",
            code="tools_not_supported",
        )
    if body.top_logprobs is not None and not body.logprobs:
        message = "top_logprobs need logprobs: set logprobs to true, or leave them out"
        raise APIError(400, message, param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        message = "stream_options are for streams: set stream, or leave them out"
        raise APIError(400, message, param="stream_options")
    if sum(n is not None for n in _max_tokens_fields(body)) > 1:
        raise APIError(
            400,
            "max_completion_tokens, max_tokens and max_new_tokens mean the same: give one of them",
            param="max_tokens",
        )
    chat_template.check_messages(body.messages, service.limits)


def _apply_response_format(body: ChatRequest) -> ChatRequest:
    """The body with its response_format as a json_schema."""
    response_format = body.response_format
    if response_format is None or response_format.type == "text":
        return body
    if body.regex is not None or body.grammar is not None or body.json_schema is not None:
        raise APIError(
            400,
            "response_format and regex, grammar or json_schema each constrain the whole output: give one of "
            "them",
            param="response_format",
        )
    if response_format.type == "json_object":
        return body.model_copy(update={"json_schema": {"type": "object"}})
    if response_format.json_schema is None or response_format.json_schema.schema_ is None:
        raise APIError(
            400,
            "response_format is json_schema, and there is no schema in it: give json_schema.schema",
            param="response_format",
        )
    return body.model_copy(update={"json_schema": response_format.json_schema.schema_})
