"""What a request brings: read up to a limit and no further, within some time, and looked at before anything
is done with it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits

MIN_BYTES_FOR_THREAD = 1 << 16  # bytes from which on a body is looked at in a thread
CLOSE_HEADERS = {"connection": "close"}  # what was not read must not be taken for the next request


class BodyLimitMiddleware:
    """Hands a whole, sound body on."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app = app
        self.limits = limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read_body(dict(scope["headers"]), receive)
            if body is None:
                return
            await (
                asyncio.to_thread(check_json, body, self.limits.depth)
                if len(body) > MIN_BYTES_FOR_THREAD
                else _check_json_inline(body, self.limits.depth)
            )
        except APIError as error:
            await error.to_response()(scope, receive, send)
            return
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Any:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_body, send)

    async def _read_body(self, headers: dict[bytes, bytes], receive: Any) -> bytes | None:
        """None: whoever asked has left."""
        max_bytes = self.limits.body
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if (
            content_type != b"application/json"
        ):  # which also keeps web pages elsewhere from asking without leave
            raise APIError(
                415,
                "the body must be JSON: send it with 'Content-Type: application/json'",
                headers=CLOSE_HEADERS,
            )
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise APIError(415, "the body is compressed: send it as it is", headers=CLOSE_HEADERS)
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
                f"the body did not come within {self.limits.body_seconds:g} seconds",
                code="timeout",
                headers=CLOSE_HEADERS,
            ) from None


async def _check_json_inline(body: bytes, depth: int) -> None:
    check_json(body, depth)


def check_json(body: bytes, depth: int) -> None:
    """JSON, not too deep, of numbers that are numbers and of characters that are whole."""
    invalid_json = lambda reason: APIError(400, f"the body is not JSON: {reason}", code="invalid_json")
    try:
        document = json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except UnicodeDecodeError as error:
        raise invalid_json(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise invalid_json(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep_error(depth) from None
    except ValueError:  # a number of thousands of digits, NaN
        raise invalid_json("it holds a number that is none") from None
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
        f"the body has more than {depth} lists and objects within one another: make it flatter",
        code="too_deep",
    )


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise APIError(
            400, "a text holds half a character (a lone surrogate): take it out", code="invalid_unicode"
        ) from None


def _reject_constant(constant: str) -> Any:
    raise ValueError(constant)
