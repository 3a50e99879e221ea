"""GET /explore/server: what the server is doing, for the page's view of the operator"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from heapq import nlargest

import torch
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from keepleft import __version__
from keepleft.models.transformer import CausalModel, Model
from keepleft.serving.engine.activity import EngineStatus, KeyActivity
from keepleft.serving.engine.capacity import kv_bytes_per_token
from keepleft.serving.http.connections import ConnectionCounter
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.metrics import Metrics
from keepleft.serving.http.middleware.auth import APIKeys, is_same_origin
from keepleft.serving.http.schemas.responses import response_docs
from keepleft.serving.http.schemas.server_status import (
    AddressConnections,
    CacheStatus,
    ConnectionStatus,
    LatencyStatus,
    QueueStatus,
    ServerStatus,
    TenantStatus,
    WorkStatus,
)
from keepleft.serving.http.service import Service

SERVER_STATUS_PATH = "/explore/server"  # below the page, so that a browser may send the key as its password
MAX_TENANTS = 20  # in one answer
MAX_ADDRESSES = 8


def routes(service: Service, metrics: Metrics, keys: APIKeys) -> APIRouter:
    router = APIRouter()

    @router.get(
        SERVER_STATUS_PATH,
        tags=["keepleft"],
        summary="What the server is doing, for its operator: connections, tenants, queue, cache, throughput",
        **response_docs(ServerStatus),
    )
    async def server_status(request: Request) -> Response:
        if not is_same_origin(request.headers.get("sec-fetch-site")):
            raise APIError(
                403, "a page of another site asks for this: only the server's own may", code="cross_site"
            )
        if not keys.is_operator(request.state.tenant):
            raise APIError(
                403,
                "only the operator may see this: send the key of --operator-key, or one that has `operator` "
                "behind it in the key file",
                code="operator_only",
            )
        status = read_server_status(service, await service.engine_status(), metrics, keys)
        return JSONResponse(status.model_dump())

    return router


def read_server_status(
    service: Service, engine_status: EngineStatus, metrics: Metrics, keys: APIKeys
) -> ServerStatus:
    """All of it at this moment. To be called in the event loop, which connections and metrics belong to."""
    now = time.monotonic()
    totals = engine_status.totals
    tenants = keys.weights.keys() or {""}
    top_tenants = _top_tenants(tenants, engine_status)
    return ServerStatus(
        status=service.status,
        model=service.name,
        version=__version__,
        device=str(service.model.token.weight.device),
        dtype=service.dtype,
        threads=torch.get_num_threads(),
        uptime=round(now - service.started_at, 3),
        engine_age=round(now - engine_status.taken_at, 3),
        steps=int(totals["steps"]),
        step_seconds=round(totals["step_seconds"], 4),
        failures=int(totals["failures"]),
        prompt_tokens=int(totals["prompt_tokens"]),
        generation_tokens=int(totals["generation_tokens"]),
        time_to_first_token=_time_to_first_token(metrics, now),
        responses=dict(metrics.responses),
        queue=_queue(engine_status),
        cache=_cache(engine_status, service.model),
        tenants=[_tenant(tenant, engine_status, metrics, keys) for tenant in top_tenants],
        more_tenants=len(tenants) - len(top_tenants),
        connections=None if service.connections is None else _connections(service.connections),
        beside_engine=[
            WorkStatus(name=name, running=running, waiting=waiting)
            for name, (running, waiting) in service.work_beside_engine().items()
        ],
    )


def _time_to_first_token(metrics: Metrics, now: float) -> LatencyStatus:
    num_requests, (p50, p95) = metrics.recent_ttft.quantiles((0.5, 0.95), now)
    return LatencyStatus(requests=num_requests, p50=p50, p95=p95)


def _queue(status: EngineStatus) -> QueueStatus:
    activity = status.activity.values()
    max_rows = status.totals.get("max_num_seqs")
    return QueueStatus(
        running=sum(key.running for key in activity),
        running_rows=sum(key.running_rows for key in activity),
        max_rows=None if max_rows is None else int(max_rows),
        paused=sum(key.paused for key in activity),
        waiting=sum(key.waiting for key in activity),
        oldest_wait=round(max((key.oldest_wait for key in activity), default=0.0), 3),
        in_flight=int(status.totals["in_flight"]),
    )


def _cache(status: EngineStatus, model: Model) -> CacheStatus | None:
    totals = status.totals
    if "pages" not in totals or not isinstance(model, CausalModel):
        return None
    page_size = int(totals["page_size"])
    prefix_pages = int(totals["prefix_cache_pages"])
    return CacheStatus(
        page_size=page_size,
        page_bytes=page_size * kv_bytes_per_token(model),
        pages=int(totals["pages"]),
        used=int(totals["pages_used"]) - prefix_pages,
        prefix=prefix_pages,
        prefix_queries=int(totals["prefix_cache_queries"]),
        prefix_hits=int(totals["prefix_cache_hits"]),
        preemptions=int(totals["preemptions"]),
    )


def _top_tenants(tenants: Iterable[str], status: EngineStatus) -> list[str]:
    """Those with requests now, then those with the most tokens; in the order of their tokens."""

    def num_tokens(tenant: str) -> int:
        return status.prompt_tokens.get(tenant, 0) + status.generation_tokens.get(tenant, 0)

    top = nlargest(MAX_TENANTS, tenants, key=lambda tenant: (tenant in status.activity, num_tokens(tenant)))
    return sorted(top, key=lambda tenant: (-num_tokens(tenant), tenant))


def _tenant(tenant: str, status: EngineStatus, metrics: Metrics, keys: APIKeys) -> TenantStatus:
    activity = status.activity.get(tenant, KeyActivity())
    usage = metrics.usage_by_key.get(tenant, Counter())
    weight = keys.weights.get(tenant, 1.0)
    total_weight = sum(keys.weights.get(active, 1.0) for active in status.activity)
    return TenantStatus(
        label=keys.label(tenant),
        operator=keys.is_operator(tenant),
        weight=weight,
        share=round(weight / total_weight, 4) if tenant in status.activity else 0.0,
        users=activity.users,
        in_flight=status.in_flight.get(tenant, 0),
        running_rows=activity.running_rows,
        running=activity.running,
        paused=activity.paused,
        waiting=activity.waiting,
        oldest_wait=round(activity.oldest_wait, 3),
        requests=usage["requests"],
        rate_limited=usage["rate_limited"],
        prompt_tokens=status.prompt_tokens.get(tenant, 0),
        generation_tokens=status.generation_tokens.get(tenant, 0),
    )


def _connections(connections: ConnectionCounter) -> ConnectionStatus:
    return ConnectionStatus(
        open=connections.num_open,
        limit=connections.max_open,
        limit_per_address=connections.max_per_address,
        refused=connections.num_refused,
        addresses=len(connections.by_address),
        top=[
            AddressConnections(address=address, open=num_open)
            for address, num_open in connections.by_address.most_common(MAX_ADDRESSES)
        ],
    )
