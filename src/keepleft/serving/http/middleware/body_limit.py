"""Reads request bodies up to a limit of size and time, and checks their JSON before a route sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits

MIN_BYTES_FOR_THREAD = 1 << 16  # larger bodies are checked in a thread
CLOSE_HEADERS = {"connection": "close"}  # the rest of the body must not be taken for the next request


class BodyLimitMiddleware:
    """Passes complete and valid bodies on, and rejects others."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read_body(dict(scope["headers"]), receive)
            if body is None:
                return
            if len(body) > MIN_BYTES_FOR_THREAD:
                await asyncio.to_thread(check_json, body, self.limits.depth)
            else:
                check_json(body, self.limits.depth)
        except APIError as error:
            await error.to_response()(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_body, send)

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes | None:
        """The body; None if the client has disconnected. Raises APIError."""
        max_bytes = self.limits.body
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
        too_large = APIError(
            413,
            f"the body is larger than {max_bytes:,} bytes: send less at once",
            code="too_large",
            headers=CLOSE_HEADERS,
        )
        content_length = headers.get(b"content-length", b"")
        if content_length.isdigit() and (len(content_length) > 18 or int(content_length) > max_bytes):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > max_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise APIError(
                408,
                f"the body did not arrive within {self.limits.body_seconds:g} seconds",
                code="timeout",
                headers=CLOSE_HEADERS,
            ) from None


def check_json(body: bytes, depth: int) -> None:
    """Raise APIError unless this is JSON without NaN, lone surrogates or nesting deeper than `depth`."""
    invalid_json = lambda reason: APIError(400, f"the body is not JSON: {reason}", code="invalid_json")
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise invalid_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep_error(depth) from None
    except ValueError:  # NaN, or a number of thousands of digits
        raise invalid_json("it holds an invalid number") from None
    level = [document]
    for _ in range(depth + 1):
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    _check_unicode(key)
                next_level.extend(value.values())
            elif isinstance(value, list):
                next_level.extend(value)
            elif isinstance(value, str):
                _check_unicode(value)
        if not next_level:
            return
        level = next_level
    raise _too_deep_error(depth)


def _too_deep_error(depth: int) -> APIError:
    return APIError(
        400,
        f"the body nests lists and objects more than {depth} levels deep: make it flatter",
        code="too_deep",
    )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise APIError(
            400, "a string holds half a character (a lone surrogate): remove it", code="invalid_unicode"
        ) from None


def _reject_constant(constant: str) -> Any:
    raise ValueError(constant)
