"""One record for each request: its number, its times and counts. It becomes a line of the log and a few metrics."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from keepleft.serving.http.errors import our_fault, refusal
from keepleft.serving.http.metrics import Metrics

Log = Callable[[str, dict[str, Any]], None]  # a level, and what happened

HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}  # on every answer that does not say otherwise


@dataclass
class Record:
    """Filled by routes; never with a prompt, an answer or a key."""

    number: str = field(default_factory=lambda: f"req_{token_hex(12)}")
    began: float = field(default_factory=time.monotonic)
    read: int = 0
    written: int = 0
    submitted: float | None = None  # when the engine was given it
    turned: float | None = None     # when the engine turned to it
    first: float | None = None      # when its first token came
    last: float | None = None
    ended: str | None = None        # what cut a stream short

    def sent(self) -> None:
        self.submitted = time.monotonic()

    def heard(self, began: float | None) -> None:
        if self.turned is None:
            self.turned = began

    def token(self) -> None:
        self.written += 1
        self.last = time.monotonic()
        self.first = self.last if self.first is None else self.first


class Recorded:
    """The outermost of all: nothing leaves without its headers, and nothing that breaks is told but by its number."""

    def __init__(self, app: Any, metrics: Metrics, log: Log) -> None:
        self.app, self.metrics, self.log = app, metrics, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record, status = Record(), 0
        scope.setdefault("state", {})["record"] = record

        async def sent(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                given = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [*message["headers"], (b"x-request-id", record.number.encode()),
                                      *((name.encode(), value.encode()) for name, value in HEADERS.items()
                                        if name.encode() not in given)]
            await send(message)

        try:
            await self.app(scope, receive, sent)
        except Exception as error:
            known = refusal(error)
            if known is None:
                noted(self.log, record, error)
            if not status:
                await (known or our_fault(record.number)).answer()(scope, receive, sent)
        finally:
            self._note(scope, record, status)

    def _note(self, scope: Any, record: Record, status: int) -> None:
        now = time.monotonic()
        route = getattr(scope.get("route"), "path", "other")
        metrics = self.metrics
        metrics.requests.labels(route, str(status)).inc()
        metrics.whole.labels(route).observe(now - record.began)
        metrics.read.inc(record.read)
        metrics.written.inc(record.written)
        if record.turned is not None and record.submitted is not None:
            metrics.queue.observe(max(0.0, record.turned - record.submitted))
        if record.first is not None and record.last is not None:
            metrics.first.observe(record.first - record.began)
            if record.written > 1:
                metrics.token.observe((record.last - record.first) / (record.written - 1))
        thousandths = lambda seconds: None if seconds is None else round(1000 * seconds, 1)
        self.log("debug" if route in ("/health", "/metrics") else "info", {
            "id": record.number, "method": scope["method"], "route": route, "status": status, "read": record.read,
            "written": record.written, "ms_first": thousandths(record.first and record.first - record.began),
            "ms": thousandths(now - record.began), "ended": record.ended,
            "tenant": scope["state"].get("tenant", "")[:8] or None})


def noted(log: Log, record: Record, error: BaseException) -> None:
    """Our fault: where it happened, and what it said only to those who look closely, for it may say what was asked."""
    log("error", {"id": record.number, "error": type(error).__name__, "where": where(error)})
    log("debug", {"id": record.number, "said": str(error)})


def where(error: BaseException) -> list[str]:
    """The lines that an error went through, without what was in them."""
    return [f"{frame.filename.rpartition('site-packages/')[2]}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_tb(error.__traceback__)[-12:]]


def stamped(level: str, what: dict[str, Any]) -> dict[str, Any]:
    """A line of the log."""
    return {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "level": level, **what}
