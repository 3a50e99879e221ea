"""--threads: every command has it, and what it sets reaches PyTorch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from keepleft import cgroup
from keepleft.cli import main, threads

SHOW = (
    "import json, os, sys; from keepleft.cli.threads import configure_threads; configure_threads(%s); "
    "assert 'torch' not in sys.modules; import torch; "
    "print(json.dumps([torch.get_num_threads(), os.environ.get('GOMP_SPINCOUNT')]))"
)


def run(count, **environ):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    output = subprocess.run(
        [sys.executable, "-c", SHOW % count], env=kept | environ, capture_output=True, text=True, check=True
    ).stdout
    return json.loads(output)


def test_a_number_of_threads_reaches_torch_and_they_spin_briefly():
    assert run(1) == [1, str(threads.SPIN_COUNT)]


def test_the_environment_decides_where_it_says_something():
    assert run(None, OMP_NUM_THREADS="1", OMP_WAIT_POLICY="active") == [1, None]


@pytest.mark.parametrize("command", ["train", "demo", "translate"])
def test_a_command_sets_its_threads_before_torch_is_imported(command):
    code = (
        "import sys; from keepleft.cli import main, threads; "
        "threads.configure_threads = lambda number: sys.exit('torch' in sys.modules); main([%r])"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    assert subprocess.run([sys.executable, "-c", code % command], env=kept, check=False).returncode == 0


@pytest.fixture
def clean_environment(monkeypatch):
    for name in (*threads.WAITING_VARIABLES, threads.THREAD_VARIABLE):
        monkeypatch.setenv(name, "")  # so that it is set back afterwards
        monkeypatch.delenv(name)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("clean_environment")
def test_the_quota_of_a_container_is_the_default(monkeypatch):
    monkeypatch.setattr(cgroup, "cpu_quota", lambda root=None: 0.5)
    torch.set_num_threads(2)
    threads.configure_threads(None)
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("clean_environment")
def test_every_command_has_the_option(capsys):
    for command in ("audit", "classify", "compare", "demo", "eval", "export", "fill", "generate", "score"):
        assert main([command, "--help-all"]) == 0
        assert "--threads" in capsys.readouterr().out, command
    assert main(["doctor", "--threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["threads"] == 1


@pytest.mark.usefixtures("clean_environment")
def test_a_number_below_one_is_refused(capsys):
    assert main(["doctor", "--threads", "0"]) == 2
    assert "--threads is 0: give at least one" in capsys.readouterr().err
