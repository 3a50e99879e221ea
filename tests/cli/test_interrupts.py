"""Ctrl-C ends a command, also while a library is being imported that swallows it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import keepleft
from keepleft.cli.interrupts import repeat_lost_interrupts

SWALLOWING_TORCH = """
import time
print("importing", flush=True)
for _ in range(2):
    try:
        time.sleep(30)
    except BaseException:
        pass
time.sleep(60)
"""

# whoever runs the tests may ignore SIGINT, and a child process inherits that
DOCTOR = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from keepleft.cli import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_doctor_although_the_import_of_torch_swallows_it(tmp_path):
    (tmp_path / "torch.py").write_text(SWALLOWING_TORCH)
    source = Path(keepleft.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", DOCTOR],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, out, error) == (130, "", "keepleft: stopped\n")


def test_an_interrupt_outside_an_import_comes_once_and_the_handler_is_restored(monkeypatch):
    monkeypatch.setattr("keepleft.cli.interrupts.RETRY_SECONDS", 0)
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with repeat_lost_interrupts():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
