"""A run that cannot begin, or cannot go on, says so before any work, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keepleft.cli import main
from keepleft.demo.phrases.corpus import split
from keepleft.runs import job as jobs
from keepleft.runs.train import run_job

FEW = [
    "--size",
    "tiny",
    "--recipe.steps",
    "3",
    "--design.dim",
    "32",
    "--design.layers",
    "1",
    "--device",
    "cpu",
]
PLAIN = jobs.TrainJob(
    task="lm",
    train="a.txt",
    size="tiny",
    out="runs/lm",
    device="cpu",
    design={"dim": 32, "layers": 1},
    recipe=jobs.RecipeOverrides(steps=3),
)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A text, and a run that was stopped after its first step."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "a.txt").write_text(
        "".join(f"{french}\n" for _, french in split("fr", test=100)[0][:300]), "utf-8"
    )
    with contextlib.chdir(folder):
        list(run_job(PLAIN, stop=lambda: True))
    return folder


@pytest.fixture
def place(stopped, tmp_path, monkeypatch) -> Path:
    """A folder with the text alone."""
    shutil.copy(stopped / "a.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def halted(stopped, place) -> Path:
    """A copy of the run."""
    shutil.copytree(stopped / "runs", place / "runs")
    return place / "runs" / "lm"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--recipe.steps", "0"], "recipe: steps is 0"),
        (["--preset", "gpt5"], "did you mean gpt"),
        (["--init-from", "nowhere"], "nowhere"),
        (["--design.dims", "3"], "a design has no dims"),
        (["--batch.tokens", "-4"], "batch.tokens is -4"),
        (["--tokenizer.path", "nowhere"], "there is no tokenizer nowhere"),
        (["--recipe.metric", "bleu"], "the metric 'bleu' is not measured"),
        (["--tensorboard"], "pip install 'keepleft[board]'"),
        (["--device", "toaster"], "the device 'toaster' was asked for"),
        pytest.param(
            ["--device", "cuda"],
            "the device 'cuda' was asked for",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_what_is_wrong_is_said_before_a_text_is_read(wrong, said, place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "--task", "lm", "--train", "a.txt", *FEW, *wrong]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not (place / "runs").exists()


def test_a_start_that_fails_late_leaves_nothing_that_was_not_there(place, capsys):
    late = ["train", "--task", "lm", "--train", "a.txt", *FEW, "--batch.max_length", "100000"]
    assert main(late) == 2
    assert "fewer than one window" in capsys.readouterr().err
    assert [path.name for path in place.iterdir()] == ["a.txt"]
    (place / "mine").mkdir()
    (place / "mine" / "notes").write_text("mine")
    assert main([*late, "--out", "mine"]) == 2
    assert (place / "mine" / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--size", "small"], "size was 'tiny' and is 'small'"),  # what is the default, too, was said
        (["--tokenizer.kind", "char"], "tokenizer.kind was 'bpe' and is 'char'"),
        (["--recipe.lr", "0.01"], "recipe.lr was 0.002 and is 0.01"),
        (["--batch.tokens", "77"], "batch.tokens was 2048 and is 77"),
        (["--train", "b.txt"], "train was 'a.txt' and is 'b.txt'"),
        (["--design.layers", "3"], "design.layers was 1 and is 3"),
        (["--design.heads", "3"], "design.heads was 1 and is 3"),
        (["--preset", "llama3"], "preset was not given and is 'llama3'"),
    ],
)
def test_a_run_that_has_changed_names_the_one_thing_and_both_values(given, said, halted, capsys):
    capsys.readouterr()
    assert main(["train", "--out", str(halted), "--resume", *given]) == 2
    err = capsys.readouterr().err
    assert (
        f"has changed: {said}. Change it back, or start a new run with another --out\n" in err
    )  # no model yet to start from


def test_what_is_said_again_as_it_was_or_may_change_is_taken(halted, capsys):
    again = [
        "--task",
        "lm",
        "--train",
        "a.txt",
        "--size",
        "tiny",
        "--design.dim",
        "32",
        "--recipe.lr",
        "0.002",
        "--batch.tokens",
        "2048",
        "--tokenizer.kind",
        "bpe",
    ]
    assert main(["train", "--resume", *again, "--recipe.log_every", "1"]) == 0
    assert [json.loads(line)["step"] for line in (halted / "metrics.jsonl").read_text().splitlines()] == [
        1,
        2,
        3,
    ]
    assert "finished already" not in capsys.readouterr().err
    assert main(["train", "--resume", "--task", "lm"]) == 0
    assert "this run was finished already" in capsys.readouterr().err
    assert main(["train", "--resume", "--task", "lm", "--size", "base"]) == 2
    assert "--init-from runs/lm/model" in capsys.readouterr().err


def test_a_run_is_found_by_its_folder_or_its_task(halted, capsys):
    capsys.readouterr()
    assert main(["train", "--resume"]) == 2
    assert "--out DIR, or --task for the one in runs/TASK; there are runs/lm" in capsys.readouterr().err
    assert main(["train", "--resume", "--task", "mlm"]) == 2
    assert "no run to go on with in runs/mlm" in capsys.readouterr().err


def test_a_run_says_what_it_is_measured_on(place):
    plain = replace(PLAIN, out="runs/1", recipe=jobs.RecipeOverrides(steps=1))
    said = [event for event in run_job(plain) if isinstance(event, str)]
    assert said[0].startswith("a.txt: a running text of 300 lines, ")
    assert any("tokens of running text held out" in line and "so few are rough" in line for line in said)
    assert any(" 1 step of about" in line for line in said)
    assert not any("record" in line for line in said)
    assert (place / "runs" / "1" / "loss.svg").exists()  # a single report is a dot
    (place / "b.txt").write_text(
        "".join(f"{line}\n\n" for line in (place / "a.txt").read_text("utf-8").splitlines()), "utf-8"
    )
    parts = replace(plain, train="b.txt", out="runs/2", tokenizer=jobs.TokenizerConfig(documents=True))
    said = [event for event in run_job(parts) if isinstance(event, str)]
    assert any(
        line.startswith("validation: 6 records held out, 294 are left to train on; metrics")
        for line in said
    )
    given = replace(parts, valid="b.txt", out="runs/3")
    assert "validation: 300 records" in [event for event in run_job(given) if isinstance(event, str)]
