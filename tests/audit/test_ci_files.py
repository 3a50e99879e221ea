"""The GitHub Action, the GitLab template and the pre-commit hook: their steps run as a runner would run them,
with the installed program in place of the download.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import keepleft
from keepleft.cli.command_table import find_command
from keepleft.cli.option_table import command_options

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
GITLAB = yaml.safe_load((ROOT / ".gitlab" / "audit.gitlab-ci.yml").read_text("utf-8"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
REPORTS = {"audit.sarif", "junit.xml", "page.html", "badge.svg"}
MODEL = """
import torch
from torch import nn

class Mean(nn.Module):
    def __init__(self, honest):
        super().__init__()
        self.honest = honest
        self.embed = nn.Embedding(11, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return x + (x.cumsum(1) / counts if self.honest else x.mean(1, keepdim=True))

def honest():
    return Mean(True)

def leaking():
    return Mean(False)

def unfit():
    return nn.Linear(3, 3), torch.zeros(2, 7, 5)
"""
needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="the steps are for bash")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A checkout with a model, and programs keepleft and python in front of the search path."""
    (tmp_path / "ci_model.py").write_text(MODEL)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    script = bin_folder / "keepleft"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m keepleft "$@"\n')
    script.chmod(0o755)
    return tmp_path


def run_step(folder: Path, script: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A step as GitHub runs it: bash that ends with the first error."""
    source = str(Path(keepleft.__file__).parents[1])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
        env={
            **os.environ,
            **env,
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "GITHUB_OUTPUT": str(folder / "output"),
        },
    )


def action_step(step_id: str) -> dict:
    return next(step for step in ACTION["runs"]["steps"] if step.get("id") == step_id)


def action_env(step: dict, inputs: dict[str, str]) -> dict[str, str]:
    """The environment of a step, with the inputs or their defaults in it."""
    values = {name: spec.get("default", "") for name, spec in ACTION["inputs"].items()} | inputs
    expression = re.compile(r"\$\{\{ inputs\.(\w+) \}\}")
    return {name: expression.sub(lambda m: values[m[1]], value) for name, value in step["env"].items()}


@needs_bash
@pytest.mark.parametrize(
    ("target", "exit_code", "verdict"),
    [("honest", 0, "clean"), ("leaking", 1, "leak"), ("unfit", 2, "unchecked")],
)
def test_the_action_audits_and_fails_unless_the_model_is_clean(folder, target, exit_code, verdict):
    step = action_step("audit")
    env = action_env(step, {"target": f"ci_model.py:{target}", "budget": "quick", "claim": "causal & full"})
    done = run_step(folder, step["run"], env)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert (folder / "output").read_text() == f"verdict={verdict}\n"
    assert {path.name for path in (folder / "audit-reports").iterdir()} == REPORTS
    log = json.loads((folder / "audit-reports" / "audit.sarif").read_text("utf-8"))
    assert bool(log["runs"][0]["results"]) == (verdict == "leak")


@needs_bash
def test_the_action_names_suspicious_lines(folder):
    step = action_step("hints")
    (folder / "attend.py").write_text(
        "def attend(q, k):\n    return (q @ k.mT).masked_fill(m, -100).softmax(-1)\n"
    )
    done = run_step(folder, step["run"], action_env(step, {"explain": "attend.py ci_model.py"}))
    assert done.returncode == 0, done.stderr
    assert (folder / "audit-reports" / "hints.sarif").exists()
    assert step["if"] == "inputs.explain != ''"


@needs_bash
@pytest.mark.parametrize(
    ("version", "requirement"),
    [("", "keepleft"), ("1.2.3", "keepleft==1.2.3"), ("git+https://host/a/b", "git+https://host/a/b")],
)
def test_the_action_installs_what_it_is_told_to(folder, version, requirement):
    python = folder / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    step = action_step("install")
    done = run_step(folder, step["run"], action_env(step, {"version": version}))
    assert done.stdout == f"-m pip install {requirement}\n"


def test_inputs_reach_the_scripts_through_the_environment_alone():
    """An expression inside a script would be run as code."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
        assert step.get("shell", "bash") == "bash"
    assert ACTION["runs"]["using"] == "composite"
    used = set(re.findall(r"inputs\.(\w+)", (ROOT / "action.yml").read_text("utf-8")))
    assert used == set(ACTION["inputs"])


@needs_bash
@pytest.mark.parametrize(("target", "exit_code"), [("honest", 0), ("leaking", 1)])
def test_the_gitlab_template_audits(folder, target, exit_code):
    job = GITLAB[".keepleft-audit"]
    env = job["variables"] | {"AUDIT_TARGET": f"ci_model.py:{target}", "AUDIT_BUDGET": "quick"}
    done = run_step(folder, "\n".join(job["script"]), env)
    assert done.returncode == exit_code, done.stdout + done.stderr
    assert {path.name for path in (folder / "audit-reports").iterdir()} == REPORTS
    assert job["artifacts"]["when"] == "always"
    assert job["artifacts"]["reports"]["junit"] == "$AUDIT_REPORTS/junit.xml"


@needs_bash
def test_the_hook_of_pre_commit_gets_the_names_of_files(folder):
    (hook,) = HOOKS
    assert hook["id"] == "keepleft-audit-hints"
    assert hook["types"] == ["python"]
    done = run_step(folder, f"{hook['entry']} ci_model.py", {})
    assert done.returncode == 0, done.stderr
    assert "hints are no verdict" in done.stdout


def test_every_option_in_these_files_exists():
    options = {option.flag for option in command_options(find_command("audit"))}
    for name in ("action.yml", ".gitlab/audit.gitlab-ci.yml", ".pre-commit-hooks.yaml"):
        text = (ROOT / name).read_text("utf-8")
        for command in re.findall(r"keepleft audit ((?:.|\\\n)*?)(?:\|\||\n\s*(?:case|$|-)|$)", text):
            assert set(re.findall(r"(?<![\w-])--[a-z]+", command)) <= options


def test_they_are_valid():
    """Against the schemas that check-jsonschema brings along."""
    pytest.importorskip("check_jsonschema")
    for schema, name in (("github-actions", "action.yml"), ("gitlab-ci", ".gitlab/audit.gitlab-ci.yml")):
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", name]
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
