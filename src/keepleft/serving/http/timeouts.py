"""uvicorn's protocol with timeouts for slow clients, and limits on connections and on what waits in them."""

from __future__ import annotations

import asyncio
import json
import socket
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepleft.serving.http.connections import ConnectionCounter, address_key
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.request_framing import StrictConnection

SEND_BUFFER_BYTES = 1 << 18  # that the kernel keeps for a client that does not read
MAX_UNPARSED_BYTES = 1 << 16  # of pipelined requests; beyond them the connection is not read
CHUNKED_PIECE_BYTES = 1 << 12  # of a chunked body parsed at once: in chunks of one byte it takes milliseconds
MANY_CHUNKS_PIECE_BYTES = 1 << 10  # the same for a body that has had many chunks
MANY_CHUNKS = 256
PIPELINE_SECONDS = 0.005  # between two pipelined requests, over all connections: hardly any client sends them


def protocol_with_timeouts(limits: Limits, connections: ConnectionCounter) -> type[H11Protocol]:
    """H11Protocol itself would wait for headers, for unread bodies and for a client to read without end."""
    next_pipelined_time = 0.0  # on the clock of the event loop

    class TimeoutProtocol(H11Protocol):
        header_timer: asyncio.TimerHandle | None = None  # until the headers are complete
        write_timer: asyncio.TimerHandle | None = None  # until the client has received all that was sent
        address: str | None = None
        num_pipelined = (
            0  # requests in a row that were there before the response to the last one was complete
        )
        waiting_to_continue = False  # the response is complete, and the next request must wait
        parse_scheduled = False

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.conn: StrictConnection = StrictConnection(limits)
            self.timeout_keep_alive = limits.idle_seconds  # type: ignore[assignment]
            self.unparsed = bytearray()

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.flow = BoundedFlowControl(transport, self.unparsed)
            # pause_writing is called as soon as any byte waits for the client: the write timeout starts then.
            transport.set_write_buffer_limits(high=0)
            connection_socket = transport.get_extra_info("socket")
            if connection_socket is not None:
                connection_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
            self.address = address_key(self.client[0] if self.client else "")
            self.header_timer = self.loop.call_later(limits.header_seconds, transport.abort)
            if (reason := connections.add(self.address)) is not None:
                self._refuse_connection(reason)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.address is not None:
                connections.remove(self.address)
                self.address = None
            self._cancel_header_timer()
            self._cancel_write_timer()
            self._unset_keepalive_if_required()
            self.unparsed.clear()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self.unparsed += data
            if self.parse_scheduled:
                self._limit_unparsed()
            else:
                self._parse()

        def _parse(self) -> None:
            """Parse what has arrived, in pieces that never hold more than one request's headers.

            Where a request is complete, the rest waits for its response.
            """
            while self.unparsed and not self.transport.is_closing():
                state = self.conn.their_state
                if state is h11.IDLE:
                    size = max(1, limits.headers - len(self.conn.trailing_data[0]))
                elif state is h11.SEND_BODY:
                    size = self._body_piece_size()
                else:
                    break
                piece = bytes(self.unparsed[:size])
                del self.unparsed[:size]
                super().data_received(piece)
                self._update_header_timer()
                if state is h11.SEND_BODY and self.conn.is_chunked:
                    self._schedule_parse()  # others have their turn first
                    break
            self._limit_unparsed()

        def _body_piece_size(self) -> int:
            if not self.conn.is_chunked:
                return limits.headers
            has_many_chunks = self.conn.num_chunks > MANY_CHUNKS
            return min(limits.headers, MANY_CHUNKS_PIECE_BYTES if has_many_chunks else CHUNKED_PIECE_BYTES)

        def _limit_unparsed(self) -> None:
            """Read on only where there is room."""
            cycle = self.cycle
            if self.transport.is_closing():
                self.unparsed.clear()
            elif len(self.unparsed) > MAX_UNPARSED_BYTES:
                self.flow.pause_reading()
            elif cycle is None or cycle.response_complete or len(cycle.body) <= HIGH_WATER_LIMIT:
                self.flow.resume_reading()

        def _schedule_parse(self) -> None:
            if not self.parse_scheduled:
                self.parse_scheduled = True
                self.loop.call_soon(self._parse_scheduled)

        def _parse_scheduled(self) -> None:
            self.parse_scheduled = False
            self._parse()

        def on_response_complete(self) -> None:
            """Go on when the client has received this response, and with a request that was sent ahead when
            it is its turn among all connections."""
            nonlocal next_pipelined_time
            self._cancel_header_timer()
            self.waiting_to_continue = True
            if self.transport.is_closing():
                self._continue()
            elif self.flow.write_paused:
                return  # resume_writing calls this again
            elif self.unparsed or self.conn.trailing_data[0]:
                turn = max(self.loop.time(), next_pipelined_time)
                next_pipelined_time = turn + PIPELINE_SECONDS
                self.loop.call_at(turn, self._continue)
            else:
                self._continue()

        def _continue(self) -> None:
            if not self.waiting_to_continue:
                return
            self.waiting_to_continue = False
            super().on_response_complete()
            self._update_header_timer()
            self._parse()

        def pause_writing(self) -> None:
            super().pause_writing()
            self.write_timer = self.loop.call_later(limits.write_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._cancel_write_timer()
            if self.waiting_to_continue:
                self.on_response_complete()

        def send_400_response(self, msg: str) -> None:
            """Answer what is not HTTP with an error in the same format as all others."""
            self._cancel_header_timer()
            cycle = self.cycle
            is_answering = cycle is not None and cycle.response_started and not cycle.response_complete
            if self.conn.rejection is not None and not is_answering:
                self.transport.write(raw_response(self.conn.rejection))
            self.transport.close()

        def _unsupported_upgrade_warning(self) -> None:
            """An upgrade that is not supported is ignored, as HTTP says; it is nothing to log."""

        def _refuse_connection(self, reason: str) -> None:
            error = APIError(
                503,
                f"{reason}: try again in a moment",
                code="too_many_connections",
                headers={"retry-after": "1"},
            )
            self.transport.write(raw_response(error))
            self.transport.close()

        def _update_header_timer(self) -> None:
            """The timer runs while headers are awaited, and while a body arrives after its response."""
            is_answered = self.cycle is not None and self.cycle.response_complete
            state = self.conn.their_state
            is_awaited = state is h11.IDLE or (state is h11.SEND_BODY and is_answered)
            if state is h11.SEND_BODY and is_answered:
                self._unset_keepalive_if_required()  # the connection is not idle
            if not is_awaited or self.transport.is_closing():
                self._cancel_header_timer()
            elif self.header_timer is None and self.timeout_keep_alive_task is None:
                self.header_timer = self.loop.call_later(limits.header_seconds, self.transport.abort)

        def _cancel_header_timer(self) -> None:
            if self.header_timer is not None:
                self.header_timer.cancel()
                self.header_timer = None

        def _cancel_write_timer(self) -> None:
            if self.write_timer is not None:
                self.write_timer.cancel()
                self.write_timer = None

    return TimeoutProtocol


class BoundedFlowControl(FlowControl):
    """uvicorn resumes reading whenever the application asks for more; here, only if it has been parsed."""

    def __init__(self, transport: asyncio.Transport, unparsed: bytearray) -> None:
        super().__init__(transport)
        self.unparsed = unparsed

    def resume_reading(self) -> None:
        if len(self.unparsed) <= MAX_UNPARSED_BYTES:
            super().resume_reading()


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
