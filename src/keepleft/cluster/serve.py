"""Start replicas on a Ray cluster, wait until they are ready, and take them down."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from keepleft.cluster.connection import check_resources, connected, import_ray
from keepleft.cluster.replicas import APPLICATION, ReplicaArguments, ReplicaSettings, build_application

HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
SESSION_HEADER_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
SESSION_HEADER = "x-session-id"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
START_SECONDS = 600.0  # for all replicas to load the model
POLL_SECONDS = 0.25
MIN_DRAINING_SECONDS = 5  # that a replica goes on after HAProxy was told of its end


def default_environment(session_header: str = SESSION_HEADER) -> dict[str, str]:
    """The environment variables of a cluster: HAProxy in front, and requests of a session at one replica.

    They must be set where the nodes of the cluster are started.
    """
    return {
        HAPROXY_VARIABLE: "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hash req.hdr({session_header})\n    hash-type consistent",
        SESSION_HEADER_VARIABLE: session_header,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(MIN_DRAINING_SECONDS),
    }


@contextmanager
def cluster_environment(session_header: str) -> Iterator[None]:
    """Set these variables for a cluster of this machine, unless they are set; with files of its own."""
    folder = Path(tempfile.mkdtemp(prefix="keepleft-"))
    values = {
        **default_environment(session_header),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    added = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
        shutil.rmtree(folder, ignore_errors=True)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_replicas(
    arguments: ReplicaArguments,
    settings: ReplicaSettings,
    *,
    address: str | None = None,
    session_header: str = SESSION_HEADER,
) -> Iterator[int]:
    """Replicas that are ready; yields the port. At the end they are taken down.

    Raises ValueError if the cluster is too small for them, ConnectionError if there is none, RuntimeError if
    they do not start.
    """
    with cluster_environment(session_header) if address is None else nullcontext():
        import_ray()
        with connected(address) as ray:
            count = settings.replicas
            check_resources(ray, count=count, what="replicas", gpus=settings.gpus, cpus=settings.cpus)
            if not settings.port:
                settings = replace(settings, port=free_port(settings.host))
            deploy(arguments, settings)
            try:
                yield settings.port
            finally:
                take_down()


def deploy(arguments: ReplicaArguments, settings: ReplicaSettings) -> None:
    """Start the replicas, or bring those that run up to date one by one; wait until they are ready."""
    from ray import serve

    options = settings.deployment_options(arguments.options.limits)
    if os.environ.get(HAPROXY_VARIABLE) != "1":
        # HAProxy chooses the replica itself
        options["request_router_config"] = {"request_router_class": ROUTER}
    serve.start(proxy_location="EveryNode", http_options={"host": settings.host, "port": settings.port})
    application = build_application(arguments.to_json())
    _configure(application, options)
    serve.run(application, name=APPLICATION, route_prefix="/", blocking=False)
    _wait_until_served(settings)


def _configure(application: Any, options: dict[str, Any]) -> None:
    application._bound_deployment = application._bound_deployment.options(**options)


def _wait_until_served(settings: ReplicaSettings) -> None:
    """Wait until a request reaches a replica: the proxy learns of them a moment later."""
    import http.client

    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, settings.port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"no replica answers at {host}:{settings.port} after {START_SECONDS:g} seconds")


def take_down() -> None:
    """Stop the replicas, when they have answered what they have."""
    from ray import serve

    serve.delete(APPLICATION)
