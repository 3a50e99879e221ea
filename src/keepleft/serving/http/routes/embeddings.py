"""POST /v1/embeddings"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from keepleft.serving.engine.request import PromptRequest
from keepleft.serving.http.engine_requests import pool_prompts
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.json_response import json_response
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import as_prompts, prompt_usage, tenant_of, texts_in, token_rows
from keepleft.serving.http.schemas.requests import EmbeddingRequest
from keepleft.serving.http.schemas.responses import EmbeddingResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect
from keepleft.serving.http.validated_route import validated_route


def routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/embeddings", tags=["OpenAI"], summary="Embeddings of texts", **response_docs(EmbeddingResponse)
    )
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        service.check_model(body.model)
        if body.dimensions is not None:
            raise APIError(
                400,
                f"the embeddings of this model have {service.model.design.dim} dimensions, which cannot be "
                "changed: leave dimensions out",
                param="dimensions",
            )
        return await until_disconnect(
            request, service.limits, _answer(service, body, request.state.record, request.state.tenant)
        )

    return router


async def _answer(service: Service, body: EmbeddingRequest, record: RequestRecord, key: str) -> Response:
    tenant = tenant_of(service, key, body.user)
    rows = await service.in_thread(
        partial(token_rows, service, body.input), tenant, texts_in(as_prompts(body.input))
    )
    record.prompt_tokens += sum(map(len, rows))
    requests = [PromptRequest("embed", row, tenant=tenant) for row in rows]
    vectors = [vector.numpy() for vector in await pool_prompts(service.engine_thread, requests)]
    encode = _as_base64 if body.encoding_format == "base64" else _as_floats

    def build() -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": n, "embedding": encode(vector)}
            for n, vector in enumerate(vectors)
        ]
        return {"object": "list", "model": service.name, "data": data, "usage": prompt_usage(record)}

    return await json_response(service, tenant, build, num_values=sum(map(len, vectors)))


def _as_floats(vector: np.ndarray) -> list[float]:
    return [float(f"{value:.8g}") for value in vector.tolist()]


def _as_base64(vector: np.ndarray) -> str:
    """float32, little-endian."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
