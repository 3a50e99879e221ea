"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import takewhile
from math import ceil
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request

from keepleft.serving.engine.request import OverloadedError, ShuttingDownError
from keepleft.serving.http.schemas.requests import all_field_names

RETRY_AFTER_SECONDS = 5.0  # sent while the server shuts down
MAX_NAME_LENGTH = 60  # characters of an unknown field that are repeated
MAX_VALUE_LENGTH = 40  # characters of a value that an error repeats
MAX_MESSAGE_LENGTH = 1000  # characters of a message: whatever it quotes, it never repeats a request at length
MAX_PARAM_LENGTH = 200
MAX_MESSAGES = 4  # of validation errors about one field
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class APIError(Exception):
    """An error response: status, headers, and the fields of the body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = _cut(message, MAX_MESSAGE_LENGTH)
        self.param = None if param is None else _cut(param, MAX_PARAM_LENGTH)
        self.code = code
        self.headers = dict(headers or {})
        super().__init__(self.message)

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


def _cut(text: str, max_length: int) -> str:
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


class ClientDisconnectedError(APIError):
    """The client has disconnected; nobody reads this response."""

    def __init__(self) -> None:
        super().__init__(499, "the client has disconnected", code="gone")


def too_long(
    length: int, max_model_len: int, name: str = "the prompt", *, param: str | None = None
) -> APIError:
    return APIError(
        400,
        f"{name} has {length} tokens, and the model takes at most {max_model_len}: shorten it",
        param=param,
        code="context_length_exceeded",
    )


def internal_error(request_id: str) -> APIError:
    """The response to a bug of ours: only the id under which it was logged."""
    return APIError(
        500,
        f"something went wrong here, which is not your fault: it was logged under {request_id}",
        code="internal_error",
    )


def to_api_error(error: Exception) -> APIError | None:
    """The response to an exception; None if it is a bug of ours."""
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
                504, "the request took too long and was cancelled: ask for fewer tokens", code="timeout"
            )
        case ValueError() if type(error) is ValueError or type(error).__module__.startswith("keepleft."):
            # Raised by keepleft itself: the message is meant for the user.
            code = getattr(error, "code", None)
            return APIError(400, str(error), code=code if isinstance(code, str) else None)
    return None


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, ceil(seconds)))}


def _from_http_exception(error: HTTPException) -> APIError:
    """Starlette's own errors: unknown route, wrong method, a body that is not JSON."""
    messages = {
        404: "there is no such route: GET /openapi.json lists them all",
        405: "this route does not take that method: GET /openapi.json says which",
    }
    message = messages.get(error.status_code, str(error.detail))
    return APIError(error.status_code, message, headers=error.headers)


def _from_validation_errors(errors: Sequence[Any]) -> APIError:
    """The first error that pydantic found. Of values only short ones are repeated."""
    # A wrong field says more than a missing one, which may belong to another branch of a union.
    first = min(errors, key=lambda error: error["type"] == "missing")
    location = [str(part) for part in first["loc"] if part not in ("body", "path", "query")]
    # Behind the names of fields come those of the branches of a union.
    param = ".".join(takewhile(lambda part: part.isdigit() or part in all_field_names(), location)) or None
    if first["type"] == "extra_forbidden":
        missing = [
            str(error["loc"][-1])
            for error in errors
            if error["type"] == "missing" and error["loc"][:-1] == first["loc"][:-1]
        ]
        name = location[-1][:MAX_NAME_LENGTH]
        other_names = [other for other in all_field_names() if other != location[-1]]
        suggestions = missing or get_close_matches(name, other_names, 1)
        hint = f"did you mean {suggestions[0]}?" if suggestions else "leave it out"
        message = f"there is no field {name!r}: {hint}"
        return APIError(400, message, param=param or name, code="unknown_parameter")
    if first["type"] == "json_invalid":
        return APIError(400, "the body is not JSON", code="invalid_json")
    # One message for each branch of a union.
    messages = [error["msg"] for error in errors if error["loc"][:2] == first["loc"][:2]]
    message = " or ".join(dict.fromkeys([first["msg"], *messages][:MAX_MESSAGES]))
    message = message.replace("Input should", "it should").replace(" after validation", "")
    value = "" if param is None else _describe_short(first.get("input"))
    return APIError(400, f"{param or 'the body'}{value}: {message}", param=param, code="invalid_value")


def _describe_short(value: Any) -> str:
    """` is` and the value, where it is a number, a word or the like; nothing for others."""
    if value is not None and not isinstance(value, bool | int | float | str):
        return ""
    if isinstance(value, str) and len(value) > MAX_VALUE_LENGTH:
        return ""
    try:
        text = json.dumps(value)
    except ValueError:  # an integer of too many digits
        return ""
    return f" is {text}" if len(text) <= MAX_VALUE_LENGTH else ""


HANDLED_EXCEPTIONS: tuple[type[Exception], ...] = (
    APIError,
    OverloadedError,
    ShuttingDownError,
    RequestValidationError,
    HTTPException,
    TimeoutError,
    ValueError,
)


async def exception_handler(request: Request, error: Exception) -> JSONResponse:
    """The response to an exception that a route raises."""
    api_error = to_api_error(error)
    if api_error is None:
        raise error
    return api_error.to_response()
