"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.decoding.detokenizer import IncrementalDetokenizer
from keepleft.decoding.score import ScoredToken, score_tokens
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.generation_stream import ChoiceDelta, GenerationStream
from keepleft.serving.http.inputs import as_prompts, tenant_of, usage
from keepleft.serving.http.logprobs import TokenLogprob, completion_logprobs, token_logprob
from keepleft.serving.http.middleware.request_log import Log, RequestRecord
from keepleft.serving.http.request_builder import (
    Prompt,
    RequestPlan,
    build_requests,
    check_limit,
    resolve_options,
)
from keepleft.serving.http.schemas.requests import CompletionRequest
from keepleft.serving.http.schemas.responses import CompletionResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import EventStream, until_disconnect

DEFAULT_MAX_TOKENS = 16  # tokens, as OpenAI has it


def routes(service: Service, log: Log) -> APIRouter:
    router = APIRouter()

    @router.post(
        "/v1/completions",
        tags=["OpenAI"],
        summary="Go on with a text",
        **response_docs(CompletionResponse, stream=True),
    )
    async def completions(request: Request, body: CompletionRequest) -> Response:
        record: RequestRecord = request.state.record
        service.check_model(body.model)
        service.require_task("completions")
        return await until_disconnect(
            request, service.limits, _answer(service, body, record, request.state.tenant, log)
        )

    return router


async def _answer(
    service: Service, body: CompletionRequest, record: RequestRecord, tenant: str, log: Log
) -> Response:
    prompts = as_prompts(body.prompt)
    _check(service, body)
    options = resolve_options(service.model, body, sample_by_default=True)
    max_tokens = body.max_tokens if body.max_tokens is not None else body.max_new_tokens
    check_limit(max_tokens, service.limits.new_tokens, "max_tokens")
    plan = await service.in_thread(
        partial(
            build_requests,
            service,
            body,
            prompts,
            options,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            stop=body.stop,
            tenant=tenant_of(service, tenant, body.user),
            num_choices=body.n or 1,
            best_of=body.best_of,
            logprobs=body.logprobs,
        )
    )
    echoes = await _echoes(service, body, prompts, plan)
    base_fields = {
        "id": f"cmpl-{record.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
        "system_fingerprint": service.fingerprint,
        "seed": plan.seed,
    }
    stream = GenerationStream(service, plan, record, only_at_end=not body.stream)
    if not body.stream:
        finished = await stream.choices()
        choices = [
            _choice(
                n * plan.num_choices + k,
                *echoes[n],
                choice.text,
                choice.logprobs,
                body.logprobs,
                choice.finish_reason,
            )
            for n, row in enumerate(finished)
            for k, choice in enumerate(row)
        ]
        return JSONResponse({**base_fields, "choices": choices, "usage": usage(record)})
    chunks = _CompletionChunks(base_fields, echoes, plan, body, record)
    return EventStream(
        chunks.events(stream),
        service.limits,
        record,
        log,
        close=stream.close,
        on_error=chunks.cancelled_chunks,
    )


class _CompletionChunks:
    """Pieces as chunks; each choice begins with its echo, if one was asked for."""

    def __init__(
        self,
        base_fields: dict[str, Any],
        echoes: list[tuple[str, list[TokenLogprob]]],
        plan: RequestPlan,
        body: CompletionRequest,
        record: RequestRecord,
    ) -> None:
        self.base_fields = base_fields
        self.echoes = echoes
        self.plan = plan
        self.body = body
        self.record = record
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.unfinished = set(range(plan.num_choices * len(plan.requests)))
        self.started: set[int] = set()

    async def events(self, stream: GenerationStream) -> AsyncIterator[Any]:
        async for delta in stream.deltas():
            yield self._chunk(delta)
        if self.include_usage:
            yield {**self.base_fields, "choices": [], "usage": usage(self.record)}

    def cancelled_chunks(self) -> list[Any]:
        return [
            self._chunk(ChoiceDelta(choice, "", finish_reason="cancelled"))
            for choice in sorted(self.unfinished)
        ]

    def _chunk(self, delta: ChoiceDelta) -> dict[str, Any]:
        echo = self.echoes[delta.choice // self.plan.num_choices]
        echo_text, echo_logprobs = echo if delta.choice not in self.started else ("", [])
        self.started.add(delta.choice)
        if delta.finish_reason is not None:
            self.unfinished.discard(delta.choice)
        choice = _choice(
            delta.choice,
            echo_text,
            echo_logprobs,
            delta.text,
            delta.logprobs,
            self.body.logprobs,
            delta.finish_reason,
            len(echo[0]),
        )
        return {**self.base_fields, "choices": [choice], **({"usage": None} if self.include_usage else {})}


def _choice(
    index: int,
    echo: str,
    echo_logprobs: Sequence[TokenLogprob],
    text: str,
    token_logprobs: Sequence[TokenLogprob],
    num_logprobs: int | None,
    finish_reason: str | None,
    echo_length: int | None = None,
) -> dict[str, Any]:
    logprobs = None
    if num_logprobs is not None:
        logprobs = completion_logprobs([*echo_logprobs, *token_logprobs])
        offset = len(echo) if echo_length is None else echo_length
        logprobs["text_offset"][len(echo_logprobs) :] = [
            entry.text_offset + offset for entry in token_logprobs
        ]
    return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": finish_reason}


def _check(service: Service, body: CompletionRequest) -> None:
    if body.suffix:
        raise APIError(
            400, "suffix was given, and no text is put between two others here: leave it out", param="suffix"
        )
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise APIError(
            400,
            "which text is the best is known when all are written, so they cannot be streamed: leave "
            "best_of or stream out",
            param="best_of",
        )
    if body.stream_options is not None and not body.stream:
        raise APIError(
            400, "stream_options are for streams: set stream, or leave them out", param="stream_options"
        )
    if body.max_tokens is not None and body.max_new_tokens is not None:
        raise APIError(
            400, "max_tokens and max_new_tokens mean the same: give one of them", param="max_new_tokens"
        )
    if body.echo and body.logprobs is not None and service.is_encoder_decoder:
        raise APIError(
            400,
            "the prompt of this model is a source, which it does not write: leave echo or logprobs out",
            param="echo",
        )


async def _echoes(
    service: Service, body: CompletionRequest, prompts: Sequence[Prompt], plan: RequestPlan
) -> list[tuple[str, list[TokenLogprob]]]:
    """What each choice of a prompt begins with: the prompt, and what the model thinks of it."""
    if not body.echo:
        return [("", [])] * len(prompts)
    decode = lambda tokens: service.generator.input_tokenizer.decode(tokens, skip_special_tokens=True)
    texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]
    if body.logprobs is None:
        return [(text, []) for text in texts]
    out = []
    for text, request in zip(texts, plan.requests, strict=True):
        prompt_tokens = list(request.tokens)
        token_logprobs = await service.in_engine_thread(
            partial(
                score_tokens, service.model, prompt_tokens[:1], prompt_tokens[1:], top_logprobs=body.logprobs
            )
        )
        out.append(
            (
                text,
                await service.in_thread(
                    partial(_prompt_logprobs, service.tokenizer, prompt_tokens, token_logprobs)
                ),
            )
        )
    return out


def _prompt_logprobs(
    tokenizer: Any, tokens: list[int], token_logprobs: Sequence[ScoredToken]
) -> list[TokenLogprob]:
    """Of the first token nothing can be thought."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    out = [token_logprob(tokenizer, [], tokens[0], 0, None, ())]
    for n, entry in enumerate(token_logprobs, 1):
        detokenizer.add(tokens[n - 1])
        out.append(
            token_logprob(
                tokenizer,
                tokens[max(0, n - 32) : n],
                entry.token,
                len(detokenizer.text),
                entry.logprob,
                entry.top_logprobs,
            )
        )
    return out
