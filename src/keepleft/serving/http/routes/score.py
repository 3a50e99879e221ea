"""POST /v1/score"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft.data.token_text import token_pieces
from keepleft.decoding.score import ScoredToken
from keepleft.serving.engine.request import PromptRequest, Tenant
from keepleft.serving.http.engine_requests import score_prompts
from keepleft.serving.http.errors import APIError, too_long
from keepleft.serving.http.logprobs import finite_logprob
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import as_texts, prompt_usage, tenant_of
from keepleft.serving.http.schemas.requests import ScoreRequest
from keepleft.serving.http.schemas.responses import ScoreResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect
from keepleft.serving.http.validated_route import validated_route


def routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/score", tags=["keepleft"], summary="Log-probabilities of texts", **response_docs(ScoreResponse)
    )
    async def score(request: Request, body: ScoreRequest) -> Response:
        service.check_model(body.model)
        service.require_task("score")
        return await until_disconnect(
            request, service.limits, _answer(service, body, request.state.record, request.state.tenant)
        )

    return router


async def _answer(service: Service, body: ScoreRequest, record: RequestRecord, key: str) -> Response:
    tenant = tenant_of(service, key, body.user)
    requests = await service.in_thread(partial(_score_requests, service, body, record, tenant), tenant)
    data = []
    for n, scored_tokens in enumerate(await score_prompts(service.engine_thread, requests)):
        score = await service.in_thread(partial(_format_score, service, scored_tokens), tenant)
        data.append({"index": n, **score})
    return JSONResponse(
        {"object": "list", "model": service.name, "data": data, "usage": prompt_usage(record)}
    )


def _score_requests(
    service: Service, body: ScoreRequest, record: RequestRecord, tenant: Tenant
) -> list[PromptRequest]:
    """One engine request for each text; counts their tokens. Raises APIError."""
    texts = as_texts(body.input, service.limits)
    if service.is_encoder_decoder and body.source is None:
        message = "this model scores a text for its source: give source too, one for each text"
        raise APIError(400, message, param="source")
    if not service.is_encoder_decoder and body.source is not None:
        raise APIError(400, "source was given, and this model has none: leave it out", param="source")
    sources: Sequence[str | None] = (
        [None] * len(texts) if body.source is None else as_texts(body.source, service.limits, "source")
    )
    if len(sources) != len(texts):
        message = f"there are {len(texts)} texts and {len(sources)} sources: give one for each"
        raise APIError(400, message, param="source")
    for n, (text, source) in enumerate(zip(texts, sources, strict=True)):
        for name, content, tokenizer in (
            (f"text {n}", text, service.tokenizer),
            (f"source {n}", source, service.generator.input_tokenizer),
        ):
            num_tokens = 0 if content is None else len(tokenizer.encode(content).ids)
            if content is not None and num_tokens == 0:
                raise APIError(400, f"{name} is empty: there is nothing to score", param="input")
            if num_tokens >= service.max_model_len:  # a start or end token may be added
                raise too_long(num_tokens, service.max_model_len, name)
            record.prompt_tokens += num_tokens
    encoded = [
        service.predictor.encode_for_score(text, source) for text, source in zip(texts, sources, strict=True)
    ]
    return [
        PromptRequest("score", [*context, *tokens], source_tokens, num_context=len(context), tenant=tenant)
        for context, tokens, source_tokens in encoded
    ]


def _format_score(service: Service, scored_tokens: list[ScoredToken]) -> dict[str, Any]:
    total = sum(entry.logprob for entry in scored_tokens)
    pieces = token_pieces(service.tokenizer, [entry.token for entry in scored_tokens])
    return {
        "logprob": finite_logprob(total),
        "perplexity": round(exp(min(700.0, -finite_logprob(total) / max(1, len(scored_tokens)))), 6),
        "tokens": [
            {"token": piece, "logprob": finite_logprob(entry.logprob)}
            for piece, entry in zip(pieces, scored_tokens, strict=True)
        ],
    }
