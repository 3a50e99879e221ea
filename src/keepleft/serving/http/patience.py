"""How long a client is waited for: for its headers, and for it to take what is sent. Too many at once are turned away."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.limits import Limits


def patient(limits: Limits) -> type[H11Protocol]:
    """uvicorn's protocol, which waits for ever, with an end to it."""

    class Patient(H11Protocol):
        late: asyncio.TimerHandle | None = None   # when its headers have to be there
        stuck: asyncio.TimerHandle | None = None  # when it has to have taken something

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                full = RefusedError(503, f"{limits.connections} connections are open already: try again in a moment",
                                    code="too_many_connections", headers={"retry-after": "1"})
                transport.write(raw(full))
                transport.close()
                return
            self.late = self.loop.call_later(limits.header_seconds, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._whole()
            elif self.late is None:  # the headers of another request have begun
                self.late = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def on_response_complete(self) -> None:
            self._whole()
            super().on_response_complete()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.stuck = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._moving()

        def connection_lost(self, exc: Exception | None) -> None:
            self._whole()
            self._moving()
            super().connection_lost(exc)

        def send_400_response(self, msg: str) -> None:
            """What is no HTTP is told so in the same shape as everything else."""
            self._whole()
            self.transport.write(raw(RefusedError(400, "this is not HTTP, or its headers are too large", code="invalid_http")))
            self.transport.close()

        def _whole(self) -> None:
            if self.late is not None:
                self.late.cancel()
                self.late = None

        def _moving(self) -> None:
            if self.stuck is not None:
                self.stuck.cancel()
                self.stuck = None

    return Patient


def raw(refused: RefusedError) -> bytes:
    """An answer as bytes, for where there is no request yet."""
    body = json.dumps(refused.shape).encode()
    phrases: dict[int, str] = {400: "Bad Request", 503: "Service Unavailable"}
    headers: dict[str, Any] = {"content-type": "application/json", "content-length": len(body), "connection": "close",
                               "x-content-type-options": "nosniff", **refused.headers}
    lines = [f"HTTP/1.1 {refused.status} {phrases[refused.status]}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
