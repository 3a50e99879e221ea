"""Training scripts as users write them, run in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import keepleft

FOLDER = Path(__file__).parent


def run_script(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script that may import integration_models."""
    paths = [str(Path(keepleft.__file__).parents[1]), str(FOLDER), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
    )


def assert_stopped_before_the_first_step(code: str, folder: Path) -> None:
    """The script prints "step" with every step; it must end with exit code 1 before the first."""
    done = run_script(code, folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "step" not in done.stdout.split()
    assert "keepleft.auditing.report.LeakError: leak: " in done.stderr
    assert "its future" in done.stderr


def import_library(name: str) -> Any:
    """The library; skips the tests that are about it where it is not installed."""
    return pytest.importorskip(name, reason=f"{name} is not installed, and its integration is tested with it")
