"""The server itself: it listens, and when it is told to stop it lets what was begun come to its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from keepleft.serving.http.service import Service
from keepleft.serving.http.timeouts import protocol_with_timeouts

GRACEFUL_SHUTDOWN_SECONDS = 5.0  # seconds for answers to be taken after the engine is done


class Server(uvicorn.Server):
    """`ready` hears the address when it listens.

    A signal lets requests end, for `drain` seconds; a second gives them up.
    """

    def __init__(
        self,
        app: Any,
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

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_ready(host, port)
            threading.Thread(target=self.service.warm, name="keepleft warming", daemon=True).start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Nothing is kept for later: whoever told us to stop gets exit code 0."""
        if self.drain_thread is None:
            self.stop()
        elif self.aborting:
            self.force_exit = self.should_exit = True
        else:
            self.aborting = True
            threading.Thread(target=self.service.abort_all, name="keepleft aborting", daemon=True).start()

    def stop(self) -> None:
        """No new requests. It goes on to listen, to say so, until those on their way have ended."""
        self.drain_thread = threading.Thread(target=self._drain, name="keepleft draining", daemon=True)
        self.drain_thread.start()

    def _drain(self) -> None:
        self.service.drain(self.shutdown_timeout)
        self.should_exit = True
