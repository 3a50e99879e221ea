"""GET /v1/models, /health and its probes, /metrics"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from keepleft.serving.http.errors import RETRY_AFTER_SECONDS
from keepleft.serving.http.metrics import Metrics
from keepleft.serving.http.middleware.auth import APIKeys
from keepleft.serving.http.schemas.responses import (
    HealthResponse,
    HealthStatus,
    ModelCard,
    ModelList,
    response_docs,
)
from keepleft.serving.http.service import Service

READY_STATUSES: tuple[HealthStatus, ...] = ("ready",)
LIVE_STATUSES: tuple[HealthStatus, ...] = ("ready", "draining")


def routes(service: Service, metrics: Metrics, keys: APIKeys) -> APIRouter:
    router = APIRouter()
    model_card: dict[str, Any] = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "keepleft",
        "max_model_len": service.max_model_len,
        "family": service.family,
        "tasks": service.tasks,
    }

    @router.get("/v1/models", tags=["OpenAI"], summary="The served model", **response_docs(ModelList))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [model_card]})

    @router.get(
        "/v1/models/{model:path}", tags=["OpenAI"], summary="A model by name", **response_docs(ModelCard)
    )
    async def model(model: str) -> Response:
        service.check_model(model)
        return JSONResponse(model_card)

    health_docs = response_docs(HealthResponse, extra_responses={503: {"model": HealthResponse}})

    @router.get("/health", tags=["keepleft"], summary="The same as /health/ready", **health_docs)
    @router.get(
        "/health/ready",
        tags=["keepleft"],
        summary="Readiness: 503 where requests should go to another server",
        **health_docs,
    )
    async def readiness() -> Response:
        return health_response(service.status, READY_STATUSES)

    @router.get(
        "/health/live",
        tags=["keepleft"],
        summary="Liveness: 503 where only a restart helps; 200 while the server shuts down",
        **health_docs,
    )
    async def liveness() -> Response:
        return health_response(service.status, LIVE_STATUSES)

    @router.get(
        "/metrics",
        tags=["keepleft"],
        summary="Prometheus metrics: all for the operator, their own usage for others",
        response_class=PlainTextResponse,
        **response_docs(None),
    )
    async def prometheus_metrics(request: Request) -> Response:
        key: str = request.state.tenant
        if keys.is_operator(key):
            content = metrics.render((await service.engine_status()).totals)
        else:
            content = metrics.render_usage(key)
        return PlainTextResponse(content, media_type="text/plain; version=0.0.4")

    return router


def health_response(status: HealthStatus, healthy: Collection[HealthStatus]) -> Response:
    """200 for a healthy status, 503 for others."""
    if status in healthy:
        return JSONResponse({"status": status})
    return JSONResponse({"status": status}, 503, {"retry-after": f"{RETRY_AFTER_SECONDS:g}"})
