"""A checkpoint is undamaged or refused by name; a failure while one is written harms no other."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepleft.disk import atomic
from keepleft.training import checkpoint

TENSORS = {
    "weights/a": torch.arange(12.0).view(3, 4),
    "step/a": torch.tensor(5.0),
    "weights/b": torch.zeros(0, 3),
    "exp_avg/b": torch.ones(7, dtype=torch.bfloat16),
}
STATE = {"step": 4, "best": 1e-05, "place": [0, 3], "recipe": {"lr": 3e-4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two checkpoints; a test that damages the newer one restores it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (2, 4):
        checkpoint.save(folder, step, TENSORS, STATE)
    return folder


def assert_damaged(folder: Path, message: str = "") -> None:
    """The newer checkpoint is refused with what is wrong, and the older one is used."""
    with pytest.raises(ValueError, match=f"the checkpoint .*step-00000004 is damaged: .*{message}"):
        checkpoint.read_state(folder / "step-00000004")
    newest = checkpoint.latest(folder)
    assert newest is not None
    directory, _, errors = newest
    assert directory.name == "step-00000002"
    assert len(errors) == 1
    assert "step-00000004 is damaged" in errors[0]


def test_a_saved_checkpoint_loads(folder):
    directory, state, errors = checkpoint.latest(folder)
    assert directory.name == "step-00000004"
    assert errors == []
    assert {name: state[name] for name in STATE} == STATE
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in TENSORS.items()}
    checkpoint.load(directory, loaded, sharded=False, distributed=False)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())
    assert sorted(path.name for path in directory.iterdir()) == ["state.json", "tensors.safetensors"]


@given(
    st.sampled_from(["state.json", "tensors.safetensors"]),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 7),
)
@settings(max_examples=150)
def test_any_flipped_bit_is_noticed(folder, name, where, bit):
    path = folder / "step-00000004" / name
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    try:
        path.write_bytes(damaged)
        assert_damaged(folder)
    finally:
        path.write_bytes(content)


@given(st.sampled_from(["state.json", "tensors.safetensors"]), st.floats(0, 1, exclude_max=True))
@settings(max_examples=50)
def test_any_truncated_file_is_noticed(folder, name, where):
    path = folder / "step-00000004" / name
    content = path.read_bytes()
    try:
        path.write_bytes(content[: int(where * len(content))])
        assert_damaged(folder)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors"])
def test_a_missing_file_is_named(folder, name, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    (tmp_path / "x" / "step-00000004" / name).unlink()
    assert_damaged(tmp_path / "x", f"{name} is missing")


def test_a_file_that_does_not_belong_is_named(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    directory = tmp_path / "x" / "step-00000004"
    shutil.copy(directory / "tensors.safetensors", directory / "more.safetensors")
    assert_damaged(tmp_path / "x", "more.safetensors does not belong to it")


def test_a_state_that_names_a_file_elsewhere_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    path = tmp_path / "x" / "step-00000004" / "state.json"
    state = json.loads(path.read_bytes())["state"]
    state["files"]["../tensors.safetensors"] = state["files"].pop("tensors.safetensors")
    path.write_bytes(checkpoint._encode_state(state))
    assert_damaged(tmp_path / "x")


def test_if_all_are_damaged_that_is_an_error_and_not_a_fresh_start(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "x")
    for directory in checkpoint.list_checkpoints(tmp_path / "x"):
        (directory / "state.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no checkpoint below .* is whole: .*step-00000004.*step-00000002"):
        checkpoint.latest(tmp_path / "x")
    assert checkpoint.latest(tmp_path / "nothing") is None


@pytest.mark.parametrize("call", ["write_bytes", "sync", "checksum", "rename"])
def test_whatever_fails_while_writing_the_one_before_stays_and_nothing_is_left(call, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 2, TENSORS, STATE)

    def disk_full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path if call in ("write_bytes", "rename") else atomic, call, disk_full)
        message = r"step-00000004 could not be written \(No space left on device\): free some space"
        with pytest.raises(OSError, match=rf"the checkpoint .*{message}") as caught:
            checkpoint.save(tmp_path, 4, TENSORS, STATE)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]
    assert checkpoint.latest(tmp_path)[0].name == "step-00000002"
    assert checkpoint.save(tmp_path, 4, TENSORS, STATE).name == "step-00000004"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"the checkpoint .*file/step-00000004 could not be written"):
        checkpoint.save(tmp_path / "file", 4, TENSORS, STATE)


def test_prune_keeps_the_newest_and_the_best_and_removes_what_a_crash_left(tmp_path):
    for step in (1, 2, 3, 4, 5, 9):
        checkpoint.save(tmp_path, step, TENSORS, STATE)
    for name in ("step-00000003.part", "step-00000002.gone"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-notes").mkdir()
    checkpoint.prune(tmp_path, step=5, keep_last=2, best_step=1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step-00000001", "step-00000004", "step-00000005", "step-notes"]


def test_saving_a_step_again_replaces_the_checkpoint(tmp_path):
    checkpoint.save(tmp_path, 4, TENSORS, STATE)
    checkpoint.save(tmp_path, 4, {"a": torch.ones(1)}, {"step": 5})
    assert checkpoint.latest(tmp_path)[1]["step"] == 5
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_checkpoints_are_sorted_by_number(tmp_path):
    for step in (99_999_999, 100_000_000, 7):
        checkpoint.save(tmp_path, step, {"a": torch.ones(1)}, {})
    names = [path.name for path in checkpoint.list_checkpoints(tmp_path)]
    assert names == ["step-100000000", "step-99999999", "step-00000007"]
