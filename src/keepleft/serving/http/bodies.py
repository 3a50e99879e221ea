"""What a request brings: read up to a limit and no further, within some time, and looked at before anything is done with it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.limits import Limits

MUCH = 1 << 16  # bytes from which on a body is looked at in a thread
CLOSE = {"connection": "close"}  # what was not read must not be taken for the next request


class Bodies:
    """Hands a whole, sound body on."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("POST", "PUT", "PATCH"):
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(dict(scope["headers"]), receive)
            if body is None:
                return
            await (asyncio.to_thread(sound, body, self.limits.depth) if len(body) > MUCH else _now(body, self.limits.depth))
        except RefusedError as error:
            await error.answer()(scope, receive, send)
            return
        waiting: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return waiting.pop() if waiting else await receive()

        await self.app(scope, again, send)

    async def _read(self, headers: dict[bytes, bytes], receive: Any) -> bytes | None:
        """None: whoever asked has left."""
        most = self.limits.body
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # which also keeps web pages elsewhere from asking without leave
            raise RefusedError(415, "the body must be JSON: send it with 'Content-Type: application/json'", headers=CLOSE)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise RefusedError(415, "the body is compressed: send it as it is", headers=CLOSE)
        large = RefusedError(413, f"the body is larger than {most:,} bytes: send less at once", code="too_large", headers=CLOSE)
        said = headers.get(b"content-length", b"")
        if said.isdigit() and (len(said) > 18 or int(said) > most):
            raise large
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise RefusedError(408, f"the body did not come within {self.limits.body_seconds:g} seconds", code="timeout",
                               headers=CLOSE) from None


async def _now(body: bytes, depth: int) -> None:
    sound(body, depth)


def sound(body: bytes, depth: int) -> None:
    """JSON, not too deep, of numbers that are numbers and of characters that are whole."""
    broken = lambda why: RefusedError(400, f"the body is not JSON: {why}", code="invalid_json")
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise broken(f"byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise broken(f"{error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _deep(depth) from None
    except ValueError:  # a number of thousands of digits, NaN
        raise broken("it holds a number that is none") from None
    level = [found]
    for _ in range(depth + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                for key in value:
                    _whole(key)
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif isinstance(value, str):
                _whole(value)
        if not inner:
            return
        level = inner
    raise _deep(depth)


def _deep(depth: int) -> RefusedError:
    return RefusedError(400, f"the body has more than {depth} lists and objects within one another: make it flatter",
                        code="too_deep")


def _whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RefusedError(400, "a text holds half a character (a lone surrogate): take it out",
                           code="invalid_unicode") from None


def _no_number(word: str) -> Any:
    raise ValueError(word)
