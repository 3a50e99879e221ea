"""While the server shuts down, nothing new is taken."""

from __future__ import annotations

from typing import Any

from keepleft.serving.engine.request import ShuttingDownError
from keepleft.serving.http.errors import to_api_error
from keepleft.serving.http.service import Service


class DrainingMiddleware:
    """Health and metrics are told to the end."""

    def __init__(self, app: Any, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and self.service.draining and scope["path"] not in ("/health", "/metrics"):
            error = to_api_error(ShuttingDownError("the server is shutting down: ask another one"))
            assert error is not None
            error.headers["connection"] = "close"
            await error.to_response()(scope, receive, send)
            return
        await self.app(scope, receive, send)
