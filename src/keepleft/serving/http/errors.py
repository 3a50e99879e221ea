"""What went wrong, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from math import ceil
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from keepleft.serving.asks import ClosedError, FullError
from keepleft.serving.http.asked import known

AGAIN = 5.0  # seconds after which another server, or this one again, may be asked
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class RefusedError(Exception):
    """A request that is not served, with everything that its answer says."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def shape(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def answer(self) -> JSONResponse:
        return JSONResponse(self.shape, self.status, self.headers)


class GoneError(RefusedError):
    """Whoever asked has left; nobody reads this."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left", code="gone")


def too_long(have: int, reach: int, what: str = "the prompt") -> RefusedError:
    return RefusedError(400, f"{what} has {have} tokens, and the model reaches {reach}: shorten it",
                        param="prompt" if what == "the prompt" else None, code="context_length_exceeded")


def our_fault(number: str) -> RefusedError:
    """Nothing of what happened is told to the caller but the number under which it was logged."""
    return RefusedError(500, f"something went wrong here, which is not your fault: it was noted under {number}",
                        code="internal_error")


def refusal(error: Exception) -> RefusedError | None:
    """The answer to an error that is known; None where it is our fault."""
    match error:
        case RefusedError():
            return error
        case FullError():
            return RefusedError(429, str(error), code="rate_limit_exceeded", headers=_again(error.again))
        case ClosedError():
            return RefusedError(503, str(error), code="shutting_down", headers=_again(AGAIN))
        case RequestValidationError():
            return _invalid(error.errors())
        case HTTPException():
            return _plain(error)
        case TimeoutError():
            return RefusedError(504, "the request took too long and was given up: ask for less, or for a shorter text",
                                code="timeout")
        case ValueError() if type(error) is ValueError or type(error).__module__.startswith("keepleft."):
            # of our own rooms: they name the thing, the value and the remedy
            code = getattr(error, "code", None)
            return RefusedError(400, str(error), code=code if isinstance(code, str) else None)
    return None


def _again(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, ceil(seconds)))}


def _plain(error: HTTPException) -> RefusedError:
    """Starlette's own: no such route, no such method, a body that is no JSON."""
    said = {404: "there is no such address: GET /openapi.json lists them all",
            405: "this address does not take that method: GET /openapi.json says which"}
    return RefusedError(error.status_code, said.get(error.status_code, str(error.detail)), headers=error.headers)


def _invalid(errors: Sequence[Any]) -> RefusedError:
    """The first thing that does not fit; what was given is not repeated."""
    first = min(errors, key=lambda one: one["type"] == "missing")  # a wrong field says more than a missing branch of a choice
    place = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    param = ".".join(takewhile(lambda part: part.isdigit() or part in known(), place)) or None  # then come branches of choices
    if first["type"] == "extra_forbidden":
        missing = [str(one["loc"][-1]) for one in errors if one["type"] == "missing" and one["loc"][:-1] == first["loc"][:-1]]
        close = missing or get_close_matches(place[-1][:60], [name for name in known() if name != place[-1]], 1)
        tail = f": did you mean {close[0]}?" if close else ": leave it out"
        return RefusedError(400, f"there is no field {place[-1][:60]!r}{tail}", param=param, code="unknown_parameter")
    if first["type"] == "json_invalid":
        return RefusedError(400, "the body is not JSON", code="invalid_json")
    here = [one["msg"] for one in errors if one["loc"][:2] == first["loc"][:2]]  # several where there were several choices
    said = " or ".join(dict.fromkeys([first["msg"], *here][:4]))
    return RefusedError(400, f"{param or 'the body'}: {said}", param=param, code="invalid_value")


KNOWN: tuple[type[Exception], ...] = (RefusedError, FullError, ClosedError, RequestValidationError, HTTPException, TimeoutError,
                                      ValueError)


async def answered(request: Any, error: Exception) -> JSONResponse:
    """What a route raises, as an answer."""
    known = refusal(error)
    if known is None:
        raise error
    return known.answer()
