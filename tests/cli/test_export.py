"""keepleft export: what it prints, how it ends, and what it leaves alone."""

from __future__ import annotations

import json
import sys

import pytest
import torch

import keepleft as kl
from keepleft.cli import main
from keepleft.data.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
OUT = {"ctranslate2": "out", "onnx": "out.onnx", "hf": "out", "int8": "out", "gguf": "out.gguf"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small LLaMA with a tokenizer, saved."""
    path = tmp_path_factory.mktemp("models") / "llama"
    design = kl.presets.small(kl.presets.llama).but(vocab=300)
    model = kl.build(design, generator=torch.Generator().manual_seed(3))
    model.notes = {"bos_token_id": 1, "eos_token_id": 2}
    kl.save(model, train_tokenizer("bpe", ["the sea is calm"] * 9, 300, running_text=True), path)
    return path


@pytest.mark.parametrize("to", OUT)
def test_every_format_is_written_and_found_the_same(folder, tmp_path, capsys, to):
    assert (
        main(
            ["export", str(folder), "--to", to, "--out", str(tmp_path / OUT[to]), "--text", "the sea is calm"]
        )
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith(f"written      {tmp_path / OUT[to]} (")
    assert len(lines) > 1
    assert all(line.startswith("fine ") for line in lines[:-1]), lines
    assert [path.name for path in tmp_path.iterdir()] == [OUT[to]]


def test_json_says_the_same(folder, tmp_path, capsys):
    assert (
        main(
            [
                "export",
                str(folder),
                *"--to gguf --dtype f32 --out".split(),
                str(tmp_path / "x.gguf"),
                "--json",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert [check["ok"] for check in report["checks"]] == [True, True, True]
    assert report["out"] == str(tmp_path / "x.gguf")


def test_what_differs_ends_with_1_and_is_written_all_the_same(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("keepleft.runs.parity.TOLERANCE", {"f16": 0.0})
    assert main(["export", str(folder), "--to", "gguf", "--out", str(tmp_path / "x.gguf")]) == 1
    assert "DIFFERENT    scores, read back from f16" in capsys.readouterr().out
    assert (tmp_path / "x.gguf").exists()


def test_what_is_not_checked_is_said_once(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["export", str(folder), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    line = "not checked  scores, by transformers: transformers is not installed\n"
    assert line in capsys.readouterr().out


def test_no_verify_only_writes(folder, tmp_path, capsys):
    assert (
        main(["export", str(folder), "--to", "onnx", "--out", str(tmp_path / "x.onnx"), "--no-verify"]) == 0
    )
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_existing_files_stay_unless_forced(folder, tmp_path, capsys):
    (tmp_path / "x.gguf").write_text("mine")
    command = ["export", str(folder), "--to", "gguf", "--out", str(tmp_path / "x.gguf")]
    assert main(command) == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "x.gguf").read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert kl.load(tmp_path / "x.gguf")[0].design.vocab == 300


def test_a_design_that_no_one_knows_is_said_not_to_be_checked(tmp_path, capsys):
    kl.save(kl.build(kl.presets.small(kl.presets.gpt3_small)), None, tmp_path / "own")
    assert main(["export", str(tmp_path / "own"), "--to", "hf", "--out", str(tmp_path / "out")]) == 0
    assert "not checked  scores, by transformers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["--to", "gguf"], "say what to write and where"),
        (["--to", "ggfu", "--out", "x"], "did you mean gguf"),
        (["--to", "gguf", "--out", "x"], "ends in .gguf"),
        (["--to", "onnx", "--out", "x.onnx", "--dtype", "f16"], "--dtype f16 is GGUF's"),
        (["--to", "gguf", "--out", "x.gguf", "--quantization", "int8"], "CTranslate2's"),
        (["--to", "onnx", "--out", "things"], "is a folder"),
        (["--to", "hf", "--out", "note.txt"], "is a file"),
        (["--to", "hf", "--out", "things", "--force"], "a folder of other things"),
    ],
)
def test_usage_errors_are_one_line(folder, tmp_path, capsys, monkeypatch, wrong, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "things").mkdir()
    for path in (tmp_path / "note.txt", tmp_path / "things" / "photo"):
        path.write_text("mine")
    assert main(["export", str(folder), *wrong]) == 2
    captured = capsys.readouterr()
    assert why in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert {path.name for path in tmp_path.rglob("*")} == {"things", "note.txt", "photo"}


def test_a_model_is_never_written_over_itself(folder, capsys):
    for out in (folder, folder.parent):
        assert main(["export", str(folder), "--to", "hf", "--out", str(out), "--force"]) == 2
        assert "holds the model itself" in capsys.readouterr().err
    assert kl.load(folder)[1] is not None
