"""SARIF for forges: an error at the line of each finding, a warning or note for each hint."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from keepleft.auditing.report import AuditReport, Finding
from keepleft.auditing.sarif import SourceLocation, sarif
from keepleft.auditing.static.hints import hints_of_source
from keepleft.auditing.static.rule_table import RULES
from keepleft.cli import main

pytestmark = pytest.mark.usefixtures("one_thread")

FINDING = Finding(
    "future", 0, 3, 0.2, "eval, batch 2", "blocks.1", "position 0 reads position 3", line="model.py:3"
)
LEAK = AuditReport("Mine", "causal", "quick", findings=(FINDING,), checked=("future",))
UNCHECKED = AuditReport("Mine", "causal", "quick", blocked=("the audit: it crashes",))
SOURCE = b"import torch\n\n\ndef attend(q, k):\n    return (q @ k.mT).masked_fill(mask, -100).softmax(-1)\n"
MODEL = """\
import torch
from torch import nn


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + x.mean(1, keepdim=True)


def build():
    return {"target": Mean(), "checks": ["future"], "budget": "quick"}
"""
LEVELS = {"none", "note", "warning", "error"}


def check_structure(text: str) -> dict:
    """The rules of the schema that this log could break. Returns its only run."""
    log = json.loads(text)
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    assert set(log) == {"$schema", "version", "runs"}
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(ids) == len(set(ids))
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["defaultConfiguration"]["level"] in LEVELS
    for invocation in run["invocations"]:
        assert isinstance(invocation["executionSuccessful"], bool)
        for notification in invocation["toolExecutionNotifications"]:
            assert notification["message"]["text"]
            assert notification["level"] in LEVELS
    for result in run["results"]:
        assert result["ruleId"] in ids
        assert result["level"] in LEVELS
        assert result["message"]["text"]
        assert all(isinstance(value, str) for value in result.get("partialFingerprints", {}).values())
        for location in result.get("locations", []):
            physical = location["physicalLocation"]
            uri = physical["artifactLocation"]["uri"]
            assert " " not in uri
            assert "\\" not in uri
            assert not uri.startswith("/")
            assert all(isinstance(number, int) and number >= 1 for number in physical["region"].values())
    return run


def place_of(result: dict) -> tuple[str, int]:
    physical = result["locations"][0]["physicalLocation"]
    return physical["artifactLocation"]["uri"], physical["region"]["startLine"]


def test_a_finding_is_an_error_at_its_line(tmp_path, monkeypatch):
    file = tmp_path / "my code" / "model.py"
    file.parent.mkdir()
    file.write_text(MODEL)
    module = type(sys)("audited_model")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "audited_model", module)
    run = check_structure(sarif([(LEAK, None)], root=tmp_path))
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("leak-future", "error")
    assert "future in blocks.1: position 0 reads position 3" in result["message"]["text"]
    assert place_of(result) == ("my%20code/model.py", 3)
    assert run["invocations"][0]["executionSuccessful"]


def test_a_finding_without_a_line_stands_where_the_model_is_defined(tmp_path):
    report = replace(LEAK, findings=(replace(FINDING, line=""),))
    place = SourceLocation(tmp_path / "model.py", 5)
    assert place_of(check_structure(sarif([(report, place)], root=tmp_path))["results"][0]) == ("model.py", 5)
    assert "locations" not in check_structure(sarif([(report, None)]))["results"][0]
    outside = check_structure(sarif([(report, place)], root=tmp_path / "elsewhere"))["results"][0]
    assert place_of(outside) == ((tmp_path / "model.py").as_uri(), 5)


def test_without_a_verdict_the_run_was_not_successful():
    for text in (sarif([(UNCHECKED, None)]), sarif(failures=["there is no file a.py"])):
        run = check_structure(text)
        assert not run["invocations"][0]["executionSuccessful"]
        assert run["results"] == []
    assert check_structure(LEAK.sarif())["results"]


def test_hints_are_warnings_and_notes_with_their_columns(tmp_path):
    hints = hints_of_source(SOURCE, str(tmp_path / "a.py"))
    assert hints
    run = check_structure(sarif([(LEAK, None)], hints, root=tmp_path))
    assert {result["level"] for result in run["results"]} <= {"error", "warning", "note"}
    hint = run["results"][-1]
    assert (hint["ruleId"], hint["level"]) == (hints[-1].rule, hints[-1].level)
    assert place_of(hint) == ("a.py", 5)
    assert hint["locations"][0]["physicalLocation"]["region"]["startColumn"] == hints[-1].column


def test_levels_of_rules_are_levels_of_sarif():
    assert {rule.level for rule in RULES} <= LEVELS


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "leaking_mean.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("leaking_mean", None)


def test_the_command_writes_findings_at_the_line_that_leaks(folder, capsys):
    assert main(["audit", "leaking_mean.py:build", "--sarif", "out/a.sarif", "--badge", "out/badge.svg"]) == 1
    run = check_structure((folder / "out" / "a.sarif").read_text("utf-8"))
    line = next(n for n, line in enumerate(MODEL.splitlines(), 1) if "x.mean" in line)
    assert place_of(run["results"][0]) == ("leaking_mean.py", line)
    badge = (folder / "out" / "badge.svg").read_text("utf-8")
    assert 'aria-label="no peeking: leak"' in badge
    capsys.readouterr()


def test_the_command_writes_hints_without_running_the_file(folder, capsys):
    (folder / "attend.py").write_bytes(SOURCE + b"raise SystemExit(3)\n")
    assert main(["audit", "--explain", "attend.py", "missing.py", "--sarif", "hints.sarif"]) == 2
    run = check_structure((folder / "hints.sarif").read_text("utf-8"))
    assert place_of(run["results"][0]) == ("attend.py", 5)
    assert "missing.py" in run["invocations"][0]["toolExecutionNotifications"][0]["message"]["text"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("leaking_mean.py:build", "--badge", "badge.png"), "it is an SVG picture"),
        (("leaking_mean.py:build", "--sarif", "."), "is a folder: name a file in it"),
        (("--zoo", "transformers", "--sarif", "a.sarif"), "--sarif is for the audit of one model"),
        (("--explain", "leaking_mean.py", "--badge", "a.svg"), "--badge is for an audit that runs the model"),
    ],
)
def test_what_does_not_go_together_is_an_error(folder, capsys, arguments, message):
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err
