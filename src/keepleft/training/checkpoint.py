"""Training checkpoints: written atomically, verified by checksums, safetensors and JSON only (no pickle).

step-00001000/state.json             numbers, and the size and checksum of every other file; written last
step-00001000/tensors.safetensors    weights, optimizer state, EMA; sharded (FSDP), one file for each process
timed/step-00001234/                 the latest that was saved by the clock; gone after the next one by steps
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keepleft.disk import atomic
from keepleft.disk.regular_file import MAX_JSON_BYTES, read_file_in

STATE_FILE = "state.json"
TENSORS_FILE = "tensors.safetensors"
TIMED_FOLDER = "timed"

TensorType = tuple[tuple[int, ...], torch.dtype]  # shape and dtype


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(
    folder: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    sharded: bool = False,
) -> Path:
    """Write the folder step-N below `folder`, and return it.

    If `sharded`, every process must call this with its shards; otherwise the first one alone. Raises OSError.
    """
    directory = step_folder(folder, step)
    with _explain_errors(directory):
        if sharded:
            _save_shards(directory, tensors, state, rank)
            return directory
        with atomic.atomic_folder(directory) as partial_directory:
            from safetensors.torch import save_file

            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
                partial_directory / TENSORS_FILE,
            )
            _write_state(partial_directory, state, sharded=False)
    return directory


@contextmanager
def _explain_errors(directory: Path) -> Iterator[None]:
    """Errors while writing become an OSError that names the checkpoint and the remedy."""
    message = lambda reason: (
        f"the checkpoint {directory} {atomic.NOT_WRITTEN} ({reason}): free some space or give another "
        "folder; earlier checkpoints are untouched"
    )
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, message(error.strerror or error)) from error
    except Exception as error:  # safetensors has an error of its own for a full disk
        if type(error).__name__ != "SafetensorError":
            raise
        raise OSError(message(error)) from error


def _save_shards(directory: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    partial_directory = directory.with_name(directory.name + atomic.PART_SUFFIX)
    device = next(iter(tensors.values())).device

    def prepare() -> None:
        shutil.rmtree(partial_directory, ignore_errors=True)  # a crash may have left one
        partial_directory.mkdir(parents=True)

    def finish() -> None:
        _write_state(partial_directory, state, sharded=True)
        for path in sorted(partial_directory.iterdir()):
            atomic.sync(path)
        atomic.sync(partial_directory)
        atomic.remove_folder(directory)
        partial_directory.rename(directory)
        atomic.sync(directory.parent)

    try:
        _on_first_rank(rank, device, prepare)
        try:
            writer = dcp.HuggingFaceStorageWriter(str(partial_directory), save_distributed=True)
            dcp.save(dict(tensors), storage_writer=writer)
        except dcp.api.CheckpointException as error:  # from any process; all of them get it
            failures = [f"process {n}: {failure[0]}" for n, failure in error.failures.items()]
            raise OSError("; ".join(failures)) from error
        _on_first_rank(rank, device, finish)
    except BaseException:
        if rank == 0:
            shutil.rmtree(partial_directory, ignore_errors=True)
        raise


def _on_first_rank(rank: int, device: torch.device, action: Callable[[], None]) -> None:
    """Run `action` in the first process while the others wait; if it fails, it fails in all of them."""
    import torch.distributed as dist

    failure: OSError | None = None
    if rank == 0:
        try:
            action()
        except OSError as error:
            failure = error
    failed = torch.tensor(int(failure is not None), device=device)
    dist.broadcast(failed, 0)
    if failure is not None:
        raise failure
    if failed:
        raise OSError("the first process could not write it")


def _write_state(partial_directory: Path, state: Mapping[str, Any], *, sharded: bool) -> None:
    files = {
        path.name: [path.stat().st_size, atomic.checksum(path)]
        for path in sorted(partial_directory.iterdir())
    }
    (partial_directory / STATE_FILE).write_bytes(_encode_state({**state, "sharded": sharded, "files": files}))


def _encode_state(state: Mapping[str, Any]) -> bytes:
    """The state and its checksum as JSON, always in the same form: any other byte in the file is damage."""
    text = json.dumps(state, indent=1, sort_keys=True)
    out = {"checksum": zlib.crc32(text.encode()), "state": json.loads(text)}
    return (json.dumps(out, indent=1, sort_keys=True) + "\n").encode()


def read_state(directory: Path) -> dict[str, Any]:
    """The state of a checkpoint, after every byte of it was verified. Raises ValueError if it is damaged."""
    try:
        raw = read_file_in(directory, STATE_FILE, max_bytes=MAX_JSON_BYTES)
        state: dict[str, Any] = json.loads(raw)["state"]
        if _encode_state(state) != raw:
            raise ValueError(f"{STATE_FILE} has changed since it was written")
        files: dict[str, list[int]] = state["files"]
        if unexpected := sorted({path.name for path in directory.glob("*.safetensors")} - files.keys()):
            raise ValueError(f"{unexpected[0]} does not belong to it")
        for name, (size, checksum) in files.items():
            if Path(name).name != name:
                raise ValueError(f"{STATE_FILE} names a file {name!r} elsewhere")
            if (directory / name).stat().st_size != size:
                raise ValueError(f"{name} has {(directory / name).stat().st_size} bytes, not {size}")
            if atomic.checksum(directory / name) != checksum:
                raise ValueError(f"{name} has changed since it was written")
    except FileNotFoundError as error:
        raise ValueError(
            f"the checkpoint {directory} is damaged: {Path(error.filename).name} is missing"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {directory} is damaged: {error}") from error
    return state


def load(directory: Path, tensors: Mapping[str, Tensor], *, sharded: bool, distributed: bool) -> None:
    """Fill all of these tensors in place from a checkpoint that `read_state` has verified.

    It may have been written by any number of processes. Raises ValueError if names, shapes or types differ.
    """
    if sharded or distributed:
        import warnings

        import torch.distributed.checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(directory))
        entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        stored_types = {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}
        _check_tensors(directory, stored_types, tensors)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(tensors), storage_reader=reader, no_dist=not distributed)
        return
    from safetensors import safe_open

    with safe_open(directory / TENSORS_FILE, framework="pt") as file, torch.no_grad():
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        stored_types = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
        _check_tensors(directory, stored_types, tensors)
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])


def _check_tensors(
    directory: Path, stored_types: Mapping[str, TensorType], tensors: Mapping[str, Tensor]
) -> None:
    """Compare every name, shape and type before any tensor is filled."""
    if mismatched := sorted(stored_types.keys() ^ tensors.keys()):
        raise ValueError(
            f"the checkpoint {directory} is of another model or optimizer: {mismatched[0]!r} is "
            f"{'not in it' if mismatched[0] in tensors else 'unknown'}"
        )
    for name, (shape, dtype) in stored_types.items():
        if (shape, dtype) != (tuple(tensors[name].shape), tensors[name].dtype):
            raise ValueError(
                f"the checkpoint {directory} is of another model: {name!r} has shape {shape} and type "
                f"{dtype}, not {tuple(tensors[name].shape)} and {tensors[name].dtype}"
            )


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints below a folder, the newest first."""
    directories = (path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal())
    return sorted(directories, key=step_number, reverse=True)


def list_resumable(folder: Path) -> list[Path]:
    """The checkpoints below a folder, those saved by the clock included, the newest first."""
    directories = list_checkpoints(folder) + list_checkpoints(folder / TIMED_FOLDER)
    return sorted(directories, key=step_number, reverse=True)


def remove_timed(folder: Path) -> None:
    """Remove the checkpoint that was saved by the clock, once there is a newer one."""
    atomic.remove_folder(folder / TIMED_FOLDER)
    shutil.rmtree(folder / f"{TIMED_FOLDER}.gone", ignore_errors=True)  # a crash may have left it


def step_number(directory: Path) -> int:
    """The step of a checkpoint, by the name of its folder."""
    return int(directory.name[5:])


def latest(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest undamaged checkpoint, its state, and what is wrong with newer ones; None if there are none.

    Raises ValueError if all are damaged: starting anew would overwrite them.
    """
    errors: list[str] = []
    for directory in list_resumable(folder):
        try:
            return directory, read_state(directory), errors
        except ValueError as error:
            errors.append(str(error))
    if errors:
        raise ValueError(f"no checkpoint below {folder} is whole: " + "; ".join(errors))
    return None


def prune(folder: Path, step: int, keep_last: int, best_step: int | None) -> None:
    """After `step` was saved, delete all checkpoints but the newest `keep_last` up to it and the best one.

    Checkpoints beyond `step` are damaged, or the run would have resumed from them. They are deleted, too, and
    so is what a crash left behind.
    """
    directories = list_checkpoints(folder)
    up_to_step = [directory for directory in directories if step_number(directory) <= step]
    retained = {*up_to_step[:keep_last], *([] if best_step is None else [step_folder(folder, best_step)])}
    for directory in directories:
        if directory not in retained:
            atomic.remove_folder(directory)
    for pattern in (f"step-*{atomic.PART_SUFFIX}", "step-*.gone"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def load_tensors(directory: Path, kinds: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of these kinds ("weights", "average") in a checkpoint, unsharded, in one process."""
    is_wanted = lambda name: name.split("/", 1)[0] in kinds
    if not read_state(directory)["sharded"]:
        from safetensors import safe_open

        with safe_open(directory / TENSORS_FILE, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if is_wanted(name)}  # noqa: SIM118
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(directory))
    entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    out = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if is_wanted(name)
    }
    dcp.load(out, storage_reader=reader, no_dist=True)
    return out
