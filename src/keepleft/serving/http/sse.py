"""Responses that end when the client disconnects: server-sent events, or one result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from keepleft.serving.http.engine_requests import EngineRequests
from keepleft.serving.http.errors import ClientDisconnectedError, internal_error, to_api_error
from keepleft.serving.http.json_pieces import ASCII_ENCODER, encode_json
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.request_log import Log, RequestRecord, log_error

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
KEEPALIVE_SECONDS = 15.0  # without an event, after which a comment keeps the connection open


def sse_data(event: Any) -> bytes:
    """An event as JSON in ASCII, since some clients take characters such as U+2028 for line breaks."""
    return b"data: " + encode_json(event, ASCII_ENCODER) + b"\n\n"


class EventStream(Response):
    """Sends `events` (objects, or bytes of `sse_data`) until they end, the client disconnects or its time is
    over; then closes `engine_requests`, which make them.

    After an exception it sends the events that `on_error` returns, and then the error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Any],
        limits: Limits,
        record: RequestRecord,
        log: Log,
        engine_requests: EngineRequests,
        *,
        on_error: Callable[[], list[Any]],
    ) -> None:
        super().__init__(None, 200)
        del self.headers["content-length"]
        self.events = events
        self.limits = limits
        self.record = record
        self.log = log
        self.engine_requests = engine_requests
        self.on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.last_sent = asyncio.get_running_loop().time()
        finished = False

        async def send_body(body: bytes, more_body: bool = True) -> None:
            self.last_sent = asyncio.get_running_loop().time()
            self.engine_requests.blocked_since = self.last_sent
            await send({"type": "http.response.body", "body": body, "more_body": more_body})
            self.engine_requests.blocked_since = None

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(KEEPALIVE_SECONDS)
                if asyncio.get_running_loop().time() - self.last_sent >= KEEPALIVE_SECONDS:
                    await send_body(b": keep-alive\n\n")

        async def cancel_on_disconnect() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue
            if not finished:
                self.record.abort_reason = "left"
            task_group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as task_group:
                task_group.start_soon(cancel_on_disconnect)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                task_group.start_soon(keep_alive)
                final_body = await self._send_events(send_body)
                await send_body(final_body)
                finished = True
                await send_body(b"", more_body=False)
                task_group.cancel_scope.cancel()
        finally:
            self.engine_requests.close()

    async def _send_events(self, send_body: Callable[[bytes], Awaitable[None]]) -> bytes:
        """Send the events, and return the last bytes of the body: [DONE], or the error."""
        try:
            async with asyncio.timeout(self.record.seconds_left(self.limits)):
                async for event in self.events:
                    await send_body(event if isinstance(event, bytes) else sse_data(event))
            return DONE
        except Exception as error:
            api_error = to_api_error(error)
            if api_error is None:
                log_error(self.log, self.record, error)
            api_error = api_error or internal_error(self.record.request_id)
            self.record.abort_reason = api_error.code
            return b"".join(map(sse_data, [*self.on_error(), api_error.payload]))


async def until_disconnect(request: Request, limits: Limits, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client disconnects or the request's time is over.

    Raises ClientDisconnectedError, TimeoutError, or what `work` raises.
    """

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    record: RequestRecord = request.state.record
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(wait_for_disconnect())
    try:
        async with asyncio.timeout(record.seconds_left(limits)):
            await asyncio.wait([task, disconnect], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.wait([task, disconnect])
