"""Signals for a command with replicas: whatever comes when, nothing of it stays and the port is free."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from batch.jobs import save
from cluster.processes import WAIT_SECONDS, processes_called, start_keepleft, title, wait_until
from keepleft.cluster.memory import descendants
from keepleft.cluster.serve import free_port
from keepleft.cluster.signals import REPEAT_SECONDS, SigtermHandler, TerminatedError
from serving.tiny_services import decoder

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the processes of Ray are found in /proc")


def test_a_signal_while_ray_starts_is_raised_when_it_has_started():
    before = signal.getsignal(signal.SIGTERM)
    time.sleep(REPEAT_SECONDS)
    with SigtermHandler() as handler:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(TerminatedError) as caught:
            handler.begin_raising()
    assert caught.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_same_signal_twice_is_raised_once():
    time.sleep(REPEAT_SECONDS)
    with SigtermHandler() as handler:
        handler.begin_raising()
        with pytest.raises(TerminatedError):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    pytest.importorskip("ray", reason="needs ray: pip install 'keepleft[ray]'")
    return save(decoder(), tmp_path_factory.mktemp("signals") / "tiny")


def start(model) -> tuple[subprocess.Popen, int]:
    port = free_port()
    return start_keepleft("serve", model, "--replicas", 1, "--port", port, own_group=True), port


def wait_for_address(process: subprocess.Popen) -> None:
    for line in process.stderr:
        if "the page is at" in line:
            return
    raise AssertionError("it does not start")


def is_gone(processes: dict[int, str]) -> bool:
    return not any(title(process) == name for process, name in processes.items())


@pytest.mark.slow
@linux_only
def test_a_signal_for_all_its_processes_ends_the_command_in_order(model):
    process, _ = start(model)
    wait_for_address(process)
    started = {child: title(child) for child in descendants(process.pid)}
    os.killpg(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0, error
    wait_until(lambda: is_gone(started), "processes are left")


@pytest.mark.slow
@linux_only
def test_a_signal_while_replicas_start_stops_the_command(model):
    process, _ = start(model)
    wait_until(lambda: processes_called("raylet", process.pid), "Ray does not start")
    os.killpg(process.pid, signal.SIGTERM)
    _, error = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 143, error
    assert error.endswith("keepleft: stopped\n")


@pytest.mark.slow
@linux_only
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_nothing_that_serves_is_left_of_a_command_that_was_killed(model):
    process, port = start(model)
    wait_for_address(process)
    started = {child: title(child) for child in descendants(process.pid)}
    serving = {child: name for child, name in started.items() if "haproxy" in name or "ServeReplica" in name}
    assert len(serving) >= 2
    process.kill()
    process.communicate(timeout=WAIT_SECONDS)
    wait_until(lambda: is_gone(serving), "processes are left")  # Ray's agents take a minute
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
