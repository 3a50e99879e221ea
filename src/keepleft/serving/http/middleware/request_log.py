"""One record for each request: its number, its times and counts.

It becomes a line of the log and a few metrics.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from keepleft.serving.http.errors import internal_error, to_api_error
from keepleft.serving.http.metrics import Metrics

Log = Callable[[str, dict[str, Any]], None]  # a level, and what happened

# on every answer that does not say otherwise
DEFAULT_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


@dataclass
class RequestRecord:
    """Filled by routes; never with a prompt, an answer or a key."""

    request_id: str = field(default_factory=lambda: f"req_{token_hex(12)}")
    arrival_time: float = field(default_factory=time.monotonic)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    submitted_time: float | None = None  # when the engine was given it
    scheduled_time: float | None = None  # when the engine turned to it
    first_token_time: float | None = None  # when its first token came
    last_token_time: float | None = None
    abort_reason: str | None = None  # what cut a stream short

    def mark_submitted(self) -> None:
        self.submitted_time = time.monotonic()

    def mark_scheduled(self, scheduled_time: float | None) -> None:
        if self.scheduled_time is None:
            self.scheduled_time = scheduled_time

    def count_token(self) -> None:
        self.completion_tokens += 1
        self.last_token_time = time.monotonic()
        self.first_token_time = (
            self.last_token_time if self.first_token_time is None else self.first_token_time
        )


class RequestLogMiddleware:
    """The outermost of all: nothing leaves without its headers, and nothing that breaks is told but by its
    number.
    """

    def __init__(self, app: Any, metrics: Metrics, log: Log) -> None:
        self.app = app
        self.metrics = metrics
        self.log = log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, status = RequestRecord(), 0
        scope.setdefault("state", {})["record"] = record

        async def send_with_headers(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", record.request_id.encode()),
                    *(
                        (name.encode(), value.encode())
                        for name, value in DEFAULT_HEADERS.items()
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
                await (api_error or internal_error(record.request_id)).to_response()(
                    scope, receive, send_with_headers
                )
        finally:
            self._log_request(scope, record, status)

    def _log_request(self, scope: Any, record: RequestRecord, status: int) -> None:
        end_time = time.monotonic()
        route = getattr(scope.get("route"), "path", "other")
        metrics = self.metrics
        metrics.requests.labels(route, str(status)).inc()
        metrics.e2e_request_latency.labels(route).observe(end_time - record.arrival_time)
        metrics.prompt_tokens.inc(record.prompt_tokens)
        metrics.generation_tokens.inc(record.completion_tokens)
        if record.scheduled_time is not None and record.submitted_time is not None:
            metrics.queue_time.observe(max(0.0, record.scheduled_time - record.submitted_time))
        if record.first_token_time is not None and record.last_token_time is not None:
            metrics.time_to_first_token.observe(record.first_token_time - record.arrival_time)
            if record.completion_tokens > 1:
                metrics.time_per_output_token.observe(
                    (record.last_token_time - record.first_token_time) / (record.completion_tokens - 1)
                )
        milliseconds = lambda seconds: None if seconds is None else round(1000 * seconds, 1)
        self.log(
            "debug" if route in ("/health", "/metrics") else "info",
            {
                "id": record.request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
                "ttft_ms": milliseconds(
                    record.first_token_time and record.first_token_time - record.arrival_time
                ),
                "ms": milliseconds(end_time - record.arrival_time),
                "ended": record.abort_reason,
                "tenant": scope["state"].get("tenant", "")[:8] or None,
            },
        )


def log_error(log: Log, record: RequestRecord, error: BaseException) -> None:
    """Our fault: where it happened, and what it said only to those who look closely, for it may say what was
    asked.
    """
    log("error", {"id": record.request_id, "error": type(error).__name__, "where": stack_lines(error)})
    log("debug", {"id": record.request_id, "message": str(error)})


def stack_lines(error: BaseException) -> list[str]:
    """The lines that an error went through, without what was in them."""
    return [
        f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
        for frame in traceback.extract_tb(error.__traceback__)[-12:]
    ]


def log_line(level: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A line of the log."""
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level, **fields}
