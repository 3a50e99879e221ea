"""Push a model to the Hugging Face hub: its files and its card in one commit, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from keepleft.disk.regular_file import resolve_file_in
from keepleft.disk.safetensors import CONFIG_FILE
from keepleft.runs.model_card import CARD_FILE

REPO_NAME = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
LICENSE_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
LANGUAGE_CODE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]+)*")
# what a model directory may hold; above all no pickles, which run code when they are loaded
PUSHED_FILES = (
    CONFIG_FILE,
    "*.safetensors",
    "*.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "source_tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.spm",
    "spiece.model",
    "tokenizer.model",
    "chat_template.jinja",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "LICENSE*",
    "NOTICE*",
)


@dataclass(frozen=True)
class ModelFile:
    """A file to push."""

    name: str  # in the repository
    path: Path
    size: int


class HubClient(Protocol):
    """What is needed of `huggingface_hub.HfApi`."""

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any: ...

    def repo_info(self, repo_id: str) -> Any: ...

    def create_branch(self, repo_id: str, *, branch: str, exist_ok: bool) -> Any: ...

    def create_commit(
        self, repo_id: str, operations: list[Any], *, commit_message: str, revision: str | None
    ) -> Any: ...


def check_options(repo: str, license: str | None, languages: Sequence[str]) -> None:
    """Raise ValueError for a name, licence or language that the hub would refuse."""
    if not REPO_NAME.fullmatch(repo) or ".." in repo or "--" in repo:
        raise ValueError(
            f"the repository is {repo!r}: give OWNER/NAME, with letters, digits, hyphens and dots, as in "
            "mine/en-fr"
        )
    if license is not None and not LICENSE_NAME.fullmatch(license):
        raise ValueError(
            f"--license is {license!r}: give a name of the hub, in small letters, as in apache-2.0, mit or "
            "cc-by-4.0"
        )
    for language in languages:
        if not LANGUAGE_CODE.fullmatch(language):
            raise ValueError(f"--language is {language!r}: give ISO codes with commas, as in en,fr")


def list_files(model: Path) -> tuple[list[ModelFile], list[str]]:
    """The files of a model to push, and the names of those in its directory that are left out.

    Raises ValueError if it is no model directory, or if a file is a link out of it.
    """
    if model.is_file():
        return [ModelFile(model.name, model, model.stat().st_size)], []
    if not (model / CONFIG_FILE).exists():
        subfolder = model / "model"
        hint = (
            f"did you mean {subfolder}?"
            if (subfolder / CONFIG_FILE).exists()
            else f"{CONFIG_FILE} is missing"
        )
        raise ValueError(f"{model} is not a model directory: {hint}")
    files: list[ModelFile] = []
    left_out: list[str] = []
    for path in sorted(model.rglob("*")):
        name = path.relative_to(model).as_posix()
        if path.is_dir() or name == CARD_FILE:
            continue
        is_known = any(fnmatchcase(name, pattern) for pattern in PUSHED_FILES)
        if name in PUSHED_FILES or (is_known and "/" not in name):
            resolved = resolve_file_in(model, name)
            files.append(ModelFile(name, resolved, resolved.stat().st_size))
        else:
            left_out.append(name)
    return files, left_out


def push(
    files: Sequence[ModelFile],
    card: str,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Push the model",
    client: HubClient | None = None,
) -> str:
    """Create the repository if it is not there, and commit files and card. Returns the URL of the commit.

    The token comes from the environment or from `hf auth login`. Raises ValueError if there is none, if the
    hub refuses the card, or if the repository is public where a private one is wanted; OSError if the hub
    cannot be reached or refuses.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError("pushing needs huggingface_hub: pip install 'keepleft[hub]'") from error
    if client is None:
        if huggingface_hub.get_token() is None:
            raise ValueError(
                "the hub asks who you are: run `hf auth login` once, or set HF_TOKEN to a token with write "
                "access"
            )
        client = huggingface_hub.HfApi()
    try:
        # a repository that is there keeps its visibility
        client.create_repo(repo, private=private or None, exist_ok=True)
        if private and not client.repo_info(repo).private:
            raise ValueError(
                f"{repo} is public, and --private was given: make it private on the hub, or give another name"
            )
        if revision is not None:
            client.create_branch(repo, branch=revision, exist_ok=True)
        contents: dict[str, bytes | Path] = {CARD_FILE: card.encode()}
        contents |= {file.name: file.path for file in files}
        operations = [
            huggingface_hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
            for name, content in contents.items()
        ]
        commit = client.create_commit(repo, operations, commit_message=message, revision=revision)
    except (ValueError, OSError):
        raise
    except Exception as error:  # of its HTTP client
        raise OSError(f"the hub did not take {repo}: {error}") from error
    return str(commit.commit_url)
