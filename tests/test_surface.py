"""The public surface: flat, sorted, lazy, and importing no more than it must."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import keepleft as kl
from keepleft.cli import main


def python(code: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_public_name_exists_and_they_are_sorted():
    assert kl.__all__ == sorted(kl.__all__)
    for name in kl.__all__:
        assert getattr(kl, name) is not None
    assert set(kl.__all__) <= set(dir(kl))


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(kl.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed_names = {alias.name: node.module for node in block.body for alias in node.names}
    homes = {name: f"keepleft.{home}" for name, home in kl._NAMES.items()}
    assert typed_names == homes | {"presets": "keepleft.models"}


def test_an_unknown_name_is_an_error_that_names_it():
    with pytest.raises(AttributeError, match="keepleft has no 'atend'"):
        kl.atend  # noqa: B018


def test_importing_keepleft_imports_nothing_heavy():
    heavy = ("torch", "numpy", "tokenizers", "jsonargparse", "rich")
    assert python(f"import sys, keepleft; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


def test_help_does_not_import_torch():
    code = """
import sys
from keepleft.cli import main
assert main(["--help"]) == 0
assert main(["train", "--help-all"]) == 0
assert main(["generate", "--help"]) == 0
for module in ("torch", "numpy", "jsonargparse", "yaml"):
    assert module not in sys.modules, module
"""
    out = python(code)
    assert "demo" in out
    assert "doctor" in out


def test_the_core_rooms_need_torch_numpy_safetensors_and_tokenizers_alone():
    code = """
import importlib, pkgutil, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in "jsonargparse rich transformers gguf huggingface_hub yaml scipy".split():
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
import keepleft
rooms = "attention nn kernels models inference weights data demo.phrases training decoding evaluation disk"
for room in rooms.split():
    package = importlib.import_module("keepleft." + room)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""
    python(code)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "keepleft", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_demo_shows_masks_attentions_models_and_a_translator(tmp_path):
    ran = run("demo", "--steps", "12", "--out", str(tmp_path))
    assert ran.returncode == 1, ran.stderr  # twelve steps are not enough to learn French
    assert (tmp_path / "alignment.svg").exists()
    assert "held-out sentences" in ran.stdout
    for text in (
        "■ ■ ■",
        "masked self-attention",
        "124,439,808",
        "encoder-decoder",
        "1.0000   0.0000   0.0000",
    ):
        assert text in ran.stdout


@pytest.mark.long
def test_the_demo_translator_learns_to_translate(tmp_path):
    ran = run("demo", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stdout


def test_doctor_prints_json():
    ran = run("doctor", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["keepleft"] == kl.__version__
    lines = run("doctor").stdout.splitlines()
    assert any(line.startswith("torch ") for line in lines)
    models = json.loads(ran.stdout)["weights"]
    assert all(any(line[17:] == f"{name}: {path}" for line in lines) for name, path in models.items())


def test_usage_errors_exit_with_code_2():
    for arguments in (["dance"], ["demo", "--loud"], ["--loud"]):
        ran = run(*arguments)
        assert ran.returncode == 2, ran.stderr
        assert ran.stdout == ""


def test_the_version_is_printed():
    assert kl.__version__ in run("--version").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--steps", "3"], "there is no option --steps: did you mean --recipe.steps?"),
        (["train", "--task", "translat"], "--task is 'translat': did you mean translate?"),
        (["train", "--train.file", "x"], "there is no option --train.file: there are path, src"),
        (["train", "--recipe.steps", "many"], "--recipe.steps is 'many'"),
        (["--task", "lm"], "--task stands before a command: say what to do first"),
    ],
)
def test_usage_errors_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
