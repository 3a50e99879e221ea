"""uvicorn's protocol with timeouts for slow clients and a limit on connections."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits


def protocol_with_timeouts(limits: Limits) -> type[H11Protocol]:
    """H11Protocol itself would wait for headers and for a client to read without end."""

    class TimeoutProtocol(H11Protocol):
        header_timer: asyncio.TimerHandle | None = None  # until the headers are complete
        write_timer: asyncio.TimerHandle | None = None  # until the client has read something

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
            """Answer what is not HTTP with an error in the same format as all others."""
            self._cancel_header_timer()
            error = APIError(400, "this is not HTTP, or its headers are too large", code="invalid_http")
            self.transport.write(raw_response(error))
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
    """The response as bytes, for a connection without a request."""
    body = json.dumps(error.payload).encode()
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-content-type-options": "nosniff",
        **error.headers,
    }
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
