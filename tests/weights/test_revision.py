"""A revision pins a model of the hub; a run records the commit and goes on with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import keepleft as kl
from keepleft import causal
from keepleft.cli import main
from keepleft.data.tokenizer import train_tokenizer
from keepleft.runs.job import BatchConfig, RecipeOverrides, TrainJob
from keepleft.runs.train import run_job

COMMITS = {"main": "c" * 40, "v1": "a" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch) -> list[str | None]:
    """A stand-in for the hub with one model in two revisions; the list fills with those asked for."""
    repository = tmp_path / "cache" / "models--some--body"
    for commit in COMMITS.values():
        tokenizer = train_tokenizer("char", ["abc "], 20, running_text=True)
        design = kl.presets.small(kl.presets.gpt2).but(
            vocab=20, dim=8, heads=2, decoder=kl.StackDesign(1, (causal,)), position=kl.LearnedPositions(64)
        )
        model = kl.build(design)
        model.notes = {"eos_token_id": 2}
        kl.save(model, tokenizer, repository / "snapshots" / commit)
    requested: list[str | None] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert name == "some/body"
        requested.append(revision)
        commit = COMMITS.get(revision or "main", revision)
        folder = repository / "snapshots" / str(commit)
        if not folder.exists():
            raise LookupError(f"404 Client Error.\n\nrevision {revision} not found.\nPlease look")
        return str(folder)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return requested


def test_a_revision_is_handed_to_the_hub(hub):
    kl.load("some/body")
    kl.load("some/body", revision="v1")
    kl.load("some/body@v1")
    assert hub == [None, "v1", "v1"]
    with pytest.raises(
        FileNotFoundError, match=r"no model of that name and revision 'v2': revision v2 not found\.$"
    ):
        kl.load("some/body@v2")
    with pytest.raises(ValueError, match="names the revision 'v1', and 'main' was asked for: give one"):
        kl.load("some/body@v1", revision="main")


def test_a_revision_of_a_model_on_this_machine_is_an_error(hub, tmp_path):
    folder = tmp_path / "cache" / "models--some--body" / "snapshots" / COMMITS["v1"]
    with pytest.raises(ValueError, match="is on this machine: a revision belongs to a name on the hub"):
        kl.load(folder, revision="v1")


@pytest.mark.parametrize(
    "command",
    [
        ["generate", "some/body", "a", "--max-new-tokens", "1"],
        ["score", "some/body", "abc"],
        ["eval", "some/body", "text.txt"],
        ["export", "some/body", "--to", "hf", "--out", "out", "--no-verify", "--force"],
        ["audit", "some/body", "--budget", "quick", "--checks", "future"],
    ],
)
def test_commands_take_a_revision(command, hub, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("abc abc abc\n" * 20)
    assert main([*command, "--revision", "v1"]) in (0, 1)
    assert set(hub) == {"v1"}
    capsys.readouterr()
    assert main([*command, "--revision", "nothing"]) == 2
    assert "revision 'nothing'" in capsys.readouterr().err


def test_a_run_records_the_commit_and_resumes_from_it(hub, tmp_path):
    (tmp_path / "text.txt").write_text("abc cab bca abc\n" * 200)
    job = TrainJob(
        task="lm",
        train="text.txt",
        out="runs/lm",
        device="cpu",
        audit=False,
        init_from="some/body",
        batch=BatchConfig(max_length=64),
        recipe=RecipeOverrides(steps=2),
    )
    list(run_job(job, stop=lambda: True))
    resolved = json.loads(Path("runs/lm/resolved.json").read_text())
    assert resolved["init_from"] == f"some/body@{COMMITS['main']}"
    assert "init_from: some/body\n" in Path("runs/lm/config.yaml").read_text()  # as it was given
    hub.clear()
    list(run_job(job, resume=True))
    assert COMMITS["main"] in hub
    assert (tmp_path / "runs" / "lm" / "model" / "config.json").exists()


def test_a_revision_without_a_model_is_an_error(hub, tmp_path, capsys):
    assert main(["train", "--task", "lm", "--train", "text.txt", "--revision", "v1"]) == 2
    assert "--revision is 'v1', of which model? Name it with --init-from" in capsys.readouterr().err
