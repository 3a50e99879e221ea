"""keepleft imports and works without what Windows lacks, and without what macOS lacks.

There is neither here: the tests take away the modules, functions and constants that these systems do not
have, and let `fsync` fail where it fails on Windows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import keepleft as kl
from keepleft import cgroup
from keepleft.disk import atomic
from keepleft.inference import decode_layers
from keepleft.kernels import triton_compat

WINDOWS = """
import errno, os, pathlib, signal, socket, sys

MISSING_MODULES = "fcntl grp posix_ipc pty pwd readline resource syslog termios triton tty".split()

class WithoutPosixModules:
    def find_spec(self, name, path=None, target=None):
        if name in MISSING_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import torch, torch.utils._triton  # they know Windows themselves
for name in MISSING_MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, WithoutPosixModules())
for module, names in {
    os: "fork forkpty getuid geteuid killpg nice sched_getaffinity sysconf O_CLOEXEC O_NONBLOCK WNOHANG",
    signal: "SIGKILL SIGALRM SIGHUP SIGUSR1 setitimer ITIMER_REAL",
    socket: "AF_UNIX send_fds recv_fds MSG_DONTWAIT",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

posix_open, posix_fsync = os.open, os.fsync

def windows_open(path, flags, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))
    return posix_open(path, flags, *arguments, **options)

def windows_fsync(descriptor):
    lines = pathlib.Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    if not flags & (os.O_WRONLY | os.O_RDWR):
        raise OSError(errno.EBADF, "Bad file descriptor")
    posix_fsync(descriptor)

os.open, os.fsync = windows_open, windows_fsync
import keepleft.disk.atomic, keepleft.cgroup
keepleft.disk.atomic.IS_WINDOWS = True
keepleft.cgroup._free_memory_of_machine = lambda: 4 << 30
"""


def run_as_windows(code: str, folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WINDOWS + code],
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_every_module_imports_without_posix():
    code = """
import importlib, pkgutil, keepleft
of_other_libraries = "axolotl_plugin lightning_callback trainer_callback".split()  # import theirs at once
for module in pkgutil.walk_packages(keepleft.__path__, "keepleft."):
    if module.name != "keepleft.__main__" and module.name.rpartition(".")[2] not in of_other_libraries:
        importlib.import_module(module.name)
"""
    run_as_windows(code, Path.cwd())


@pytest.mark.slow
def test_training_translating_and_auditing_work_without_posix(tmp_path):
    code = """
from keepleft.cli import main
for command in (
    "demo --phrases phrases",
    "train --task translate --train phrases/fr.held.tsv --out run --size tiny --recipe.steps 3 --threads 1",
    "translate run/model happy --max-new-tokens 3 --output out.txt",
    "audit run/model --budget quick --checks future",
    "doctor",
):
    assert main(command.split()) == 0, command
"""
    run_as_windows(code, tmp_path)
    assert (tmp_path / "run" / "model" / "config.json").exists()
    assert (tmp_path / "out.txt").exists()


def test_without_triton_a_gpu_gets_no_kernels_of_ours(monkeypatch):
    """PyTorch for Windows has CUDA, and no Triton."""
    model = kl.build(kl.presets.small(kl.presets.gpt2))
    assert decode_layers.unsupported_reason(model) is None
    monkeypatch.setattr(triton_compat, "tl", None)
    assert triton_compat.lacks_triton(torch.device("cuda"))
    assert not triton_compat.lacks_triton(torch.device("cpu"))
    assert decode_layers.unsupported_reason(model) is None
    monkeypatch.setattr(decode_layers, "lacks_triton", lambda device: True)
    assert "Triton" in str(decode_layers.unsupported_reason(model))


def test_a_folder_is_not_synced_on_windows_and_a_file_is(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        atomic.os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    )
    (tmp_path / "file").write_text("x")
    monkeypatch.setattr(atomic, "IS_WINDOWS", True)
    atomic.sync(tmp_path)
    atomic.sync(tmp_path / "file")
    assert synced == [str(tmp_path / "file")]


def test_free_memory_is_known_where_the_system_does_not_tell_it(monkeypatch):
    """macOS has no SC_AVPHYS_PAGES."""
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1000}

    def sysconf(name: str) -> int:
        if name not in sizes:
            raise ValueError("unrecognized configuration name")
        return sizes[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert cgroup.free_memory(Path("/nowhere")) == 500 * 4096


@pytest.mark.parametrize(("encoding", "errors"), [("cp1252", "strict"), ("ascii", "surrogateescape")])
def test_output_is_utf8_whatever_the_code_page(encoding, errors, tmp_path):
    code = f"""
import sys
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding={encoding!r}, errors={errors!r})
from keepleft.cli.streams import use_utf8
use_utf8()
print("■ मैं", sys.stdout.errors)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONIOENCODING"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=True)
    assert ran.stdout.decode("utf-8") == f"■ मैं {errors}\n"
