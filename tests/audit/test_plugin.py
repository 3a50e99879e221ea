"""The pytest plugin: a fixture that fails where a model leaks, and costs nothing where it is not used."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import pytest

from keepleft.auditing.pytest_plugin import MAX_NAME_LENGTH, report_filename

MODULE = "keepleft.auditing.pytest_plugin"
# else it is named, and never twice
INSTALLED = any(found.value == MODULE for found in entry_points(group="pytest11"))
TESTS = '''
import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing import audit as room
from keepleft.auditing.report import AuditReport


class Mean(nn.Module):
    def __init__(self, honest):
        super().__init__()
        self.honest, self.embed = honest, nn.Embedding(11, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + (past if self.honest else x.mean(1, keepdim=True))


@pytest.fixture
def asked(monkeypatch):
    """The arguments of calls to the audit, which is replaced."""
    calls = []

    def look(target, example=None, **options):
        calls.append((example, options))
        return AuditReport("stand-in", "causal", "quick", checked=("future",))

    monkeypatch.setattr(room, "audit", look)
    return calls


def test_honest(audit):
    report = audit(Mean(True), checks=["batch"])
    assert report.ok
    assert report.budget == "quick"


def test_peeking(audit):
    audit(Mean(False), torch.zeros(2, 5, dtype=torch.long), checks=["future"])


def test_unfit(audit):
    audit(nn.Linear(3, 3), torch.zeros(2, 7, 5))


def test_plain(audit, asked):
    audit(Mean)
    audit(Mean, "an example", budget="full", layers=2)
    assert asked == [(None, {"budget": "quick"}), ("an example", {"budget": "full", "layers": 2})]


@pytest.mark.audit(budget="standard", claim="far", checks=["nan"])
class TestMarked:
    def test_outer(self, audit, asked):
        audit(Mean)
        assert asked == [(None, {"budget": "standard", "claim": "far", "checks": ["nan"]})]

    @pytest.mark.audit(claim="near", example="marked")
    def test_inner(self, audit, asked):
        audit(Mean, budget="full")
        audit(Mean, "given")
        assert asked[0] == ("marked", {"budget": "full", "claim": "near", "checks": ["nan"]})
        assert asked[1] == ("given", {"budget": "standard", "claim": "near", "checks": ["nan"]})


@pytest.mark.audit("standard")
def test_nameless(audit):
    pass
'''


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest as strict as it can be, with nothing of this repository but the plugin."""
    known = os.pathsep.join([str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *(() if INSTALLED else ("-p", MODULE)),
            "-p",
            "no:cacheprovider",
            "--strict-markers",
            "--strict-config",
            "-W",
            "error",
            *arguments,
        ],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": known, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (folder / "test_mine.py").write_text(TESTS)
    done = run(folder, "--audit-html=pages", "--junitxml=junit.xml")
    assert (folder / "junit.xml").exists(), done.stdout + done.stderr
    cases = ElementTree.parse(folder / "junit.xml").getroot().iter("testcase")
    return (
        folder,
        {
            case.get("name"): next((f"{part.tag}: {part.get('message')}" for part in case), "passed")
            for case in cases
        },
        done.stdout,
    )


def test_an_honest_model_passes(ran):
    assert ran[1]["test_honest"] == "passed"


def test_a_leak_fails_with_its_report_and_the_line_that_asked(ran):
    _, cases, out = ran
    assert "LeakError: leak: Mean does not keep to its claim" in cases["test_peeking"]
    assert "to see it:" in out
    assert ">       audit(Mean(False), " in out
    assert "pytest_plugin.py" not in out  # the plugin's own frames are hidden


def test_what_cannot_be_audited_fails_too(ran):
    assert "UncheckedError: unchecked: there is no verdict on Linear" in ran[1]["test_unfit"]


@pytest.mark.parametrize("name", ["test_plain", "test_outer", "test_inner"])
def test_a_call_goes_before_the_closest_mark_and_that_before_the_option(name, ran):
    assert ran[1][name] == "passed"


def test_arguments_of_a_mark_have_names(ran):
    assert "pytest.mark.audit was given 'standard' without a name" in ran[1]["test_nameless"]


def test_there_is_a_page_for_each_audited_model(ran):
    folder, _, _ = ran
    pages = sorted(path.name for path in (folder / "pages").iterdir())
    assert pages == [
        f"test_mine.py-{name}.html"
        for name in (
            "TestMarked-test_inner-2",
            "TestMarked-test_inner",
            "TestMarked-test_outer",
            "test_honest",
            "test_peeking",
            "test_plain-2",
            "test_plain",
            "test_unfit",
        )
    ]
    assert "does not keep to its claim" in (folder / "pages" / "test_mine.py-test_peeking.html").read_text(
        "utf-8"
    )


def test_a_run_without_models_does_not_wait_for_torch(tmp_path):
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\n"
        "def test_light(pytestconfig):\n"
        "    assert 'torch' not in sys.modules\n"
        "    assert pytestconfig.getoption('--audit-budget') == 'full'\n"
        "    assert any('audit(' in line for line in pytestconfig.getini('markers'))\n"
    )
    done = run(tmp_path, "--audit-budget=full")
    assert done.returncode == 0, done.stdout + done.stderr


def test_names_of_pages_are_names_of_files():
    assert report_filename("a/b.py::Test::test_c") == "a.b.py-Test-test_c"
    odd, other = report_filename("a.py::test[x/y z*?]"), report_filename("a.py::test[x/y z**]")
    assert odd != other
    assert odd.startswith("a.py-test_x.y_z_")
    assert not set("/*?[]: ") & set(odd)
    assert len(report_filename("x" * 1000)) < MAX_NAME_LENGTH + 20
