"""The FastAPI application: the routes, and around them the middleware."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from keepleft import __version__
from keepleft.serving.http.errors import HANDLED_EXCEPTIONS, exception_handler
from keepleft.serving.http.metrics import Metrics
from keepleft.serving.http.middleware.admission import AdmissionMiddleware
from keepleft.serving.http.middleware.allowed_hosts import AllowedHostsMiddleware
from keepleft.serving.http.middleware.auth import PUBLIC_PATHS, APIKeys, AuthMiddleware
from keepleft.serving.http.middleware.body_limit import BodyLimitMiddleware
from keepleft.serving.http.middleware.draining import DrainingMiddleware
from keepleft.serving.http.middleware.request_log import Log, RequestLogMiddleware
from keepleft.serving.http.routes import (
    attention,
    chat,
    classify,
    completions,
    embeddings,
    explorer,
    score,
    server_status,
    status,
    translate,
)
from keepleft.serving.http.service import Service


def make_app(
    service: Service,
    *,
    keys: APIKeys | None = None,
    allowed_hosts: frozenset[str] | None = None,
    allowed_origins: Sequence[str] = (),
    replica: str | None = None,
    log: Log = lambda level, fields: None,
) -> FastAPI:
    """The application that serves `service`.

    `keys`: the API keys it accepts; `allowed_hosts`: the Host headers it accepts, None for any;
    `allowed_origins`: the origins of web pages that may use it (CORS); `replica`: a label of all metrics,
    where several servers serve one model.
    """
    keys = keys or APIKeys()
    metrics = Metrics(service.name, keys.label if keys.hashes else None, replica)
    app = FastAPI(
        title="keepleft",
        version=__version__,
        openapi_url=None,  # _serve_openapi
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=dict.fromkeys(HANDLED_EXCEPTIONS, exception_handler),
    )
    for router in (
        status.routes(service, metrics, keys),
        completions.routes(service, log),
        chat.routes(service, log),
        embeddings.routes(service),
        translate.routes(service),
        classify.routes(service),
        score.routes(service),
        attention.routes(service),
        explorer.routes(service, keys),
        server_status.routes(service, metrics, keys),
    ):
        app.include_router(router)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, limits=service.limits)
    app.add_middleware(AdmissionMiddleware, limits=service.limits)
    app.add_middleware(DrainingMiddleware, service=service)
    app.add_middleware(AuthMiddleware, keys=keys)
    if allowed_hosts is not None:
        app.add_middleware(AllowedHostsMiddleware, allowed_hosts=allowed_hosts)
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(RequestLogMiddleware, metrics=metrics, log=log, keys=keys)
    _document_auth(app, bool(keys.hashes))
    _serve_openapi(app)
    return app


def _serve_openapi(app: FastAPI) -> None:
    """Serve /openapi.json. FastAPI itself would render it on the event loop, for every request."""
    lock = threading.Lock()
    document = b""

    def render() -> bytes:
        nonlocal document
        with lock:
            document = document or json.dumps(app.openapi(), separators=(",", ":")).encode()
        return document

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Response:
        return Response(document or await asyncio.to_thread(render), media_type="application/json")


def _document_auth(app: FastAPI, requires_key: bool) -> None:
    """Say in /openapi.json whether an API key is required."""
    default_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        schema = default_openapi()
        if requires_key:
            schema.setdefault("components", {})["securitySchemes"] = {
                "key": {"type": "http", "scheme": "bearer"}
            }
            for path, methods in schema["paths"].items():
                for operation in methods.values():
                    operation["security"] = [] if path in PUBLIC_PATHS else [{"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
