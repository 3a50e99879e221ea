"""POST /v1/classify"""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from torch import Tensor

from keepleft.serving.engine.request import PromptRequest
from keepleft.serving.http.engine_requests import pool_prompts
from keepleft.serving.http.json_response import json_response
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import as_prompts, prompt_usage, tenant_of, texts_in, token_rows
from keepleft.serving.http.schemas.requests import ClassifyRequest
from keepleft.serving.http.schemas.responses import ClassificationResponse, response_docs
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect
from keepleft.serving.http.validated_route import validated_route


def routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=validated_route(service))

    @router.post(
        "/v1/classify", tags=["keepleft"], summary="Labels of texts", **response_docs(ClassificationResponse)
    )
    async def classify(request: Request, body: ClassifyRequest) -> Response:
        service.check_model(body.model)
        service.require_task("classify")
        return await until_disconnect(
            request, service.limits, _answer(service, body, request.state.record, request.state.tenant)
        )

    return router


async def _answer(service: Service, body: ClassifyRequest, record: RequestRecord, key: str) -> Response:
    tenant = tenant_of(service, key, body.user)
    rows = await service.in_thread(
        partial(token_rows, service, body.input), tenant, texts_in(as_prompts(body.input))
    )
    record.prompt_tokens += sum(map(len, rows))
    requests = [PromptRequest("classify", row, tenant=tenant) for row in rows]
    results = await pool_prompts(service.engine_thread, requests)

    def build() -> dict[str, Any]:
        data = [{"index": n, **_label(service, probabilities)} for n, probabilities in enumerate(results)]
        return {"object": "list", "model": service.name, "data": data, "usage": prompt_usage(record)}

    return await json_response(service, tenant, build, num_values=sum(map(len, results)))


def _label(service: Service, probabilities: Tensor) -> dict[str, Any]:
    labels = service.predictor.labels
    values = [round(value, 6) for value in probabilities.tolist()]
    return {
        "label": labels[int(probabilities.argmax())],
        "probabilities": dict(zip(labels, values, strict=True)),
    }
