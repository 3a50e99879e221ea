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

from keepleft.serving.engine.request import OverloadedError, ShuttingDownError
from keepleft.serving.http.schemas.requests import all_field_names

RETRY_AFTER_SECONDS = 5.0  # seconds after which another server, or this one again, may be asked
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class APIError(Exception):
    """A request that is not served, with everything that its answer says."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def payload(self) -> dict[str, Any]:
        error_type = ERROR_TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}
        }

    def to_response(self) -> JSONResponse:
        return JSONResponse(self.payload, self.status, self.headers)


class ClientDisconnectedError(APIError):
    """Whoever asked has left; nobody reads this."""

    def __init__(self) -> None:
        super().__init__(499, "the client has left", code="gone")


def too_long(length: int, max_model_len: int, name: str = "the prompt") -> APIError:
    return APIError(
        400,
        f"{name} has {length} tokens, and the model reaches {max_model_len}: shorten it",
        param="prompt" if name == "the prompt" else None,
        code="context_length_exceeded",
    )


def internal_error(request_id: str) -> APIError:
    """Nothing of what happened is told to the caller but the number under which it was logged."""
    return APIError(
        500,
        f"something went wrong here, which is not your fault: it was noted under {request_id}",
        code="internal_error",
    )


def to_api_error(error: Exception) -> APIError | None:
    """The answer to an error that is known; None where it is our fault."""
    match error:
        case APIError():
            return error
        case OverloadedError():
            return APIError(
                429, str(error), code="rate_limit_exceeded", headers=_retry_after(error.retry_after)
            )
        case ShuttingDownError():
            return APIError(503, str(error), code="shutting_down", headers=_retry_after(RETRY_AFTER_SECONDS))
        case RequestValidationError():
            return _from_validation_errors(error.errors())
        case HTTPException():
            return _from_http_exception(error)
        case TimeoutError():
            return APIError(
                504,
                "the request took too long and was given up: ask for less, or for a shorter text",
                code="timeout",
            )
        case ValueError() if type(error) is ValueError or type(error).__module__.startswith("keepleft."):
            # of our own rooms: they name the thing, the value and the remedy
            code = getattr(error, "code", None)
            return APIError(400, str(error), code=code if isinstance(code, str) else None)
    return None


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, ceil(seconds)))}


def _from_http_exception(error: HTTPException) -> APIError:
    """Starlette's own: no such route, no such method, a body that is no JSON."""
    messages = {
        404: "there is no such address: GET /openapi.json lists them all",
        405: "this address does not take that method: GET /openapi.json says which",
    }
    return APIError(
        error.status_code, messages.get(error.status_code, str(error.detail)), headers=error.headers
    )


def _from_validation_errors(errors: Sequence[Any]) -> APIError:
    """The first thing that does not fit; what was given is not repeated."""
    # a wrong field says more than a missing branch of a choice
    first = min(errors, key=lambda error: error["type"] == "missing")
    location = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    # then come branches of choices
    param = ".".join(takewhile(lambda part: part.isdigit() or part in all_field_names(), location)) or None
    if first["type"] == "extra_forbidden":
        missing = [
            str(error["loc"][-1])
            for error in errors
            if error["type"] == "missing" and error["loc"][:-1] == first["loc"][:-1]
        ]
        suggestions = missing or get_close_matches(
            location[-1][:60], [name for name in all_field_names() if name != location[-1]], 1
        )
        hint = f": did you mean {suggestions[0]}?" if suggestions else ": leave it out"
        return APIError(
            400, f"there is no field {location[-1][:60]!r}{hint}", param=param, code="unknown_parameter"
        )
    if first["type"] == "json_invalid":
        return APIError(400, "the body is not JSON", code="invalid_json")
    # several where there were several choices
    messages = [error["msg"] for error in errors if error["loc"][:2] == first["loc"][:2]]
    message = " or ".join(dict.fromkeys([first["msg"], *messages][:4]))
    return APIError(400, f"{param or 'the body'}: {message}", param=param, code="invalid_value")


HANDLED_EXCEPTIONS: tuple[type[Exception], ...] = (
    APIError,
    OverloadedError,
    ShuttingDownError,
    RequestValidationError,
    HTTPException,
    TimeoutError,
    ValueError,
)


async def exception_handler(request: Any, error: Exception) -> JSONResponse:
    """What a route raises, as an answer."""
    api_error = to_api_error(error)
    if api_error is None:
        raise error
    return api_error.to_response()
