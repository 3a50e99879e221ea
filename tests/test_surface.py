"""The public surface: flat, sorted, lazy, and no wider in what it imports than it must be."""

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
    ran = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_every_public_name_is_there_and_sorted():
    assert kl.__all__ == sorted(kl.__all__)
    for name in kl.__all__:
        assert getattr(kl, name) is not None
    assert set(kl.__all__) <= set(dir(kl))


def test_type_checkers_are_told_the_same_names():
    tree = ast.parse(Path(kl.__file__).read_text("utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    told = {alias.name: node.module for node in block.body for alias in node.names}
    homes = {name: f"keepleft.{home}" for name, home in kl._NAMES.items()}
    assert told == homes | {"presets": "keepleft.models"}


def test_an_unknown_name_is_refused_in_words():
    with pytest.raises(AttributeError, match="keepleft has no 'atend'"):
        kl.atend  # noqa: B018


def test_importing_keepleft_imports_nothing_heavy():
    heavy = ("torch", "numpy", "tokenizers", "jsonargparse", "rich")
    assert python(f"import sys, keepleft; print([m for m in {heavy} if m in sys.modules])").strip() == "[]"


def test_help_does_not_wait_for_torch():
    code = """
import sys
from keepleft.cli import main
try:
    main(["--help"])
except SystemExit as stop:
    assert stop.code == 0
assert "torch" not in sys.modules
"""
    out = python(code)
    assert "demo" in out
    assert "doctor" in out


def test_the_core_rooms_need_torch_numpy_safetensors_and_tokenizers_alone():
    code = """
import importlib, pkgutil, sys
class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jsonargparse", "rich", "transformers", "gguf", "huggingface_hub", "yaml", "scipy"):
            raise ImportError(name + " is closed")
sys.meta_path.insert(0, Closed())
import keepleft
for room in ("attention", "nn", "kernels", "models", "inference", "weights", "data", "demo.phrases", "training", "decoding", "evaluation",
             "disk"):
    package = importlib.import_module("keepleft." + room)
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(found.name)
"""
    python(code)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "keepleft", *arguments], capture_output=True, text=True, timeout=600,
                          check=False)


def test_the_demo_shows_masks_attentions_models_and_a_translator(tmp_path):
    ran = run("demo", "--steps", "12", "--out", str(tmp_path))
    assert ran.returncode == 1, ran.stderr  # twelve steps teach nobody French
    assert (tmp_path / "alignment.svg").exists()
    assert "held-out sentences" in ran.stdout
    for said in ("■ ■ ■", "masked self-attention", "124,439,808", "encoder-decoder", "1.0000   0.0000   0.0000"):
        assert said in ran.stdout


@pytest.mark.long
def test_the_translator_of_the_demo_learns_its_lesson(tmp_path):
    ran = run("demo", "--out", str(tmp_path))
    assert ran.returncode == 0, ran.stdout


def test_the_doctor_speaks_json():
    ran = run("doctor", "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["keepleft"] == kl.__version__
    assert "torch" in run("doctor").stdout


def test_wrong_use_ends_with_code_2():
    for arguments in (["dance"], ["demo", "--loud"], []):
        ran = run(*arguments)
        assert ran.returncode == 2, ran.stderr
        assert ran.stdout == ""


def test_the_version_is_told():
    assert kl.__version__ in run("--version").stdout


@pytest.mark.parametrize(("arguments", "said"), [
    (["train", "--steps", "3"], "there is no option --steps: did you mean --recipe.steps?"),
    (["train", "--task", "translat"], "--task is 'translat': did you mean translate?"),
    (["train", "--train.file", "x"], "there is no option --train.file: there are path, src"),
    (["train", "--recipe.steps", "many"], "--recipe.steps is 'many'"),
    ([], "say what to do"),
])
def test_wrong_use_is_told_in_a_line(arguments, said, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
