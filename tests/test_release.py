"""The release rehearsal refuses what must not be released; the workflow publishes only what it has passed."""

from __future__ import annotations

import re
from pathlib import Path
from zipfile import ZipFile

import pytest
import release_check
import yaml
from release_check import ReleaseError, check_contents, check_same_files, check_version, package_version

import keepleft as kl

ROOT = Path(__file__).parent.parent
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
CHANGELOG = "# Changes\n\n## 1.2.3, {}\n\n- more\n\n## 1.2.2, 2029-01-31\n"


def write_wheel(path: Path, files: dict[str, str]) -> Path:
    with ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


# -- versions


def test_the_version_has_one_place_and_the_changelog_begins_with_it():
    version = package_version()
    assert version == kl.__version__
    check_version(version, (ROOT / "CHANGELOG.md").read_text("utf-8"), tag=None)


def test_a_tag_of_this_version_with_a_date_in_the_changelog_passes():
    check_version("1.2.3", CHANGELOG.format("2030-01-31"), "v1.2.3")
    check_version("1.2.3", CHANGELOG.format("unreleased"), None)


@pytest.mark.parametrize(
    ("version", "changelog", "tag", "message"),
    [
        ("1.2.4", CHANGELOG.format("unreleased"), None, "begins with 1.2.3, and .* has 1.2.4"),
        ("1.2.3", CHANGELOG.format("2030-01-31"), "v1.2.4", "the tag is v1.2.4, and .* has 1.2.3"),
        ("1.2.3", CHANGELOG.format("2030-01-31"), "1.2.3", "tag it v1.2.3"),
        ("1.2.3", CHANGELOG.format("unreleased"), "v1.2.3", "put the date in"),
        ("1.2.3", "# Changes\n", None, "no heading"),
    ],
)
def test_versions_that_disagree_are_refused(version, changelog, tag, message):
    with pytest.raises(ReleaseError, match=message):
        check_version(version, changelog, tag)


# -- files


def test_a_wheel_that_its_sdist_does_not_build_is_refused(tmp_path):
    record = "p-1.dist-info/RECORD"
    wheel = write_wheel(tmp_path / "a.whl", {"p/a.py": "1", "p/b.py": "2", "p/c.py": "3", record: "x"})
    check_same_files(
        wheel, write_wheel(tmp_path / "b.whl", {"p/c.py": "3", "p/b.py": "2", "p/a.py": "1", record: "y"})
    )
    other = write_wheel(tmp_path / "c.whl", {"p/a.py": "1", "p/b.py": "0", "p/d.py": "4"})
    with pytest.raises(
        ReleaseError, match=r"missing \['p/c.py'\], additional \['p/d.py'\], different \['p/b.py'\]"
    ):
        check_same_files(wheel, other)


LICENSES = {"p-1.dist-info/licenses/LICENSE": "", "p-1.dist-info/licenses/NOTICE": ""}
PAGE = {release_check.PAGE_FILE: "<html>"}


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("keepleft-1.whl", PAGE, "has no LICENSE"),
        ("keepleft-1.whl", LICENSES, "the explorer's page was not built"),
        ("keepleft-1.whl", LICENSES | PAGE | {"tests/a.py": ""}, "more than one package"),
        ("keepleft_translator-1.whl", {"p-1.dist-info/licenses/LICENSE": ""}, "has no NOTICE"),
        ("keepleft_translator-1.whl", LICENSES | {"p/model": "x" * 2000}, "bytes, more than 1,000"),
    ],
)
def test_a_wheel_that_lacks_something_or_is_too_large_is_refused(name, files, message, tmp_path, monkeypatch):
    monkeypatch.setattr(release_check, "MAX_TRANSLATOR_BYTES", 1_000)
    with pytest.raises(ReleaseError, match=message):
        check_contents(write_wheel(tmp_path / name, files))


def test_complete_wheels_pass(tmp_path):
    check_contents(write_wheel(tmp_path / "keepleft-1.whl", LICENSES | PAGE))
    check_contents(write_wheel(tmp_path / "keepleft_translator-1.whl", LICENSES | {"p/model": "x"}))


def test_a_command_that_fails_is_an_error_with_its_output():
    import sys

    with pytest.raises(ReleaseError, match="exited with 3: it broke"):
        release_check.run([sys.executable, "-c", "import sys; print('it broke'); sys.exit(3)"])


def test_the_weights_of_the_translator_fit():
    folder = ROOT / "translator" / "src"
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert size <= release_check.MAX_TRANSLATOR_BYTES


# -- the workflow


def test_the_workflow_checks_the_tag_before_it_publishes_what_was_checked():
    assert WORKFLOW[True]["push"] == {"tags": ["v*"]}  # YAML reads `on` as true
    jobs = WORKFLOW["jobs"]
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert any(command.startswith('make release-check TAG="$GITHUB_REF_NAME"') for command in commands)
    assert jobs["attest"]["needs"] == "build"
    assert jobs["publish"]["needs"] == "attest"
    packages = jobs["publish"]["strategy"]["matrix"]["package"]
    uploads = [
        step["with"]["name"] for step in jobs["build"]["steps"] if "upload-artifact" in step.get("uses", "")
    ]
    assert sorted(uploads) == sorted(packages)
    assert not any("make" in step.get("run", "") for step in jobs["publish"]["steps"])


def test_the_workflow_has_no_token_and_no_more_rights_than_it_needs():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    assert "secrets." not in text
    assert "password" not in re.sub(r"#.*", "", text)
    assert WORKFLOW["permissions"] == {}
    rights = {name: job["permissions"] for name, job in WORKFLOW["jobs"].items()}
    assert rights["build"] == {"contents": "read"}
    assert rights["publish"] == {"id-token": "write"}
    assert WORKFLOW["jobs"]["publish"]["environment"] == "pypi"


def test_the_workflows_install_the_pytorch_that_is_tested():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    version = re.search(r"^TORCH \?= (torch==\S+)$", makefile, re.M)
    assert version
    for name in ("release", "tests"):
        assert version[1] in (ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8")
