"""docs/install.md agrees with pyproject.toml, with the version, and with what keepleft doctor says."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement

import keepleft as kl
from keepleft.cli import doctor, main

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "install.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
DEVELOPER_EXTRAS = {"test", "docs"}


def test_the_table_of_extras_is_that_of_pyproject():
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.*?) ?\|$", PAGE, re.M)
    assert [extra for extra, _, _ in rows if extra not in DEVELOPER_EXTRAS] == sorted(
        EXTRAS.keys() - DEVELOPER_EXTRAS
    )
    assert {extra for extra, _, _ in rows} == EXTRAS.keys()
    for extra, purpose, packages in rows:
        assert purpose
        if extra not in DEVELOPER_EXTRAS:
            assert packages.split(", ") == [Requirement(text).name for text in EXTRAS[extra]], extra


def test_every_extra_that_is_named_exists():
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "src").rglob("*.py")]:
        for names in re.findall(r"keepleft\[([\w,-]+)\]", path.read_text("utf-8")):
            assert set(names.split(",")) <= EXTRAS.keys(), f"{path.name} names the extras {names}"


def test_wheels_are_named_by_their_versions():
    translator = tomllib.loads((ROOT / "translator" / "pyproject.toml").read_text("utf-8"))["project"]
    assert f"dist/keepleft-{kl.__version__}-py3-none-any.whl" in PAGE
    assert f"dist/keepleft_translator-{translator['version']}-py3-none-any.whl" in PAGE


# -- PyTorch


def test_the_tested_range_of_pytorch_is_named_and_there_is_no_upper_bound():
    oldest, newest = (".".join(map(str, release)) for release in doctor.TESTED_TORCH)
    assert f"PyTorch {oldest} to {newest}" in PAGE
    (requirement,) = [r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch"]
    assert str(requirement.specifier) == f">={oldest}"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert re.search(rf"^TORCH \?= torch=={re.escape(newest)}\.\d+$", makefile, re.M)
    workflow = (ROOT / ".github" / "workflows" / "tests.yml").read_text("utf-8")
    assert f'"{oldest}.0"' in workflow


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("2.11.0", None),
        ("2.13.0+cpu", None),
        ("2.13.1.dev20261001+cu130", None),
        ("2.14.0", "torch 2.14.0 is newer than 2.13, the newest that keepleft is tested with"),
        ("3.0.0a0+git1", "torch 3.0.0a0+git1 is newer than 2.13, the newest that keepleft is tested with"),
        ("2.9.1", "torch 2.9.1 is too old: keepleft needs 2.11 or newer"),
    ],
)
def test_doctor_tells_when_pytorch_is_not_one_of_those(version, note):
    assert doctor.torch_note(version) == note


def test_the_note_is_printed(capsys, monkeypatch):
    cuda = SimpleNamespace(device_count=lambda: 0)
    fake = SimpleNamespace(__version__="9.9.0", cuda=cuda, get_num_threads=lambda: 1)
    monkeypatch.setattr("keepleft.cli.threads.configure_threads", lambda threads: None)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert main(["doctor"]) == 0
    assert "torch 9.9.0 is newer than" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["notes"]) == 1
