"""Which names the server answers to: a web page elsewhere must not reach it by giving its own name our address."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from keepleft.serving.http.errors import RefusedError

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


def names(host: str, also: Iterable[str] = ()) -> frozenset[str] | None:
    """Those of a server bound to this address, and some more; None: any, since it is meant to be reached from elsewhere."""
    near = host.lower() in LOOPBACK or host.startswith("127.")
    return LOOPBACK | {host.lower(), *map(str.lower, also)} if near else None


class Named:
    """Requests that name another host are turned away."""

    def __init__(self, app: Any, names: frozenset[str]) -> None:
        self.app, self.names = app, names

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
            name = given[1:].partition("]")[0] if given.startswith("[") else given.rpartition(":")[0] or given
            if name not in self.names:
                refused = RefusedError(421, "this server is for its own machine and answers to localhost alone: to be reached "
                                            "by another name it has to be started with --host or --allow-host",
                                       code="wrong_host", headers={"connection": "close"})
                await refused.answer()(scope, receive, send)
                return
        await self.app(scope, receive, send)
