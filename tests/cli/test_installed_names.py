"""The name of an installed model works wherever a model is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

import keepleft as kl
from keepleft.cli import main, paths
from keepleft.data.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
TEXT = "the sea is calm and the sky is wide\n"
TINY = "--size tiny --recipe.steps 1 --device cpu --no-audit --batch.max-length 16 --batch.tokens 64".split()


@pytest.fixture
def installed(tmp_path, monkeypatch) -> Path:
    """A package that carries the weights `tiny-gpt`; the working directory has a text."""
    package = tmp_path / "packages" / "tiny_gpt_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no code of the package is run')\n")
    design = kl.presets.small(kl.presets.gpt2).but(vocab=300)
    model = kl.build(design, generator=torch.Generator().manual_seed(3))
    model.notes = {"bos_token_id": 1, "eos_token_id": 2}
    kl.save(model, train_tokenizer("bpe", [TEXT] * 9, 300, running_text=True), package / "model")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setitem(
        paths.WEIGHT_PACKAGES,
        "tiny-gpt",
        paths.WeightPackage("tiny-gpt", "tiny_gpt_weights", "model", "tiny", "MIT"),
    )
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT * 40)
    return package / "model"


def test_a_model_is_trained_further_by_its_name(installed):
    train = ["train", "--task", "lm", "--train", "text.txt", "--init-from", "tiny-gpt", "--out", "runs/a"]
    assert main([*train, *TINY]) == 0
    assert yaml.safe_load(Path("runs/a/config.yaml").read_text())["init_from"] == str(installed)
    assert kl.load("runs/a/model")[0].design.vocab == 300
    assert main([*train, "--resume"]) == 0  # named again, it is the same model


def test_a_tokenizer_is_taken_from_it_by_its_name(installed):
    train = [
        "train",
        "--task",
        "lm",
        "--train",
        "text.txt",
        "--tokenizer.path",
        "tiny-gpt",
        "--out",
        "runs/b",
    ]
    assert main([*train, *TINY, "--design.dim", "16", "--design.layers", "1"]) == 0
    vocabulary = kl.load(installed)[1].get_vocab()
    assert kl.load("runs/b/model")[1].get_vocab() == vocabulary


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "tiny-gpt", "--to", "hf", "--out", "out"],
        ["generate", "tiny-gpt", "the sea", "--max-new-tokens", "3", "--draft-model", "tiny-gpt"],
        ["score", "tiny-gpt", "the sea"],
        ["eval", "tiny-gpt", "text.txt", "--baseline", "tiny-gpt"],
        ["audit", "tiny-gpt", "--budget", "quick", "--checks", "future"],
        ["push", "tiny-gpt", "me/gpt", "--dry-run", "--no-audit"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_other_commands_find_it(arguments, installed, capsys):
    before = {path.name for path in installed.iterdir()}
    assert main(arguments) == 0, capsys.readouterr().err
    assert {path.name for path in installed.iterdir()} == before  # a package is not written to


def test_its_path_goes_by_the_name_that_it_is_installed_under(installed):
    assert paths.model_name(str(installed)) == "tiny-gpt"
    assert paths.model_name("tiny-gpt") == "tiny-gpt"
