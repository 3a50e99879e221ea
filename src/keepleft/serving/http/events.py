"""Answers while someone waits for them: server-sent events one after the other, or one result at the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import anyio
from starlette.requests import Request
from starlette.responses import Response

from keepleft.serving.http.errors import GoneError, our_fault, refusal
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.recorded import Log, Record, noted

Result = TypeVar("Result")
DONE = b"data: [DONE]\n\n"
QUIET = 15.0  # seconds without anything to tell, after which a comment keeps the connection open


def written(event: Any) -> bytes:
    """In ASCII: some clients take characters such as U+2028 for the end of a line."""
    return b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"


class Events(Response):
    """`events` are told until they end, the caller leaves, or time is up; `close` is called in any case.

    `broken` gives what is still told where something goes wrong on the way, before the error.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[Any], limits: Limits, record: Record, log: Log, *, close: Callable[[], None],
                 broken: Callable[[], list[Any]]) -> None:
        super().__init__(None, 200)
        del self.headers["content-length"]
        self.events, self.limits, self.record, self.log, self.close, self.broken = events, limits, record, log, close, broken

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.told, over = asyncio.get_running_loop().time(), False

        async def tell(body: bytes, more: bool = True) -> None:
            self.told = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        async def pulse() -> None:
            while True:
                await asyncio.sleep(QUIET)
                if asyncio.get_running_loop().time() - self.told >= QUIET:
                    await tell(b": still at it\n\n")

        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                continue
            if not over:
                self.record.ended = "left"
            group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(gone)
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                group.start_soon(pulse)
                last = await self._all(tell)
                await tell(last)
                over = True
                await tell(b"", more=False)
                group.cancel_scope.cancel()
        finally:
            self.close()

    async def _all(self, tell: Callable[[bytes], Awaitable[None]]) -> bytes:
        """What is told last."""
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for event in self.events:
                    await tell(written(event))
            return DONE
        except Exception as error:
            known = refusal(error)
            if known is None:
                noted(self.log, self.record, error)
            known = known or our_fault(self.record.number)
            self.record.ended = known.code
            return b"".join(map(written, [*self.broken(), known.shape]))


async def while_there(request: Request, limits: Limits, work: Awaitable[Result]) -> Result:
    """The result of some work; it is given up when whoever asked leaves, or when time is up."""
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        async with asyncio.timeout(limits.seconds):
            await asyncio.wait([doing, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise GoneError
        return doing.result()
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.wait([doing, leaving])
