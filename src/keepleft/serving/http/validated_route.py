"""Routes that parse and validate their body outside the event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from functools import partial
from typing import Any

from fastapi._compat import ModelField
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from keepleft.serving.engine.request import Tenant
from keepleft.serving.http.json_body import parse_json
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.service import Service
from keepleft.serving.http.sse import until_disconnect

MIN_BYTES_FOR_THREAD = 1 << 13  # a smaller body is validated faster than it is handed to a thread


class ValidatedRequest(Request):
    """A request whose body has been parsed and validated: FastAPI takes the result as it is."""

    def __init__(self, scope: Scope, receive: Receive, value: Any) -> None:
        super().__init__(scope, receive)
        self.value = value

    async def body(self) -> bytes:
        return b"validated"  # FastAPI asks only whether there is a body

    async def json(self) -> Any:
        return self.value


def validated_route(service: Service) -> type[APIRoute]:
    """The class of routes for a router. FastAPI itself would parse and validate on the event loop."""
    limits = service.limits

    class ValidatedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            body_field = self.body_field
            if body_field is None:
                return handle
            uses_engine = self.path.startswith("/v1/")

            async def validate_and_handle(request: Request) -> Response:
                body = await request.body()
                validate = partial(validate_body, body, body_field, limits)
                with service.answering() if uses_engine else nullcontext():
                    if len(body) < MIN_BYTES_FOR_THREAD:
                        value = validate()
                    else:  # skipped if the client leaves before a thread is free
                        validated = service.validation.run(Tenant(request.state.tenant), validate)
                        value = await until_disconnect(request, limits, validated)
                        del body, validate, validated
                        request._body = b""  # a stream may go on for minutes: the bytes are not needed
                    return await handle(ValidatedRequest(request.scope, request.receive, value))

            return validate_and_handle

    return ValidatedRoute


def validate_body(body: bytes, body_field: ModelField, limits: Limits) -> Any:
    """The body as an instance of its schema. Raises APIError or RequestValidationError."""
    value, errors = body_field.validate(parse_json(body, limits), {}, loc=("body",))
    if errors:
        raise RequestValidationError(errors)
    return value
