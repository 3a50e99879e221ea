"""How long a client is waited for: for its headers, and for it to take what is sent.

Too many at once are turned away.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits


def protocol_with_timeouts(limits: Limits) -> type[H11Protocol]:
    """uvicorn's protocol, which waits for ever, with an end to it."""

    class TimeoutProtocol(H11Protocol):
        header_timer: asyncio.TimerHandle | None = None  # when its headers have to be there
        write_timer: asyncio.TimerHandle | None = None  # when it has to have taken something

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                error = APIError(
                    503,
                    f"{limits.connections} connections are open already: try again in a moment",
                    code="too_many_connections",
                    headers={"retry-after": "1"},
                )
                transport.write(raw_response(error))
                transport.close()
                return
            self.header_timer = self.loop.call_later(limits.header_seconds, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._cancel_header_timer()
            elif self.header_timer is None:  # the headers of another request have begun
                self.header_timer = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def on_response_complete(self) -> None:
            self._cancel_header_timer()
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.write_timer = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._cancel_write_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_header_timer()
            self._cancel_write_timer()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP is told so in the same shape as everything else."""
            self._cancel_header_timer()
            self.transport.write(
                raw_response(
                    APIError(400, "this is not HTTP, or its headers are too large", code="invalid_http")
                )
            )
            self.transport.close()

        def _cancel_header_timer(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def _cancel_write_timer(self) -> None:
            if self.write_timer is not None:
                self.write_timer.cancel()
                self.write_timer = None

    return TimeoutProtocol


def raw_response(error: APIError) -> bytes:
    """An answer as bytes, for where there is no request yet."""
    body = json.dumps(error.payload).encode()
    reason_phrases: dict[int, str] = {400: "Bad Request", 503: "Service Unavailable"}
    headers: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        "x-content-type-options": "nosniff",
        **error.headers,
    }
    lines = [
        f"HTTP/1.1 {error.status} {reason_phrases[error.status]}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
