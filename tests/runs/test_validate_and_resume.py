"""A run that cannot start, or cannot resume, is refused before any work, and leaves nothing behind."""

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
from keepleft.disk import fingerprint
from keepleft.runs import job as jobs
from keepleft.runs.plan import TrainingPlan
from keepleft.runs.train import run_job

TINY = "--size tiny --recipe.steps 3 --design.dim 32 --design.layers 1 --device cpu".split()
TINY_JOB = jobs.TrainJob(
    task="lm",
    train="a.txt",
    size="tiny",
    out="runs/lm",
    device="cpu",
    design={"dim": 32, "layers": 1},
    recipe=jobs.RecipeOverrides(steps=3),
)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory) -> Path:
    """A folder with a text, and a run that was stopped after its first step."""
    folder = tmp_path_factory.mktemp("stopped")
    lines = [french for _, french in split("fr", test=100)[0][:300]]
    (folder / "a.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    with contextlib.chdir(folder):
        list(run_job(TINY_JOB, stop=lambda: True))
    return folder


@pytest.fixture
def data_folder(stopped_run, tmp_path, monkeypatch) -> Path:
    """A folder with the text alone, which becomes the working directory."""
    shutil.copy(stopped_run / "a.txt", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_folder(stopped_run, data_folder) -> Path:
    """A copy of the stopped run."""
    shutil.copytree(stopped_run / "runs", data_folder / "runs")
    return data_folder / "runs" / "lm"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--recipe.steps", "0"], "--recipe.steps is 0"),
        (["--preset", "gpt5"], "did you mean gpt"),
        (["--init-from", "nowhere"], "nowhere"),
        (["--design.dims", "3"], "there is no option --design.dims: did you mean --design.dim?"),
        (["--batch.tokens", "-4"], "batch.tokens is -4"),
        (["--tokenizer.path", "nowhere"], "there is no tokenizer nowhere"),
        (["--recipe.metric", "bleu"], "the metric 'bleu' is not measured"),
        (["--minutes", "0"], "minutes is 0.0: it must be a number above 0"),
        (["--minutes", "3"], "--minutes chooses the number of steps, and --recipe.steps is 3: give one"),
        (["--tensorboard"], "pip install 'keepleft[board]'"),
        (["--device", "toaster"], "--device is 'toaster', which PyTorch"),
        (["--device", "gpu"], "--device is 'gpu': did you mean cuda?"),
        pytest.param(
            ["--device", "cuda"],
            "--device is 'cuda', which PyTorch",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_a_wrong_option_is_named_before_any_data_is_read(flags, message, data_folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main(["train", "--task", "lm", "--train", "a.txt", *TINY, *flags]) == 2
    stderr = capsys.readouterr().err
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not (data_folder / "runs").exists()


def test_a_start_that_fails_late_removes_only_what_it_created(data_folder, capsys):
    too_long = ["train", "--task", "lm", "--train", "a.txt", *TINY, "--batch.max-length", "100000"]
    assert main(too_long) == 2
    assert (
        "fewer than one window of 100000 and the token after it: give more text, or a smaller --batch."
        in (capsys.readouterr().err)
    )
    assert [path.name for path in data_folder.iterdir()] == ["a.txt"]
    (data_folder / "mine").mkdir()
    (data_folder / "mine" / "notes").write_text("mine")
    assert main([*too_long, "--out", "mine"]) == 2
    assert (data_folder / "mine" / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        (["--size", "small"], "size was 'tiny' and is 'small'"),  # a default that is given is a choice, too
        (["--tokenizer.kind", "char"], "tokenizer.kind was 'bpe' and is 'char'"),
        (["--recipe.lr", "0.01"], "recipe.lr was 0.002 and is 0.01"),
        (["--batch.tokens", "77"], "batch.tokens was 2048 and is 77"),
        (["--train", "b.txt"], "train was 'a.txt' and is 'b.txt'"),
        (["--design.layers", "3"], "design.layers was 1 and is 3"),
        (["--design.heads", "3"], "design.heads was 1 and is 3"),
        (["--preset", "llama3"], "preset was not given and is 'llama3'"),
    ],
)
def test_a_changed_option_is_named_with_both_values(flags, change, run_folder, capsys):
    capsys.readouterr()
    assert main(["train", "--out", str(run_folder), "--resume", *flags]) == 2
    remedy = "Change it back, or start a new run with another --out\n"  # there is no model yet to start from
    assert f"has changed: {change}. {remedy}" in capsys.readouterr().err


def test_options_that_are_the_same_or_may_change_are_accepted(run_folder, capsys):
    same = "--task lm --train a.txt --size tiny --design.dim 32 --recipe.lr 0.002 --batch.tokens 2048".split()
    same += ["--tokenizer.kind", "bpe"]
    assert main(["train", "--resume", *same, "--recipe.log-every", "1"]) == 0
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    assert "finished already" not in capsys.readouterr().err
    assert main(["train", "--resume", "--task", "lm"]) == 0
    assert "this run was finished already" in capsys.readouterr().err
    assert main(["train", "--resume", "--task", "lm", "--size", "base"]) == 2
    assert "--init-from runs/lm/model" in capsys.readouterr().err


def test_a_data_file_that_has_changed_is_named_even_if_its_size_has_not(run_folder, data_folder, capsys):
    text = (data_folder / "a.txt").read_bytes()
    resume = ["train", "--out", str(run_folder), "--resume"]
    began = f"a.txt has changed since the run in {run_folder} began"
    for changed, difference in (
        (text + b"more\n", f"it had {len(text):,} bytes and has {len(text) + 5:,}"),
        (text[:-2] + b"?\n", "its content differs"),
    ):
        (data_folder / "a.txt").write_bytes(changed)
        capsys.readouterr()
        assert main(resume) == 2
        remedy = "bring the old file back, or start a new run with another --out"
        assert f"{began} ({difference}): {remedy}\n" in capsys.readouterr().err
    (data_folder / "a.txt").write_bytes(text)
    store = run_folder / "data" / "train" / "text.tokens"
    tokens = store.read_bytes()
    store.write_bytes(tokens[:-1] + bytes([tokens[-1] ^ 1]))
    assert main(resume) == 2
    assert "text.tokens has changed since the run" in capsys.readouterr().err
    store.write_bytes(tokens)
    (data_folder / "a.txt").unlink()  # it is in the token store
    assert main(resume) == 0
    assert "a.txt is gone; going on with" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_says_so_and_starts_from_the_first_step(run_folder, capsys):
    shutil.rmtree(run_folder / "checkpoints")
    assert main(["train", "--out", str(run_folder), "--resume"]) == 0
    assert "checkpoints holds no checkpoint yet: starting from the first step" in capsys.readouterr().err
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines][-1] == 3


def test_a_run_that_was_never_prepared_says_so_and_starts(run_folder, data_folder, capsys):
    (run_folder / "resolved.json").unlink()
    shutil.rmtree(run_folder / "checkpoints")
    assert main(["train", "--out", str(run_folder), "--resume"]) == 0
    expected = (
        f"the data of the run in {run_folder} were not prepared to the end: starting from the beginning"
    )
    assert expected in capsys.readouterr().err
    assert main(["train", "--task", "lm", "--train", "a.txt", *TINY, "--out", "runs/new", "--resume"]) == 0
    assert "there is no run in runs/new to resume yet: starting one" in capsys.readouterr().err


def test_data_that_change_while_they_are_read_are_named(data_folder):
    def append(description: str, done: int, total: int | None) -> None:
        if description == "tokenizing":
            with (data_folder / "a.txt").open("a") as file:
                file.write("more\n")

    with pytest.raises(ValueError, match=r"a.txt has changed while it was read: start again once nothing"):
        list(run_job(TINY_JOB, on_progress=append))


def test_the_fingerprint_of_a_large_file_sees_its_size_both_ends_and_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "MAX_BLOCKS", 4)
    path = tmp_path / "large"
    size = 9 * fingerprint.BLOCK_BYTES + 5
    content = bytearray(size)
    path.write_bytes(content)
    before = fingerprint.fingerprint(path)
    assert before.startswith(f"{size}:")
    for offset in (0, size // 3 // fingerprint.BLOCK_BYTES * fingerprint.BLOCK_BYTES, size - 1):
        content[offset] = 1
        path.write_bytes(content)
        assert fingerprint.fingerprint(path) != before
        content[offset] = 0
    path.write_bytes(content[:-1])
    assert fingerprint.fingerprint(path) != before


def test_a_run_is_found_by_its_folder_or_its_task(run_folder, capsys):
    capsys.readouterr()
    assert main(["train", "--resume"]) == 2
    assert "--out DIR, or --task for the one in runs/TASK; there are runs/lm" in capsys.readouterr().err
    assert main(["train", "--resume", "--task", "mlm"]) == 2
    assert "no run to resume in runs/mlm" in capsys.readouterr().err


def test_a_run_reports_its_data_and_what_it_holds_out(data_folder):
    def log_of(job):
        events = list(run_job(job))
        lines = [event for event in events if isinstance(event, str)]
        return lines + [line for event in events if isinstance(event, TrainingPlan) for line in event.lines()]

    running_text = replace(TINY_JOB, out="runs/1", recipe=jobs.RecipeOverrides(steps=1))
    log = log_of(running_text)
    assert log[0].startswith("a.txt: a running text of 300 lines, ")
    assert any("tokens of running text held out" in line and "so few are rough" in line for line in log)
    assert any(" 1 step of about" in line for line in log)
    assert not any("record" in line for line in log)
    assert (data_folder / "runs" / "1" / "loss.svg").exists()  # a single report is a dot
    lines = (data_folder / "a.txt").read_text("utf-8").splitlines()
    (data_folder / "b.txt").write_text("".join(f"{line}\n\n" for line in lines), "utf-8")
    config = jobs.TokenizerConfig(documents=True)
    documents = replace(running_text, train="b.txt", out="runs/2", tokenizer=config)
    log = log_of(documents)
    assert "data         294 records" in log
    assert "validation   6 records held out; metrics on so few are rough (--valid takes more)" in log
    assert "validation   300 records" in log_of(replace(documents, valid="b.txt", out="runs/3"))
