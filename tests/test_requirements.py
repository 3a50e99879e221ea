"""The locks cover what pyproject.toml asks for, with hashes; the bill of materials covers the locks."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from lock import LOCKS, OLDEST_PYTHON, OWN_EXTRAS, PROJECT, TORCH_PACKAGE, USER_EXTRAS
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from sbom import LockedPackage, bill_of_materials, read_lock

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NAMES = [lock.name for lock in LOCKS]


def lock_text(name: str) -> str:
    return (ROOT / "requirements" / f"{name}.lock").read_text("utf-8")


def pinned_versions(name: str) -> dict[str, set[str]]:
    """Package name → its versions in a lock; several, where they depend on the Python."""
    versions: dict[str, set[str]] = {}
    for package in read_lock(lock_text(name)):
        versions.setdefault(package.name, set()).add(package.version)
    return versions


def extra_requirements(extra: str) -> list[Requirement]:
    """The requirements of an extra, and of the extras of keepleft that it names."""
    requirements: list[Requirement] = []
    for requirement in map(Requirement, PROJECT["optional-dependencies"][extra]):
        if requirement.name == "keepleft":
            for other in requirement.extras:
                requirements += extra_requirements(other)
        else:
            requirements.append(requirement)
    return requirements


def assert_pins(name: str, requirements: list[Requirement]) -> None:
    versions = pinned_versions(name)
    for requirement in requirements:
        pinned = versions.get(canonicalize_name(requirement.name), set())
        assert pinned, f"requirements/{name}.lock lacks {requirement}: make lock"
        assert all(map(requirement.specifier.contains, pinned)), (
            f"{name}.lock holds {pinned}, not {requirement}: make lock"
        )


@pytest.mark.parametrize("lock", LOCKS, ids=NAMES)
def test_a_lock_pins_all_that_pyproject_asks_for(lock):
    if lock.group is not None:
        assert_pins(lock.name, list(map(Requirement, PYPROJECT["dependency-groups"][lock.group])))
        return
    requirements = list(map(Requirement, PROJECT["dependencies"]))
    for extra in lock.extras:
        requirements += extra_requirements(extra)
    is_torch_lock = lock.name == "torch"
    assert_pins(lock.name, [r for r in requirements if (r.name == "torch") == is_torch_lock])


def test_every_extra_and_every_group_has_a_lock():
    extras = {extra for lock in LOCKS for extra in lock.extras}
    assert extras | OWN_EXTRAS == PROJECT["optional-dependencies"].keys()
    assert {lock.group for lock in LOCKS} - {None} == PYPROJECT["dependency-groups"].keys()
    assert {path.stem for path in (ROOT / "requirements").glob("*.lock")} == set(NAMES)
    assert PROJECT["requires-python"] == f">={OLDEST_PYTHON}"


@pytest.mark.parametrize("name", NAMES)
def test_every_line_of_a_lock_is_a_pinned_package_a_hash_or_a_note(name):
    package = r"[a-z0-9-]+==[\w.+!-]+(?: ; [\w\s.'()<>=!]+)? \\"
    hash_or_note = r"    --hash=sha256:[0-9a-f]{64}(?: \\)?|    #.*"
    header, lines = lock_text(name).splitlines()[:2], lock_text(name).splitlines()[2:]
    assert all(line.startswith("# ") for line in header)
    assert f"Python {OLDEST_PYTHON} and newer" in header[1]
    for line in lines:
        assert re.fullmatch(f"{package}|{hash_or_note}", line), f"{name}.lock: {line}"
    for entry in read_lock(lock_text(name)):
        assert entry.hashes, f"{name}.lock: {entry.name} has no hash"
        assert entry.marker is None or Marker(entry.marker)


@pytest.mark.parametrize("name", NAMES)
def test_a_lock_names_no_host_no_path_and_no_option_of_pip(name):
    text = re.sub(r"--hash=sha256:|pyproject\.toml|requirements/\w+\.lock", "", lock_text(name))
    assert not re.search(
        r"://|@|--|file:|(?<![\w-])https?(?![\w-])|(?<!\w)/\w|\\\w|[\w-]+\.(?:org|com|io|net|dev)\b", text
    )


def test_locks_of_one_environment_agree():
    """`make` installs them one after another: what two of them hold is the same version in both."""
    tested = pinned_versions("test")
    for name in ("base", "build", "docs", "extras"):
        for package, versions in pinned_versions(name).items():
            assert versions == tested.get(package, versions), f"{name}.lock and test.lock: {package}"
    assert pinned_versions("base").keys() <= tested.keys()


def test_pytorch_is_in_its_own_lock_alone():
    for lock in LOCKS:
        torch_packages = {name for name in pinned_versions(lock.name) if TORCH_PACKAGE.fullmatch(name)}
        if lock.name == "torch":
            assert torch_packages == pinned_versions("torch").keys()
        else:
            assert not torch_packages, f"{lock.name}.lock"
    makefile = (ROOT / "Makefile").read_text("utf-8")
    version = re.search(r"^TORCH \?= torch==(\S+)$", makefile, re.M)
    assert version
    assert pinned_versions("torch")["torch"] == {version[1]}


def test_locks_hold_the_versions_of_the_constraints():
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    locked = {name: v for lock in ("test", "docs", "torch") for name, v in pinned_versions(lock).items()}
    for line in re.findall(r"^[^#\s].*$", constraints, re.M):
        name, _, version = line.partition("==")
        assert locked[canonicalize_name(name)] == {version}, f"constraints.txt pins {line}: make lock"


def test_make_installs_with_hashes_whatever_it_installs_but_pytorch():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert "--require-hashes" in makefile.partition("LOCKED :=")[2].partition("\n")[0]
    installs = re.findall(r"^\t@\$\(PIP\) (.+)$", makefile, re.M)
    others = [line for line in installs if not line.startswith("$(LOCKED) requirements/")]
    assert others == ["$(TORCH)", "--no-deps --no-build-isolation --editable . --editable ./translator"]
    tools = re.findall(r"^.*TOOLS.*-m pip install.*$", makefile, re.M)
    assert len(tools) == 1
    assert "--require-hashes" in tools[0]


def test_a_lock_is_read_with_versions_markers_hashes_and_parents():
    digest = "0123456789abcdef" * 4
    text = (
        "# a comment\n"
        f"alpha==1.0 ; python_full_version < '3.12' \\\n    --hash=sha256:{digest}\n    # via beta\n"
        f"beta==2.0 \\\n    --hash=sha256:{digest} \\\n    --hash=sha256:{digest[::-1]}\n"
        "    # via\n    #   alpha\n    #   keepleft (pyproject.toml)\n"
    )
    assert read_lock(text) == [
        LockedPackage("alpha", "1.0", "python_full_version < '3.12'", (digest,), ("beta",)),
        LockedPackage("beta", "2.0", None, (digest, digest[::-1]), ("alpha", "keepleft")),
    ]


def test_the_bill_of_materials_lists_every_package_once_and_connects_it_to_keepleft():
    bill = bill_of_materials()
    components = {component["bom-ref"]: component for component in bill["components"]}
    assert len(components) == len(bill["components"])
    names = {component["name"] for component in components.values()}
    assert pinned_versions("extras").keys() | pinned_versions("torch").keys() <= names
    assert {"preact", "d3-scale", "internmap"} <= names  # in the explorer's page
    assert not {"esbuild", "typescript", "pytest"} & names
    root = bill["metadata"]["component"]["bom-ref"]
    dependencies = {entry["ref"]: entry["dependsOn"] for entry in bill["dependencies"]}
    assert dependencies.keys() == components.keys() | {root}
    reached = {root}
    waiting = [root]
    while waiting:
        children = set(dependencies[waiting.pop()]) - reached
        reached |= children
        waiting += children
    assert reached == dependencies.keys(), f"nobody requires {dependencies.keys() - reached}"
    without_hashes = {c["name"] for c in components.values() if not c.get("hashes")}
    assert without_hashes == {"keepleft-translator"}  # it is built from this repository


def test_the_bill_of_materials_tells_required_packages_from_those_of_extras():
    bill = bill_of_materials()
    scopes = {component["name"]: component["scope"] for component in bill["components"]}
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert scopes[canonicalize_name(requirement.name)] == "required"
    assert scopes["sympy"] == "required"  # by torch
    for name in ("fastapi", "tensorboard", "onnx", "gguf"):
        assert scopes[name] == "optional"
    assert "board" in USER_EXTRAS
    assert json.dumps(bill) == json.dumps(bill_of_materials())


def test_actions_of_the_forge_are_pinned_by_commit():
    workflows = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    actions = [action for path in workflows for action in re.findall(r"uses: (.+)", path.read_text("utf-8"))]
    assert actions
    for action in actions:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", action), action
