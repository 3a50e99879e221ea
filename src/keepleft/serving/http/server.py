"""The uvicorn server. On a signal it drains: it takes no new requests, and finishes those in flight."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from socket import (
    AF_INET6,
    IPPROTO_IPV6,
    IPV6_V6ONLY,
    SO_REUSEADDR,
    SOCK_STREAM,
    SOL_SOCKET,
    fromfd,
    getaddrinfo,
    socket,
)
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from keepleft.serving.http.connections import ConnectionCounter
from keepleft.serving.http.service import Service
from keepleft.serving.http.timeouts import protocol_with_timeouts

GRACEFUL_SHUTDOWN_SECONDS = 5  # for clients to receive their responses after the engine has drained
ABORT_SECONDS = 1  # the same after a second signal
BACKLOG = 2048  # connections that the kernel keeps until they are accepted
ACCEPTED_AT_ONCE = 32  # connections: asyncio tries as often again where there is no file descriptor left
ACCEPT_ERROR_MESSAGE = "socket.accept() out of system resource"  # asyncio's
ACCEPT_LOG_SECONDS = 10.0  # between two lines of the log about it


def check_address(host: str, port: int) -> None:
    """Raise OSError if nobody could listen there now: a model is loaded for nothing otherwise."""
    if not port:
        return
    try:
        addresses = getaddrinfo(host, port, type=SOCK_STREAM)
        for family, kind, protocol, _, address in addresses:
            with socket(family, kind, protocol) as probe:
                if os.name == "posix":
                    probe.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # as asyncio does
                if family == AF_INET6:
                    probe.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise listen_error(host, port, error) from error


def listen_error(host: str, port: int, error: OSError) -> OSError:
    """The error of an address that nobody can listen on, with its remedy."""
    if error.errno == errno.EADDRINUSE:
        reason = "another program listens there; --port 0 takes a free one"
    elif error.errno in (errno.EACCES, errno.EPERM):
        reason = f"this user may not ({error.strerror}); give a --port above 1023"
    else:
        reason = f"{error}; look at --host and --port"
    return OSError(f"cannot listen on {host}:{port}: {reason}")


@contextmanager
def _hold_startup_error() -> Iterator[list[OSError]]:
    """What uvicorn logs and does not raise: the error where it cannot listen. It is reported once, by us."""
    errors: list[OSError] = []

    def is_other(record: logging.LogRecord) -> bool:
        if isinstance(record.msg, OSError):
            errors.append(record.msg)
            return False
        return True

    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(is_other)
    try:
        yield errors
    finally:
        logger.removeFilter(is_other)


class Server(uvicorn.Server):
    """`on_ready` is called with host and port once the server listens, `on_drain` with the number of requests
    in flight once it shuts down, from another thread.

    The first SIGINT or SIGTERM drains, for at most `shutdown_timeout` seconds. A second one cancels the
    requests in flight, and a third does not even wait for clients to be told so.
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
        on_drain: Callable[[int], None] = lambda num_requests: None,
    ) -> None:
        limits = service.limits
        service.connections = connections = ConnectionCounter(limits)
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=protocol_with_timeouts(limits, connections),
                loop="asyncio",  # whose errors are handled here, also where uvloop is installed
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=ACCEPTED_AT_ONCE,
                h11_max_incomplete_event_size=limits.headers,
                timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_SECONDS,
            )
        )
        logging.getLogger("uvicorn.access").propagate = False
        self.service = service
        self.shutdown_timeout = shutdown_timeout
        self.on_ready = on_ready
        self.on_drain = on_drain
        self.drain_thread: threading.Thread | None = None
        self.aborting = False
        self.accept_error_time = -ACCEPT_LOG_SECONDS

    async def startup(self, sockets: list[socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._handle_loop_exception)
        with _hold_startup_error() as errors:
            try:
                await super().startup(sockets)
            except SystemExit as stop:  # uvicorn's, where it cannot listen
                reason = errors[0] if errors else OSError("the reason is not known")
                raise listen_error(self.config.host, self.config.port, reason) from stop
        if self.started and self.servers:
            for listener in self.servers[0].sockets:
                with fromfd(listener.fileno(), listener.family, listener.type) as duplicate:
                    duplicate.listen(BACKLOG)
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self.on_ready(host, port)
            threading.Thread(target=self.service.warm, name="keepleft warming", daemon=True).start()

    def _handle_loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Without a file descriptor left, asyncio stops accepting for a second, and reports every attempt."""
        if context["message"] != ACCEPT_ERROR_MESSAGE:
            loop.default_exception_handler(context)
        elif time.monotonic() - self.accept_error_time >= ACCEPT_LOG_SECONDS:
            self.accept_error_time = time.monotonic()
            logging.getLogger("uvicorn.error").error(
                "no file descriptor is left (%s): new connections wait; raise the limit (ulimit -n)",
                context.get("exception"),
            )

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):  # of clients that do not read
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal. Unlike uvicorn, do not raise it again after the shutdown: the exit code is 0."""
        if self.drain_thread is None:
            self.stop()
        elif self.aborting or self.should_exit:
            self.force_exit = self.should_exit = True
        else:
            self.aborting = True
            self.config.timeout_graceful_shutdown = ABORT_SECONDS
            threading.Thread(target=self.service.abort_all, name="keepleft aborting", daemon=True).start()

    def stop(self) -> None:
        """Take no new requests, and exit when those in flight have finished. Until then, answer with 503."""
        self.drain_thread = threading.Thread(target=self._drain, name="keepleft draining", daemon=True)
        self.drain_thread.start()

    def _drain(self) -> None:
        self.on_drain(len(self.service.engine_thread.in_flight))
        self.service.drain(self.shutdown_timeout)
        self.should_exit = True
