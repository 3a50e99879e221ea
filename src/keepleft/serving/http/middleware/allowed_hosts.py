"""Which names the server answers to: a web page elsewhere must not reach it by giving its own name our
address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepleft.serving.http.errors import APIError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def allowed_hosts(host: str, extra_hosts: Iterable[str] = ()) -> frozenset[str] | None:
    """Those of a server bound to this address, and some more; None: any, since it is meant to be reached from
    elsewhere.
    """
    is_loopback = host.lower() in LOOPBACK or host.startswith("127.")
    return LOOPBACK | {host.lower(), *map(str.lower, extra_hosts)} if is_loopback else None


class AllowedHostsMiddleware:
    """Requests that name another host are turned away."""

    def __init__(self, app: Any, allowed_hosts: frozenset[str]) -> None:
        self.app = app
        self.allowed_hosts = allowed_hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            host_header = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            host = (
                host_header[1:].partition("]")[0]
                if host_header.startswith("[")
                else host_header.rpartition(":")[0] or host_header
            )
            if host not in self.allowed_hosts:
                error = APIError(
                    421,
                    "this server is for its own machine and answers to localhost alone: to be reached "
                    "by another name it has to be started with --host or --allow-host",
                    code="wrong_host",
                    headers={"connection": "close"},
                )
                await error.to_response()(scope, receive, send)
                return
        await self.app(scope, receive, send)
