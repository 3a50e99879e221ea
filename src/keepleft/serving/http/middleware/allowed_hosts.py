"""Host-header check against DNS rebinding: no web page may reach a local server under its own host name."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.middleware.auth import PUBLIC_PATHS

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def allowed_hosts(host: str, extra_hosts: Iterable[str] = ()) -> frozenset[str] | None:
    """The hosts of a server bound to this address; None, for any, unless it is a loopback address."""
    is_loopback = host.lower() in LOOPBACK or host.startswith("127.")
    return LOOPBACK | {host.lower(), *map(str.lower, extra_hosts)} if is_loopback else None


class AllowedHostsMiddleware:
    """Rejects requests for other hosts, except for PUBLIC_PATHS."""

    def __init__(self, app: ASGIApp, allowed_hosts: frozenset[str]) -> None:
        self.app = app
        self.allowed_hosts = allowed_hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            host_header = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            if host_header.startswith("["):  # an IPv6 address
                host = host_header[1:].partition("]")[0]
            else:
                host = host_header.rpartition(":")[0] or host_header
            if host not in self.allowed_hosts:
                error = APIError(
                    421,
                    "this server accepts requests for localhost only: start it with --host or --allow-host "
                    "to reach it under another name",
                    code="wrong_host",
                    headers={"connection": "close"},
                )
                await error.to_response()(scope, receive, send)
                return
        await self.app(scope, receive, send)
