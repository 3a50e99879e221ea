"""POST /v1/completions"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from tokenizers import Tokenizer

from keepleft.data.token_text import CONTEXT_TOKENS
from keepleft.decoding.detokenizer import IncrementalDetokenizer
from keepleft.decoding.score import ScoredToken
from keepleft.serving.engine.request import PromptRequest
from keepleft.serving.http.engine_requests import score_prompts
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.generation_stream import ChoiceDelta, FinishedChoice, GenerationStream
from keepleft.serving.http.json_response import count_text_values, json_response
from keepleft.serving.http.logprobs import TokenLogprob, completion_logprobs, token_logprob
from keepleft.serving.http.middleware.request_log import Log, RequestRecord
from keepleft.serving.http.request_builder import (
    Prompt,
    RequestPlan,
    as_prompts,
    build_requests,
    check_limit,
    prepare_plan,
    resolve_options,
    tenant_of,
    texts_in,
    usage,
)
from keepleft.serving.http.schemas.requests import CompletionRequest
from keepleft.serving.http.schemas.responses import CompletionResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import EventStream, sse_data, until_disconnect
from keepleft.serving.http.validated_route import validated_route

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def routes(service: Service, log: Log) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/completions",
        tags=["OpenAI"],
        summary="Text completion",
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
    service: Service, body: CompletionRequest, record: RequestRecord, key: str, log: Log
) -> Response:
    tenant = tenant_of(service, key, body.user)
    prompts = as_prompts(body.prompt)
    _check(service, body)
    options = resolve_options(service.model, body, sample_by_default=True)
    max_tokens = body.max_tokens if body.max_tokens is not None else body.max_new_tokens
    check_limit(max_tokens, service.limits.new_tokens, "max_tokens")
    plan = await prepare_plan(
        service,
        tenant,
        partial(
            build_requests,
            service,
            body,
            prompts,
            options,
            max_tokens=DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens,
            stop=body.stop,
            tenant=tenant,
            num_choices=body.n or 1,
            best_of=body.best_of,
            logprobs=body.logprobs,
            echo=bool(body.echo),
        ),
        texts_in([*prompts, body.prefix]),
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
    stream.start()
    if not body.stream:
        finished = await stream.choices()
        outputs = [(echoes[n], choice) for n, row in enumerate(finished) for choice in row]

        def build() -> dict[str, Any]:
            choices = (
                _choice(n, echo, choice, body.logprobs is not None)
                for n, (echo, choice) in enumerate(outputs)
            )
            return {**base_fields, "choices": choices, "usage": usage(record)}

        num_values = sum(_count_values(echo, choice, body.logprobs) for echo, choice in outputs)
        return await json_response(service, tenant, build, num_values=num_values)
    chunks = _CompletionChunks(service, base_fields, echoes, plan, body, record)
    return EventStream(
        chunks.events(stream),
        service.limits,
        record,
        log,
        stream.engine_requests,
        on_error=chunks.cancelled_chunks,
    )


@dataclass(frozen=True)
class Echo:
    """What a choice begins with: the prompt, or nothing."""

    text: str
    logprobs: list[TokenLogprob]
    length: int  # characters of the prompt, which shift the offsets of the output


NO_ECHO = Echo("", [], length=0)


class _CompletionChunks:
    """Deltas as chunks; a choice begins with its echo, if requested."""

    def __init__(
        self,
        service: Service,
        base_fields: dict[str, Any],
        echoes: list[Echo],
        plan: RequestPlan,
        body: CompletionRequest,
        record: RequestRecord,
    ) -> None:
        self.service = service
        self.base_fields = base_fields
        self.echoes = echoes
        self.plan = plan
        self.body = body
        self.record = record
        self.include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self.unfinished = set(range(plan.num_choices * len(plan.requests)))
        self.started: set[int] = set()

    async def events(self, stream: GenerationStream) -> AsyncIterator[dict[str, Any] | bytes]:
        async for delta in stream.deltas():
            echo = self._take_echo(delta.choice)
            if delta.finish_reason is not None:
                self.unfinished.discard(delta.choice)
            encode = lambda delta=delta, echo=echo: sse_data(self._chunk(delta, echo))
            num_values = _count_values(echo, delta, self.body.logprobs)
            yield await self.service.build_response(encode, num_values, self.plan.requests[0].tenant)
        if self.include_usage:
            yield {**self.base_fields, "choices": [], "usage": usage(self.record)}

    def cancelled_chunks(self) -> list[dict[str, Any]]:
        """The last chunks of the choices that have not finished."""
        return [
            self._chunk(ChoiceDelta(choice, "", finish_reason="cancelled"), NO_ECHO)
            for choice in sorted(self.unfinished)
        ]

    def _take_echo(self, choice: int) -> Echo:
        """The echo for the first chunk of a choice; for the others only its length."""
        echo = self.echoes[choice // self.plan.num_choices]
        if choice in self.started:
            return Echo("", [], length=echo.length)
        self.started.add(choice)
        return echo

    def _chunk(self, delta: ChoiceDelta, echo: Echo) -> dict[str, Any]:
        choice = _choice(delta.choice, echo, delta, self.body.logprobs is not None)
        return {**self.base_fields, "choices": [choice], **({"usage": None} if self.include_usage else {})}


def _choice(
    index: int, echo: Echo, output: FinishedChoice | ChoiceDelta, with_logprobs: bool
) -> dict[str, Any]:
    """A choice of a response or chunk: echo and output, whose offsets count from the start of the echo."""
    logprobs = None
    if with_logprobs:
        shifted = [replace(entry, text_offset=entry.text_offset + echo.length) for entry in output.logprobs]
        logprobs = completion_logprobs([*echo.logprobs, *shifted])
    return {
        "index": index,
        "text": echo.text + output.text,
        "logprobs": logprobs,
        "finish_reason": output.finish_reason,
    }


def _count_values(echo: Echo, output: FinishedChoice | ChoiceDelta, logprobs: int | None) -> int:
    num_tokens = len(echo.logprobs) + len(output.logprobs)
    return num_tokens * (1 + (logprobs or 0)) + count_text_values(len(echo.text) + len(output.text))


def _check(service: Service, body: CompletionRequest) -> None:
    """Raise APIError for what is not supported, and for fields that contradict each other."""
    if body.suffix:
        message = "suffix was given, and fill-in-the-middle is not supported: leave it out"
        raise APIError(400, message, param="suffix")
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise APIError(
            400,
            "the best choices are known when all are finished, so they cannot be streamed: leave best_of or "
            "stream out",
            param="best_of",
        )
    if body.stream_options is not None and not body.stream:
        message = "stream_options are for streams: set stream, or leave them out"
        raise APIError(400, message, param="stream_options")
    if body.max_tokens is not None and body.max_new_tokens is not None:
        message = "max_tokens and max_new_tokens mean the same: give one of them"
        raise APIError(400, message, param="max_new_tokens")
    if body.echo and body.logprobs is not None and service.is_encoder_decoder:
        raise APIError(
            400,
            "the prompt of an encoder-decoder is its source, which has no logprobs: leave echo or logprobs "
            "out",
            param="echo",
        )


async def _echoes(
    service: Service, body: CompletionRequest, prompts: Sequence[Prompt], plan: RequestPlan
) -> list[Echo]:
    """The echo of each prompt: empty unless requested, and with logprobs only if those are."""
    if not body.echo:
        return [NO_ECHO] * len(prompts)
    num_tokens = sum(len(request.tokens) for request in plan.requests)
    tenant = plan.requests[0].tenant
    texts = await service.build_response(partial(_prompt_texts, service, prompts), num_tokens, tenant)
    if body.logprobs is None:
        return [Echo(text, [], len(text)) for text in texts]
    requests = [
        PromptRequest("score", request.tokens, top_logprobs=body.logprobs, tenant=request.tenant)
        for request in plan.requests
    ]
    scores = await score_prompts(service.engine_thread, requests)
    echoes = []
    for text, request, scored_tokens in zip(texts, plan.requests, scores, strict=True):
        tokens = list(request.tokens)
        build = partial(_prompt_logprobs, service.tokenizer, tokens, scored_tokens)
        logprobs = await service.build_response(build, len(tokens) * (1 + body.logprobs), tenant)
        echoes.append(Echo(text, logprobs, len(text)))
    return echoes


def _prompt_texts(service: Service, prompts: Sequence[Prompt]) -> list[str]:
    decode = lambda tokens: service.generator.input_tokenizer.decode(tokens, skip_special_tokens=True)
    return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]


def _prompt_logprobs(
    tokenizer: Tokenizer, tokens: list[int], scored_tokens: Sequence[ScoredToken]
) -> list[TokenLogprob]:
    """The logprobs of a prompt; its first token has none, since nothing predicts it."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    logprobs = [token_logprob(tokenizer, [], tokens[0], 0, None, ())]
    for n, entry in enumerate(scored_tokens, 1):
        detokenizer.add(tokens[n - 1])
        context = tokens[max(0, n - CONTEXT_TOKENS) : n]
        offset = len(detokenizer.text)
        logprobs.append(
            token_logprob(tokenizer, context, entry.token, offset, entry.logprob, entry.top_logprobs)
        )
    return logprobs
