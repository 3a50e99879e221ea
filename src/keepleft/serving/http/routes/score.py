"""POST /v1/score"""

from __future__ import annotations

from functools import partial
from math import exp
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from keepleft.data.token_text import token_pieces
from keepleft.decoding.score import ScoredToken
from keepleft.serving.engine.request import PromptRequest, Tenant
from keepleft.serving.http.engine_requests import score_prompts
from keepleft.serving.http.errors import APIError, too_long
from keepleft.serving.http.json_response import json_response
from keepleft.serving.http.limits import Limits
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
    texts, sources = _check_texts(service, body)
    work = partial(_score_requests, service, texts, sources, record, tenant)
    requests = await service.in_thread(work, tenant, [*texts, *sources])
    scores = await score_prompts(service.engine_thread, requests)

    def build() -> dict[str, Any]:
        data = (
            {"index": n, **_format_score(service, scored_tokens)} for n, scored_tokens in enumerate(scores)
        )
        return {"object": "list", "model": service.name, "data": data, "usage": prompt_usage(record)}

    return await json_response(service, tenant, build, num_values=3 * sum(map(len, scores)))


def _check_texts(service: Service, body: ScoreRequest) -> tuple[list[str], list[str]]:
    """The texts, and the source of each for an encoder-decoder. Raises APIError."""
    texts = as_texts(body.input, service.limits)
    if service.is_encoder_decoder and body.source is None:
        message = "this model scores a text for its source: give source too, one for each text"
        raise APIError(400, message, param="source")
    if not service.is_encoder_decoder and body.source is not None:
        raise APIError(400, "source was given, and this model has none: leave it out", param="source")
    if body.source is None:
        return texts, []
    sources = as_texts(body.source, service.limits, "source")
    if len(sources) != len(texts):
        message = f"there are {len(texts)} texts and {len(sources)} sources: give one for each"
        raise APIError(400, message, param="source")
    return texts, sources


def _score_requests(
    service: Service, texts: list[str], sources: list[str], record: RequestRecord, tenant: Tenant
) -> list[PromptRequest]:
    """One engine request for each text; counts their tokens. Raises APIError."""
    rows = service.encoder.encode(texts)
    source_rows = service.input_encoder.encode(sources)
    for kind, kind_rows in (("text", rows), ("source", source_rows)):
        for n, row in enumerate(kind_rows):
            if not row:
                raise APIError(400, f"{kind} {n} is empty: there is nothing to score", param="input")
            if len(row) >= service.max_model_len:  # a start or end token may be added
                raise too_long(len(row), service.max_model_len, f"{kind} {n}")
            record.prompt_tokens += len(row)
    if service.is_encoder_decoder:
        rows = service.encoder.encode(texts, add_special_tokens=False)
    arranged = list(map(service.predictor.arrange_for_score, rows, source_rows or [[]] * len(rows)))
    _check_num_logprobs(sum(len(tokens) for _, tokens, _ in arranged), service.limits)
    return [
        PromptRequest("score", [*context, *tokens], source_tokens, num_context=len(context), tenant=tenant)
        for context, tokens, source_tokens in arranged
    ]


def _check_num_logprobs(num_logprobs: int, limits: Limits) -> None:
    if num_logprobs > limits.reported_logprobs:
        raise APIError(
            400,
            f"the texts have {num_logprobs:,} tokens to score: at most {limits.reported_logprobs:,} are "
            "allowed in one request; give fewer texts",
            param="input",
            code="too_large",
        )


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
