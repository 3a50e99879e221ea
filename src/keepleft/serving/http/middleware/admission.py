"""Bounds the requests of one API key that are being answered, before anything of them is read.

A key that has too many gets 429, and not at once: clients that try again without waiting would keep the
server busy with saying no.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits

REFUSAL_SECONDS = 1.0  # until a request too many is refused


class AdmissionMiddleware:
    """For methods with a body; /health, /metrics and the files of the page are never refused."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.num_requests: Counter[str] = Counter()  # by key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        key = scope["state"].get("tenant", "")
        if self.num_requests[key] >= self.limits.requests:
            await asyncio.sleep(REFUSAL_SECONDS)
            error = APIError(
                429,
                f"{self.limits.requests} requests of yours are being answered already: try again in a moment",
                code="rate_limit_exceeded",
                headers={"retry-after": "1", "connection": "close"},
            )
            await error.to_response()(scope, receive, send)
            return

        async def send_refusals_late(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 429:
                await asyncio.sleep(REFUSAL_SECONDS)
            await send(message)

        self.num_requests[key] += 1
        try:
            await self.app(scope, receive, send_refusals_late)
        finally:
            self.num_requests[key] -= 1
            if not self.num_requests[key]:
                del self.num_requests[key]
