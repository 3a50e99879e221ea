"""Reads request bodies up to a limit of size and time, and of memory for all of them together."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits

CLOSE_HEADERS = {"connection": "close"}  # the rest of the body must not be taken for the next request


class BodyLimitMiddleware:
    """Passes complete bodies on, and rejects others."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.held_bytes = 0  # of all bodies whose requests have not ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        body = bytearray()
        try:
            try:
                self._check_headers(dict(scope["headers"]))
                is_complete = await self._read_body(body, receive)
            except APIError as error:
                await error.to_response()(scope, receive, send)
                return
            if not is_complete:
                return
            messages: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

            async def receive_body() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, receive_body, send)
        finally:
            self.held_bytes -= len(body)

    def _check_headers(self, headers: dict[bytes, bytes]) -> None:
        """Raise APIError for a body that need not be read to be rejected."""
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        # A browser sends other types across origins without asking first, so this also keeps web pages out.
        if content_type != b"application/json":
            raise APIError(
                415,
                "the body must be JSON: send it with 'Content-Type: application/json'",
                headers=CLOSE_HEADERS,
            )
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise APIError(415, "the body is compressed: send it uncompressed", headers=CLOSE_HEADERS)
        content_length = headers.get(b"content-length", b"")
        if content_length.isdigit() and (len(content_length) > 18 or int(content_length) > self.limits.body):
            raise self._too_large_error()

    async def _read_body(self, body: bytearray, receive: Receive) -> bool:
        """Append the body; False if the client has disconnected. Raises APIError."""
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    piece = message.get("body", b"")
                    body += piece
                    self.held_bytes += len(piece)
                    if len(body) > self.limits.body:
                        raise self._too_large_error()
                    if self.held_bytes > self.limits.body_memory:
                        raise APIError(
                            503,
                            f"the bodies of all requests have more than {self.limits.body_memory:,} bytes: "
                            "try again in a moment",
                            code="too_many_bodies",
                            headers={**CLOSE_HEADERS, "retry-after": "1"},
                        )
                    if not message.get("more_body", False):
                        return True
        except TimeoutError:
            raise APIError(
                408,
                f"the body did not arrive within {self.limits.body_seconds:g} seconds",
                code="timeout",
                headers=CLOSE_HEADERS,
            ) from None

    def _too_large_error(self) -> APIError:
        return APIError(
            413,
            f"the body is larger than {self.limits.body:,} bytes: send less at once",
            code="too_large",
            headers=CLOSE_HEADERS,
        )
