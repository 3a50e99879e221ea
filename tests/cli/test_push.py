"""keepleft push: what goes to the hub, what stays here, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import keepleft as kl
from fake_hub import COMMIT, TOKEN, FakeHub, fake_hub
from keepleft.cli import main
from keepleft.data.tokenizer import train_tokenizer
from keepleft.runs.model_card import read_metadata
from keepleft.runs.push import list_files, push

pytestmark = pytest.mark.usefixtures("one_thread")
MODEL_FILES = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "gpt"
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(vocab=300), generator=torch.Generator().manual_seed(3)
    )
    kl.save(model, train_tokenizer("bpe", ["the sea is calm"] * 9, 300, running_text=True), folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path, monkeypatch) -> Path:
    """A model directory among files that are nobody's business."""
    shutil.copytree(saved, tmp_path / "gpt")
    for name in (
        "pytorch_model.bin",
        "optimizer.pt",
        "notes.txt",
        ".env",
        "checkpoints/step-1/tensors.safetensors",
    ):
        path = tmp_path / "gpt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"secret")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return Path("gpt")


class StandInClient:
    """Remembers what it was asked."""

    def __init__(self, private: bool = False) -> None:
        self.private = private
        self.calls: list[str] = []
        self.files: dict[str, object] = {}
        self.message = ""

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(f"create {repo_id} {private} {exist_ok}")

    def repo_info(self, repo_id):
        return SimpleNamespace(private=self.private)

    def create_branch(self, repo_id, *, branch, exist_ok):
        self.calls.append(f"branch {branch}")

    def create_commit(self, repo_id, operations, *, commit_message, revision):
        self.calls.append(f"commit {revision}")
        self.files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
        self.message = commit_message
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


def test_a_dry_run_writes_the_card_and_lists_what_would_go(folder, capsys):
    assert main(["push", "gpt", "me/gpt", "--dry-run", "--license", "mit", "--language", "en,fr"]) == 0
    captured = capsys.readouterr()
    listed = {line.split()[1] for line in captured.out.splitlines()[:-1]}
    assert listed == MODEL_FILES | {"README.md"}
    assert captured.out.splitlines()[-1].endswith(" bytes in 4 files would go to me/gpt")
    assert "left out: .env, checkpoints/step-1/tensors.safetensors, notes.txt, optimizer.pt" in captured.err
    card = (folder / "README.md").read_text("utf-8")
    assert read_metadata(card)["license"] == "mit"
    assert read_metadata(card)["language"] == ["en", "fr"]
    assert "These weights were audited" in card
    assert 'kl.load("me/gpt")' in card


def test_only_files_of_the_model_are_pushed_in_one_commit(folder):
    files, left_out = list_files(folder)
    assert {file.name for file in files} == MODEL_FILES
    assert len(left_out) == 5
    client = StandInClient()
    url = push(files, "card", "me/gpt", message="First", client=client)
    assert url == "https://hub/me/gpt/commit/1"
    assert client.calls == ["create me/gpt None True", "commit None"]
    assert client.files.keys() == MODEL_FILES | {"README.md"}
    assert client.files["README.md"] == b"card"
    assert client.message == "First"


def test_a_private_push_to_a_public_repository_is_refused(folder):
    files, _ = list_files(folder)
    client = StandInClient(private=False)
    with pytest.raises(ValueError, match="me/gpt is public, and --private was given"):
        push(files, "card", "me/gpt", private=True, client=client)
    assert client.calls == ["create me/gpt True True"]
    private_client = StandInClient(private=True)
    push(files, "card", "me/gpt", private=True, revision="v2", client=private_client)
    assert private_client.calls == ["create me/gpt True True", "branch v2", "commit v2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt", "gpt"], "the repository is 'gpt': give OWNER/NAME"),
        (["gpt", "me/a--b"], "the repository is 'me/a--b'"),
        (["gpt", "me/gpt", "--license", "Apache 2.0"], "--license is 'Apache 2.0': give a name of the hub"),
        (["gpt", "me/gpt", "--language", "English"], "--language is 'English': give ISO codes"),
        (["nowhere", "me/gpt"], "there is no model directory nowhere"),
        ([".", "me/gpt"], "is not a model directory: config.json is missing"),
        (["gpt", "me/gpt", "--card", "own.md", "--license", "mit"], "own.md is a card of your own"),
        (["gpt", "me/gpt"], "the hub asks who you are: run `hf auth login` once, or set HF_TOKEN"),
    ],
)
def test_what_cannot_be_pushed_is_named(arguments, message, folder, capsys):
    Path("own.md").write_text("# Mine\n")
    assert main(["push", *arguments, "--no-audit"]) == 2
    assert message in capsys.readouterr().err


def test_a_run_folder_is_not_its_model(folder, capsys):
    folder.rename("model")
    assert main(["push", ".", "me/gpt", "--dry-run"]) == 2
    assert "is not a model directory: did you mean model?" in capsys.readouterr().err


def test_a_link_out_of_the_directory_is_refused(folder, capsys):
    Path("secret.json").write_text("{}")
    (folder / "vocab.json").symlink_to(Path("secret.json").resolve())
    assert main(["push", "gpt", "me/gpt", "--dry-run", "--no-audit"]) == 2
    assert "is a symbolic link out of its directory" in capsys.readouterr().err


def test_a_card_of_ones_own_is_used_as_it_is(folder, capsys):
    Path("own.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    assert main(["push", "gpt", "me/gpt", "--dry-run", "--no-audit", "--card", "own.md"]) == 0
    captured = capsys.readouterr()
    assert "card: own.md, as it is" in captured.err
    assert "no licence" not in captured.err
    assert not (folder / "README.md").exists()
    (folder / "README.md").write_text("# Edited\n")
    assert main(["push", "gpt", "me/gpt", "--dry-run", "--no-audit"]) == 0
    assert f"card: {folder / 'README.md'}, as it is" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == "# Edited\n"


def test_a_model_that_leaks_is_not_pushed(folder, capsys, monkeypatch):
    def leaking_model(path):
        model = kl.build(kl.presets.small(kl.presets.gpt2), generator=torch.Generator().manual_seed(0))
        model.decoder.masks = (kl.full,)
        return model, None

    monkeypatch.setattr("keepleft.weights.model_directory.load", leaking_model)
    assert main(["push", "gpt", "me/gpt", "--dry-run"]) == 2
    assert "the model was not pushed, as it leaks (--no-audit pushes it)" in capsys.readouterr().err
    assert not (folder / "README.md").exists()


# -- the real client, with a hub on this machine


def push_to(hub: FakeHub, *arguments: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    environ = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "keepleft", "push", "gpt", "me/gpt", "--no-audit", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_the_hub_gets_the_files_byte_for_byte(folder):
    with fake_hub() as hub:
        options = ["--license", "mit", "--private", "--revision", "v2", "--message", "First"]
        ran = push_to(hub, *options)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout == f"{hub.url}/me/gpt/commit/{COMMIT}\n"
        assert hub.visibility == {"me/gpt": True}
        assert hub.branches == ["v2"]
        assert [commit["summary"] for commit in hub.commits] == ["First"]
        assert hub.files.keys() == MODEL_FILES | {"README.md"}
        for name, content in hub.files.items():
            assert content == (folder / name).read_bytes()
        hub.visibility["me/gpt"] = False
        ran = push_to(hub, *options)
        assert ran.returncode == 2
        assert "me/gpt is public, and --private was given" in ran.stderr
        assert len(hub.commits) == 1


@pytest.mark.slow
def test_what_the_hub_refuses_is_passed_on(folder):
    with fake_hub() as hub:
        ran = push_to(hub, "--license", "nonsense")
        assert ran.returncode == 2
        assert '"license" must be one of' in ran.stderr
        ran = push_to(hub, token="hf_wrong")
        assert ran.returncode == 2
        assert "401" in ran.stderr
        assert "Traceback" not in ran.stderr
        assert not hub.commits
