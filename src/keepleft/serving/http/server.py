"""The uvicorn server. On a signal it drains: it takes no new requests, and finishes those in flight."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from socket import socket
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from keepleft.serving.http.service import Service
from keepleft.serving.http.timeouts import protocol_with_timeouts

GRACEFUL_SHUTDOWN_SECONDS = 5.0  # for clients to receive their responses after the engine has drained


class Server(uvicorn.Server):
    """`on_ready` is called with host and port once the server listens.

    The first SIGINT or SIGTERM drains, for at most `shutdown_timeout` seconds. A second one cancels the
    requests in flight, and a third exits at once.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        shutdown_timeout: float = 30.0,
        on_ready: Callable[[str, int], None] = lambda host, port: None,
    ) -> None:
        limits = service.limits
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=protocol_with_timeouts(limits),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=limits.headers,
                timeout_keep_alive=max(1, round(limits.idle_seconds)),
                timeout_graceful_shutdown=max(1, round(GRACEFUL_SHUTDOWN_SECONDS)),
            )
        )
        logging.getLogger("uvicorn.access").propagate = False
        self.service = service
        self.shutdown_timeout = shutdown_timeout
        self.on_ready = on_ready
        self.drain_thread: threading.Thread | None = None
        self.aborting = False

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_ready(host, port)
            threading.Thread(target=self.service.warm, name="keepleft warming", daemon=True).start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Unlike uvicorn, do not raise it again after the shutdown: the exit code is 0."""
        if self.drain_thread is None:
            self.stop()
        elif self.aborting:
            self.force_exit = self.should_exit = True
        else:
            self.aborting = True
            threading.Thread(target=self.service.abort_all, name="keepleft aborting", daemon=True).start()

    def stop(self) -> None:
        """Take no new requests, and exit when those in flight have finished. Until then, answer with 503."""
        self.drain_thread = threading.Thread(target=self._drain, name="keepleft draining", daemon=True)
        self.drain_thread.start()

    def _drain(self) -> None:
        self.service.drain(self.shutdown_timeout)
        self.should_exit = True
