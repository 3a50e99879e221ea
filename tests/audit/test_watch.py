"""keepleft audit --watch: a new audit in a new process with every change, until Ctrl-C."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import keepleft
from keepleft.cli import main
from keepleft.cli.audit_watch import changes, command_line, file_states, watched_folder

MODEL = """
import torch
from torch import nn

class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + {mean}

def build():
    return Mean()
"""
LEAKING = MODEL.format(mean="x.mean(1, keepdim=True)")
HONEST = MODEL.format(mean="x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]")
# whoever runs the tests may ignore SIGINT, and a child process inherits that
WATCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from keepleft.cli import main
sys.exit(main(["audit", "watched.py:build", "--checks", "future", "--budget", "quick", "--watch"]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_a_saved_repair_is_audited_and_ctrl_c_ends_with_130(tmp_path):
    (tmp_path / "watched.py").write_text(LEAKING)
    source = Path(keepleft.__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", WATCH],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=lambda: [lines.put(line) for line in process.stdout])
    reader.start()

    def wait_for(verdict: str) -> None:
        for _ in range(200):
            if lines.get(timeout=120).startswith(verdict):
                return
        pytest.fail(f"there is no verdict {verdict}")

    try:
        wait_for("leak: Mean")
        (tmp_path / "watched.py").write_text(HONEST)
        wait_for("clean: Mean")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    finally:
        process.kill()
        reader.join(60)
        error = process.stderr.read()
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 130
    assert "keepleft: watching 1 files in" in error
    assert "keepleft: watched.py changed" in error


def test_changed_added_and_removed_files_are_told(tmp_path):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("no code")
    before = file_states(tmp_path)
    assert [path.name for path in before] == ["a.py", "b.py"]
    (tmp_path / "a.py").write_text("x = 12\n")
    (tmp_path / "b.py").unlink()
    (tmp_path / "c.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("still none")
    changed = next(changes(tmp_path, before, poll_seconds=0.01))
    assert [path.name for path in changed] == ["a.py", "b.py", "c.py"]


def test_the_package_of_a_module_is_watched_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "watched_package" / "models"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise SystemExit(3)\n")
    (package / "lm.py").write_text("")
    (tmp_path / "alone.py").write_text("")
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert watched_folder(["watched_package.models.lm:build"], None) == package.parent
    assert watched_folder([f"{package}/lm.py:build"], None) == package.parent
    assert watched_folder(["alone:build"], None) == tmp_path / "alone.py"
    assert watched_folder(["alone.py:build"], None) == tmp_path
    assert watched_folder([], "config.json") == Path("config.json")
    assert list(file_states(Path("config.json"))) == [Path("config.json")]
    with pytest.raises(ValueError, match="finds no files of nowhere"):
        watched_folder(["nowhere.lm:build"], None)
    with pytest.raises(ValueError, match="there is no org/model: fetch it first"):
        watched_folder(["org/model"], None)


def test_the_options_are_given_on():
    values = {"inputs": ["a.py:build"], "with_": "transformers", "claim": "causal & window(3)", "json": True}
    values |= {"hf_config": None, "limit": 3.5, "budget": "quick"}
    assert command_line(values, {"inputs", "with_", "claim", "json", "limit", "hf_config"}) == [
        "a.py:build",
        "--claim=causal & window(3)",
        "--json",
        "--limit=3.5",
        "--with=transformers",
    ]


def test_what_cannot_be_watched_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "--zoo", "transformers", "--watch"]) == 2
    assert "--watch is for the audit of one model" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["audit", "empty", "--watch"]) == 2
    assert "--watch finds no .py, .json or model file in empty" in capsys.readouterr().err
