"""Everything put together: routes inside, and around them what every request passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from keepleft import __version__
from keepleft.serving.http import (
    attention,
    chat,
    classify,
    completions,
    embeddings,
    explore,
    models,
    score,
    translate,
)
from keepleft.serving.http.bodies import Bodies
from keepleft.serving.http.errors import KNOWN, answered
from keepleft.serving.http.hosts import Named
from keepleft.serving.http.keys import Keys, Locked
from keepleft.serving.http.metrics import Metrics
from keepleft.serving.http.open import Open
from keepleft.serving.http.recorded import Log, Recorded
from keepleft.serving.http.service import Service


def app(service: Service, *, keys: Keys | None = None, names: frozenset[str] | None = None, origins: Sequence[str] = (),
        log: Log = lambda level, what: None) -> FastAPI:
    """`keys`: who may ask; `names`: the hosts that it answers to, None for any; `origins`: web pages elsewhere that may ask."""
    keys, metrics = keys or Keys(), Metrics(service.running)
    out = FastAPI(title="keepleft", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False,
                  exception_handlers=dict.fromkeys(KNOWN, answered))
    for router in (models.routes(service, metrics), completions.routes(service, log), chat.routes(service, log),
                   embeddings.routes(service), translate.routes(service), classify.routes(service), score.routes(service),
                   attention.routes(service), explore.routes(service)):
        out.include_router(router)
    out.add_middleware(Bodies, limits=service.limits)  # the last added is the first that a request meets
    out.add_middleware(Open, service=service)
    out.add_middleware(Locked, keys=keys)
    if names is not None:
        out.add_middleware(Named, names=names)
    if origins:
        out.add_middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"],
                           allow_headers=["authorization", "content-type"], expose_headers=["x-request-id", "retry-after"])
    out.add_middleware(Recorded, metrics=metrics, log=log)
    _described(out, bool(keys.hashes))
    return out


def _described(out: FastAPI, locked: bool) -> None:
    """The document at /openapi.json says whether a key is wanted."""
    plain = out.openapi

    def openapi() -> dict[str, Any]:
        found = plain()
        if locked:
            found.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, methods in found["paths"].items():
                for operation in methods.values():
                    operation["security"] = [] if path == "/health" else [{"key": []}]
        return found

    out.openapi = openapi  # type: ignore[method-assign]
