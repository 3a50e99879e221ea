"""Reads request bodies up to a limit of size and time, and of memory for all of them together."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.auth import PUBLIC_PATHS
from keepleft.serving.http.middleware.body_memory import BodyMemory

CLOSE_HEADERS = {"connection": "close"}  # the rest of the body must not be taken for the next request


class BodyLimitMiddleware:
    """Passes complete bodies on, and rejects others.

    A body counts until its response has ended: what was parsed from it is kept until then.
    """

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits
        self.memory = BodyMemory(limits.body_memory)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] not in ("POST", "PUT", "PATCH")
            or scope["path"] in PUBLIC_PATHS  # no key is needed there, and no body is read
        ):
            await self.app(scope, receive, send)
            return
        key = scope["state"].get("tenant", "")
        try:
            self._check_headers(dict(scope["headers"]))
            body = await self._read_body(receive, key)
        except APIError as error:
            await error.to_response()(scope, receive, send)
            return
        if body is None:
            return
        num_bytes = len(body)
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()

        try:
            await self.app(scope, receive_body, send)
        finally:
            self.memory.remove(key, num_bytes)

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

    async def _read_body(self, receive: Receive, key: str) -> bytes | None:
        """The body, which is counted; None if the client has disconnected. Raises APIError."""
        body = bytearray()
        is_complete = False
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while not is_complete:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    body += piece
                    has_room = self.memory.add(key, len(piece))
                    if len(body) > self.limits.body:
                        raise self._too_large_error()
                    if not has_room:
                        raise self._no_memory_error(key)
                    is_complete = not message.get("more_body", False)
            return bytes(body)
        except TimeoutError:
            raise APIError(
                408,
                f"the body did not arrive within {self.limits.body_seconds:g} seconds",
                code="timeout",
                headers=CLOSE_HEADERS,
            ) from None
        finally:
            if not is_complete:
                self.memory.remove(key, len(body))

    def _no_memory_error(self, key: str) -> APIError:
        return APIError(
            503,
            f"the bodies of your requests have {self.memory.by_key[key]:,} bytes, and those of all requests "
            f"{self.memory.num_bytes:,} of {self.limits.body_memory:,}, of which one API key may hold no "
            "more than it leaves free: try again in a moment",
            code="too_many_bodies",
            headers={**CLOSE_HEADERS, "retry-after": "1"},
        )

    def _too_large_error(self) -> APIError:
        return APIError(
            413,
            f"the body is larger than {self.limits.body:,} bytes: send less at once",
            code="too_large",
            headers=CLOSE_HEADERS,
        )
