"""GET /v1/models, /health, /metrics: what is served here, and how it fares."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from keepleft.serving.http.answered import Health, Model, Models, documented
from keepleft.serving.http.errors import AGAIN
from keepleft.serving.http.metrics import Metrics
from keepleft.serving.http.service import Service


def routes(service: Service, metrics: Metrics) -> APIRouter:
    router = APIRouter()
    told: dict[str, Any] = {"id": service.name, "object": "model", "created": service.created, "owned_by": "keepleft",
                            "max_model_len": service.reach, "family": service.family, "tasks": service.tasks}

    @router.get("/v1/models", tags=["OpenAI"], summary="The model that is served", **documented(Models))
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [told]})

    @router.get("/v1/models/{model:path}", tags=["OpenAI"], summary="The same by its name", **documented(Model))
    async def model(model: str) -> Response:
        service.named(model)
        return JSONResponse(told)

    @router.get("/health", tags=["keepleft"], summary="Is it ready? 503 while it shuts down",
                **documented(Health, also={503: {"model": Health}}))
    async def health() -> Response:
        ready = service.status == "ready"
        return JSONResponse({"status": service.status}, 200 if ready else 503, {} if ready else {"retry-after": f"{AGAIN:g}"})

    @router.get("/metrics", tags=["keepleft"], summary="Numbers for Prometheus", response_class=PlainTextResponse,
                **documented(None))
    async def numbers() -> Response:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    return router
