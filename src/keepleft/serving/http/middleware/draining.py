"""Rejects new requests with 503 while the server shuts down."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from keepleft.serving.engine.request import ShuttingDownError
from keepleft.serving.http.errors import to_api_error
from keepleft.serving.http.middleware.request_log import WATCHING_ROUTES
from keepleft.serving.http.service import Service


class DrainingMiddleware:
    """Those who watch the server get answers to the end."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.service.draining and scope["path"] not in WATCHING_ROUTES:
            error = to_api_error(ShuttingDownError("the server is shutting down: try another server"))
            assert error is not None
            error.headers["connection"] = "close"
            await error.to_response()(scope, receive, send)
            return
        await self.app(scope, receive, send)
