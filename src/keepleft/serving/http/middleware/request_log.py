"""A record of each request (id, times, tokens), which becomes a line of the log and several metrics."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepleft.serving.http.errors import internal_error, to_api_error
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.metrics import Metrics
from keepleft.serving.http.middleware.auth import PUBLIC_PATHS, APIKeys
from keepleft.serving.http.request_id import HEADER, make_request_id, read_request_id

Log = Callable[[str, dict[str, Any]], None]  # takes a level and the fields of a line

DEFAULT_HEADERS = {  # of every response that does not set them itself
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}
REPLICA_HEADER = "x-replica"  # which of several servers has answered
WATCHING_ROUTES = (*PUBLIC_PATHS, "/metrics", "/explore/server")  # asked every few seconds: logged at debug
MAX_STACK_LINES = 12
MAX_METHOD_LENGTH = 16  # characters of the method of a request, which may be any word


@dataclass
class RequestRecord:
    """Filled in by the routes; never with a prompt, an output or a key."""

    request_id: str = field(default_factory=make_request_id)
    arrival_time: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    submitted_time: float | None = None  # to the engine
    scheduled_time: float | None = None  # by the engine
    first_token_time: float | None = None
    last_token_time: float | None = None
    abort_reason: str | None = None  # why a stream ended early

    def seconds_left(self, limits: Limits) -> float:
        """Of limits.seconds, which begin with the arrival of the request, whatever it waits for."""
        return self.arrival_time + limits.seconds - time.monotonic()

    def mark_submitted(self) -> None:
        self.submitted_time = time.monotonic()

    def mark_scheduled(self, scheduled_time: float | None) -> None:
        if self.scheduled_time is None:
            self.scheduled_time = scheduled_time

    def count_token(self) -> None:
        self.completion_tokens += 1
        self.last_token_time = time.monotonic()
        if self.first_token_time is None:
            self.first_token_time = self.last_token_time


class RequestLogMiddleware:
    """The outermost middleware: logs requests, adds default headers, and answers bugs of ours with 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log: Log, keys: APIKeys) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log
        self.keys = keys
        named = {} if metrics.replica is None else {REPLICA_HEADER: metrics.replica}
        self.default_headers = {**DEFAULT_HEADERS, **named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(read_request_id(scope["headers"]))
        status = 0  # no response has started
        scope.setdefault("state", {})["record"] = record

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *((name, value) for name, value in message["headers"] if name.lower() != HEADER),
                    (HEADER, record.request_id.encode()),
                    *(
                        (name.encode(), value.encode())
                        for name, value in self.default_headers.items()
                        if name.encode() not in present
                    ),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            api_error = to_api_error(error)
            if api_error is None:
                log_error(self.log, record, error)
            if not status:
                response = (api_error or internal_error(record.request_id)).to_response()
                await response(scope, receive, send_with_headers)
        finally:
            self._log_request(scope, record, status)

    def _log_request(self, scope: Scope, record: RequestRecord, status: int) -> None:
        end_time = time.monotonic()
        route = getattr(scope.get("route"), "path", "other")
        self._count_request(route, record, status, end_time)
        if route not in WATCHING_ROUTES and status:
            self.metrics.count_response(status)
        if route not in WATCHING_ROUTES and (key := scope["state"].get("tenant")) is not None:
            self.metrics.count_usage(key, status, record.prompt_tokens, record.completion_tokens)
        milliseconds = lambda seconds: None if seconds is None else round(1000 * seconds, 1)
        ttft = record.first_token_time and record.first_token_time - record.arrival_time
        self.log(
            "debug" if route in WATCHING_ROUTES else "info",
            {
                "id": record.request_id,
                "method": scope["method"][:MAX_METHOD_LENGTH],
                "route": route,
                "status": status,
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
                "ttft_ms": milliseconds(ttft),
                "ms": milliseconds(end_time - record.arrival_time),
                "ended": record.abort_reason,
                "tenant": self.keys.label(scope["state"].get("tenant", "")) or None,
            },
        )

    def _count_request(self, route: str, record: RequestRecord, status: int, end_time: float) -> None:
        metrics = self.metrics
        metrics.requests.labels(route, str(status)).inc()
        metrics.e2e_request_latency.labels(route).observe(end_time - record.arrival_time)
        metrics.prompt_tokens.inc(record.prompt_tokens)
        metrics.generation_tokens.inc(record.completion_tokens)
        if record.scheduled_time is not None and record.submitted_time is not None:
            metrics.queue_time.observe(max(0.0, record.scheduled_time - record.submitted_time))
        if record.first_token_time is not None and record.last_token_time is not None:
            metrics.observe_ttft(record.first_token_time - record.arrival_time)
            if record.completion_tokens > 1:
                metrics.time_per_output_token.observe(
                    (record.last_token_time - record.first_token_time) / (record.completion_tokens - 1)
                )


def log_error(log: Log, record: RequestRecord, error: BaseException) -> None:
    """Log a bug of ours: where it happened, and its message at debug only, since it may quote the request."""
    where = getattr(error, "where", None) or stack_lines(error)  # a bug in another process brings its own
    log("error", {"id": record.request_id, "error": type(error).__name__, "where": where})
    log("debug", {"id": record.request_id, "message": str(error)})


def stack_lines(error: BaseException) -> list[str]:
    """The lines of code in a traceback, without values."""
    return [
        f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)[-MAX_STACK_LINES:]
    ]


def log_line(level: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line of the log, with time and level."""
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level, **fields}
