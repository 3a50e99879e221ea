"""Every file of a model directory must be a regular file of bounded size that lies in the directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

import keepleft as kl
from keepleft import causal
from keepleft.cli.audit_targets import from_config, from_directory, from_transformers
from keepleft.data.tokenizer import load_tokenizer
from keepleft.disk import regular_file, tokenizer_json
from keepleft.disk import safetensors as weight_files
from keepleft.pipelines.loading import load_for_inference
from keepleft.weights import model_directory

DESIGN = kl.presets.small(kl.presets.gpt2).but(
    vocab=7, dim=8, heads=2, decoder=kl.StackDesign(1, (causal,)), position=kl.LearnedPositions(11)
)
SHARD_BYTES = 300
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "source_tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
    "model-00001-of-{:05d}.safetensors",
)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory) -> Path:
    """A model directory with every kind of file."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = kl.build(DESIGN).eval()
    model.notes = {"model_type": "gpt2", "generation": {"eos_token_id": 1}, "chat_template": "{{ messages }}"}
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3}, "<unk>"))
    kl.save(model, tokenizer, folder, shard=SHARD_BYTES)
    shutil.copy(folder / "tokenizer.json", folder / "source_tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    return folder


@pytest.fixture
def folder(saved_model, tmp_path) -> Path:
    return shutil.copytree(saved_model, tmp_path / "downloaded")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))  # the path of a socket is limited to 108 bytes


def link_outside(path: Path) -> None:
    outside = path.parent.parent / "secret"
    path.rename(outside)  # even of the right content
    path.symlink_to(outside)


UNSAFE: dict[str, tuple[Callable[[Path], None], str]] = {
    "FIFO": (os.mkfifo, "is a FIFO (named pipe), not a regular file: put the file itself in its place"),
    "socket": (make_socket, "is a socket, not a regular file"),
    "device": (
        lambda path: path.symlink_to("/dev/zero"),
        "is a symbolic link out of its directory, to /dev/",
    ),
    "directory": (Path.mkdir, "is a directory, not a regular file"),
    "dangling link": (
        lambda path: path.symlink_to("gone"),
        "is a symbolic link to gone, which does not exist",
    ),
    "link outside": (link_outside, "is a symbolic link out of its directory, to"),
    "loop": (lambda path: path.symlink_to(path.name), "cannot be followed"),
}


@pytest.mark.parametrize("kind", UNSAFE)
@pytest.mark.parametrize("name", FILES)
def test_what_is_not_a_regular_file_of_the_directory_is_refused_by_name(name, kind, folder, monkeypatch):
    monkeypatch.chdir(folder)
    shards = len(list(folder.glob("model-*-of-*.safetensors")))
    path = folder / name.format(shards)
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink()  # it would be preferred
    make, message = UNSAFE[kind]
    if kind != "link outside":
        path.unlink()
    make(path)
    with pytest.raises(ValueError, match=re.escape(f"{path} {message}")):
        load_for_inference(str(folder))


def test_the_pooling_of_a_sentence_encoder_may_not_lie_elsewhere(tmp_path):
    design = kl.presets.small(kl.presets.bert).but(vocab=7, dim=8, heads=2, head=None)
    kl.save(kl.build(design), None, tmp_path / "model")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (tmp_path / "model" / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"1_Pooling/config.json is a symbolic link out of its directory"):
        kl.load(tmp_path / "model")


def test_links_within_the_directory_and_to_the_directory_are_followed(folder, tmp_path):
    (folder / "tokenizer.json").rename(folder / "words.json")
    (folder / "tokenizer.json").symlink_to("words.json")
    (tmp_path / "latest").symlink_to(folder)
    assert load_for_inference(str(tmp_path / "latest")).source_tokenizer is not None


@pytest.mark.parametrize("shared", [False, True])
def test_a_snapshot_of_a_hub_cache_loads_though_it_is_made_of_links(shared, folder, tmp_path):
    repository = tmp_path / "cache" / "models--some--body"
    snapshot = repository / "snapshots" / "0123abcd"
    blobs = repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (tmp_path / "cache" / "blobs" / "ab").mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        blob = blobs / f"{number:064x}"
        if shared:  # several repositories have the same file
            path.rename(tmp_path / "cache" / "blobs" / "ab" / blob.name)
            blob.symlink_to(f"../../blobs/ab/{blob.name}")
        else:
            path.rename(blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob.name}")
    assert load_for_inference(str(snapshot)).model.notes["chat_template"] == "{{ messages }}"
    (snapshot / "config.json").unlink()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("{}")
    (snapshot / "config.json").symlink_to("../../refs/main")  # neither a blob nor in the snapshot
    with pytest.raises(ValueError, match=r"config.json is a symbolic link out of its directory"):
        kl.load(snapshot)


def test_sizes_are_checked_before_anything_is_read(folder, monkeypatch):
    bounds = {
        "config.json": regular_file.MAX_JSON_BYTES,
        "generation_config.json": regular_file.MAX_JSON_BYTES,
        "model.safetensors.index.json": regular_file.MAX_JSON_BYTES,
        "tokenizer.json": tokenizer_json.MAX_TOKENIZER_BYTES,
        "chat_template.jinja": model_directory.MAX_CHAT_TEMPLATE_BYTES,
    }
    for name, max_bytes in bounds.items():
        path = folder / name
        content = path.read_bytes()
        os.truncate(path, max_bytes + 1)  # a hole: it takes no space
        with pytest.raises(
            ValueError, match=f"{name} has {max_bytes + 1:,} bytes, and at most {max_bytes:,}"
        ):
            kl.load(folder)
        path.write_bytes(content)
    (folder / "chat_template.jinja").unlink()
    template = "x" * (model_directory.MAX_CHAT_TEMPLATE_BYTES + 1)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(ValueError, match=r"the chat template in .*tokenizer_config.json has 1,048,577 char"):
        kl.load(folder)


def test_the_header_of_a_weight_file_is_bounded(folder):
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes((weight_files.MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
    os.truncate(shard, 1 << 30)
    with pytest.raises(ValueError, match="its header claims 100,000,001 bytes; 100,000,000 are allowed"):
        kl.load(folder)


def test_a_weight_file_that_shrinks_while_it_is_read_is_an_error(folder):
    file = weight_files.SafetensorsFile(folder, sorted(folder.glob("model-*.safetensors"))[0].name)
    os.truncate(file.path, file.data_start + 1)
    name = next(iter(file.header))
    with pytest.raises(ValueError, match="was cut short while it was read"):
        file.rows(name, 0, file.shape(name)[0])


def test_a_file_that_is_named_itself_may_be_a_link_but_not_a_pipe(folder, tmp_path):
    (tmp_path / "mine.json").symlink_to(folder / "tokenizer.json")
    assert load_tokenizer(tmp_path / "mine.json").get_vocab_size() == 4
    for name in ("pipe.json", "pipe.gguf"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=r"pipe.json is a FIFO"):
        load_tokenizer(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match=r"pipe.gguf is a FIFO"):
        kl.load(tmp_path / "pipe.gguf")
    with pytest.raises(ValueError, match=r"pipe.json is a FIFO"):
        from_config(str(tmp_path / "pipe.json"), None)


def test_an_audit_opens_no_unsafe_file_either(folder):
    link_outside(folder / "config.json")
    for audit in (lambda: from_directory(str(folder)), lambda: from_transformers(str(folder), None)):
        with pytest.raises(ValueError, match=r"config.json is a symbolic link out of its directory"):
            audit()


def test_a_loaded_model_computes_what_was_saved(folder, saved_model):
    tokens = torch.tensor([[3, 4, 5]])
    assert torch.equal(kl.load(folder)[0](tokens), kl.load(saved_model)[0](tokens))
