"""The server itself: it listens, and when it is told to stop it lets what was begun come to its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn

from keepleft.serving.http.patience import patient
from keepleft.serving.http.service import Service

STILL = 5.0  # seconds for answers to be taken after the engine is done


class Server(uvicorn.Server):
    """`ready` hears the address when it listens. A signal lets requests end, for `drain` seconds; a second gives them up."""

    def __init__(self, app: Any, service: Service, *, host: str = "127.0.0.1", port: int = 8000, drain: float = 30.0,
                 ready: Callable[[str, int], None] = lambda host, port: None) -> None:
        limits = service.limits
        super().__init__(uvicorn.Config(
            app, host=host, port=port, http=patient(limits), ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, proxy_headers=False, h11_max_incomplete_event_size=limits.headers,
            timeout_keep_alive=max(1, round(limits.idle_seconds)), timeout_graceful_shutdown=max(1, round(STILL))))
        logging.getLogger("uvicorn.access").propagate = False
        self.service, self.drain, self.ready = service, drain, ready
        self.ending: threading.Thread | None = None
        self.hurried = False

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started and self.servers:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.ready(host, port)
            threading.Thread(target=self.service.warm, name="keepleft warming", daemon=True).start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Nothing is kept for later: whoever told us to stop gets exit code 0."""
        if self.ending is None:
            self.stop()
        elif self.hurried:
            self.force_exit = self.should_exit = True
        else:
            self.hurried = True
            threading.Thread(target=self.service.hurry, name="keepleft hurrying", daemon=True).start()

    def stop(self) -> None:
        """No new requests. It goes on to listen, to say so, until those on their way have ended."""
        self.ending = threading.Thread(target=self._drained, name="keepleft draining", daemon=True)
        self.ending.start()

    def _drained(self) -> None:
        self.service.drain(self.drain)
        self.should_exit = True
