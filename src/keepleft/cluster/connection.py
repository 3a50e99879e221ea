"""A Ray cluster: the one at an address, or one that is started on this machine."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, cast

from keepleft.cluster.signals import SigtermHandler

CLIENT_SCHEME = "ray://"
CONNECT_SECONDS = 5.0
STDERR = 2  # its file descriptor
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_SERVE_LOG_TO_STDERR": "0"}


def import_ray() -> ModuleType:
    """Ray. Raises ImportError, with the remedy, where it is missing."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries that Ray imports
            import ray
            import ray.data
            import ray.serve
    except ImportError as error:
        raise ImportError(f"clusters need {error.name}: pip install 'keepleft[ray]'") from error
    for logger in ("ray", "ray.data", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.CRITICAL)
    from ray._private import worker

    # Ray prints on stdout what it notices of processes that died; what matters is raised as an error
    worker.print_worker_logs = _drop  # type: ignore[assignment]
    return ray


def _drop(data: object, stream: object, ignore_prefix: object) -> None:
    """What Ray calls with each line to print."""


@contextmanager
def errors_in_one_line(what: str) -> Iterator[None]:
    """Raise OSError with one line of an error of Ray, which shows all that happened in all its processes."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    try:
        yield
    except (RayError, RayServeException, RuntimeError) as error:
        raise OSError(f"{what} could not go on: {_last_line(error)}") from None


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return re.sub(r"^(ValueError|OSError|FileNotFoundError|ImportError): ", "", lines[-1])  # ours: sentences


@contextmanager
def ray_connection(address: str | None) -> Iterator[ModuleType]:
    """Ray, connected to the cluster at an address; without one, to a cluster of this machine alone.

    SIGTERM raises TerminatedError. Raises ConnectionError.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    with SigtermHandler() as handler:
        _start(ray, address)
        try:
            handler.begin_raising()
            yield ray
        finally:
            ray.shutdown()


def _start(ray: ModuleType, address: str | None) -> None:
    from ray.exceptions import RayError

    # "local": not the cluster that RAY_ADDRESS or an earlier `ray start` names
    options = {"address": "local", "include_dashboard": False} if address is None else {"address": address}
    try:
        if address is not None:
            _check_reachable(address)
        # without the standard error of Ray's C++ part, which tells of its log level
        with _without_stderr(), _in_own_session():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False, **options)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = "on this machine" if address is None else f"at {address!r}"
        raise ConnectionError(
            f"there is no Ray cluster {where} ({reason}): start one with `ray start --head`, or leave "
            "--address out"
        ) from error


@contextmanager
def _in_own_session() -> Iterator[None]:
    """Ray's processes get a session of their own: a signal for all processes of a command is for this one to
    handle, while it still needs them. Ray's own handler of SIGTERM is left out.
    """
    from ray._private import services as ray_services
    from ray._private import utils as ray_utils

    services, utils = cast(Any, ray_services), cast(Any, ray_utils)
    original, set_handler = services.ConsolePopen, utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    if os.name == "posix":
        services.ConsolePopen = partial(original, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen, utils.set_sigterm_handler = original, set_handler


def _check_reachable(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT or ray://HOST:PORT: Ray would try for minutes."""
    host, colon, port = address.removeprefix(CLIENT_SCHEME).rpartition(":")
    if not colon:  # "auto"
        return
    if not port.isdigit():
        raise ValueError("an address is auto, HOST:PORT or ray://HOST:PORT")
    socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Nothing goes to the standard error of this process."""
    sys.stderr.flush()
    saved = os.dup(STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, STDERR)
    try:
        yield
    finally:
        os.dup2(saved, STDERR)
        os.close(saved)
        os.close(nowhere)
