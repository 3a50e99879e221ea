"""Where a run stands, on disk: whole or not there, checked by checksums, safetensors and JSON only.

    step-00001000/state.json             the numbers, and the size and checksum of every other file; written last
    step-00001000/tensors.safetensors    weights, optimizer, average (a file for each process where these hold shards)
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

STATE, TENSORS = "state.json", "tensors.safetensors"


def named(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(folder: Path, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], *, rank: int = 0,
         sharded: bool = False) -> Path:
    """Write step-N below `folder`. With shards every process must call it; otherwise the first one alone."""
    place = named(folder, step)
    with _explained(place):
        if sharded:
            _save_shards(place, tensors, state, rank)
            return place
        with atomic.made(place) as part:
            from safetensors.torch import save_file
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, part / TENSORS)
            _seal(part, state, sharded=False)
    return place


@contextmanager
def _explained(place: Path) -> Iterator[None]:
    """What goes wrong while writing names the checkpoint and the remedy."""
    told = lambda reason: (f"the checkpoint {place} could not be written ({reason}): free some space or give another folder; "
                           "earlier checkpoints are untouched")
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, told(error.strerror or error)) from error
    except Exception as error:  # the library's own, when the disk is full
        if type(error).__name__ != "SafetensorError":
            raise
        raise OSError(told(error)) from error


def _save_shards(place: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any], rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    part = place.with_name(place.name + atomic.PART)
    device = next(iter(tensors.values())).device

    def prepare() -> None:
        shutil.rmtree(part, ignore_errors=True)  # a crash may have left one
        part.mkdir(parents=True)

    def finish() -> None:
        _seal(part, state, sharded=True)
        for path in sorted(part.iterdir()):
            atomic.sync(path)
        atomic.sync(part)
        atomic.removed(place)
        part.rename(place)
        atomic.sync(place.parent)

    try:
        _by_the_first(rank, device, prepare)
        try:
            dcp.save(dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(part), save_distributed=True))
        except dcp.api.CheckpointException as error:  # of whichever process; all of them get it
            raise OSError(f"{'; '.join(f'process {n}: {trouble[0]}' for n, trouble in error.failures.items())}") from error
        _by_the_first(rank, device, finish)
    except BaseException:
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _by_the_first(rank: int, device: torch.device, do: Callable[[], None]) -> None:
    """The first process does it, the others wait; if it fails, it fails for all."""
    import torch.distributed as dist

    trouble: OSError | None = None
    if rank == 0:
        try:
            do()
        except OSError as error:
            trouble = error
    failed = torch.tensor(int(trouble is not None), device=device)
    dist.broadcast(failed, 0)
    if trouble is not None:
        raise trouble
    if failed:
        raise OSError("the first process could not write it")


def _seal(part: Path, state: Mapping[str, Any], *, sharded: bool) -> None:
    files = {path.name: [path.stat().st_size, atomic.checksum(path)] for path in sorted(part.iterdir())}
    (part / STATE).write_bytes(_sealed({**state, "sharded": sharded, "files": files}))


def _sealed(state: Mapping[str, Any]) -> bytes:
    """Numbers and their checksum, in one spelling: any other byte is damage."""
    written = json.dumps(state, indent=1, sort_keys=True)
    return (json.dumps({"checksum": zlib.crc32(written.encode()), "state": json.loads(written)}, indent=1, sort_keys=True)
            + "\n").encode()


def state(place: Path) -> dict[str, Any]:
    """The numbers of a checkpoint, after a look at every byte of it."""
    try:
        raw = (place / STATE).read_bytes()
        found: dict[str, Any] = json.loads(raw)["state"]
        if _sealed(found) != raw:
            raise ValueError(f"{STATE} has changed since it was written")
        files: dict[str, list[int]] = found["files"]
        if odd := sorted({path.name for path in place.glob("*.safetensors")} - files.keys()):
            raise ValueError(f"{odd[0]} does not belong to it")
        for name, (size, checksum) in files.items():
            if Path(name).name != name:
                raise ValueError(f"{STATE} names a file {name!r} elsewhere")
            if (place / name).stat().st_size != size:
                raise ValueError(f"{name} has {(place / name).stat().st_size} bytes, not {size}")
            if atomic.checksum(place / name) != checksum:
                raise ValueError(f"{name} has changed since it was written")
    except FileNotFoundError as error:
        raise ValueError(f"the checkpoint {place} is damaged: {Path(error.filename).name} is missing") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {place} is damaged: {error}") from error
    return found


def load(place: Path, into: Mapping[str, Tensor], *, sharded: bool, distributed: bool) -> None:
    """Fill these tensors, and all of them, from a checkpoint whose bytes were looked at; whoever wrote it, in however many
    processes."""
    if sharded or distributed:
        import warnings

        import torch.distributed.checkpoint as dcp

        reader = dcp.HuggingFaceStorageReader(str(place))
        entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        _fits(place, {name: (tuple(entry.size), entry.properties.dtype) for name, entry in entries.items()}, into)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(dict(into), storage_reader=reader, no_dist=not distributed)
        return
    from safetensors import safe_open

    with safe_open(place / TENSORS, framework="pt") as file, torch.no_grad():
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _fits(place, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in found.items()}, into)
        for name, tensor in into.items():
            tensor.copy_(found[name])


def _fits(place: Path, there: Mapping[str, tuple[tuple[int, ...], torch.dtype]], into: Mapping[str, Tensor]) -> None:
    """Every name, shape and type, before anything is filled."""
    if odd := sorted(there.keys() ^ into.keys()):
        raise ValueError(f"the checkpoint {place} is of another model or optimizer: {odd[0]!r} is "
                         f"{'not in it' if odd[0] in into else 'unknown'}")
    for name, (shape, dtype) in there.items():
        if (shape, dtype) != (tuple(into[name].shape), into[name].dtype):
            raise ValueError(f"the checkpoint {place} is of another model: {name!r} has shape {shape} and type {dtype}, not "
                             f"{tuple(into[name].shape)} and {into[name].dtype}")


def steps(folder: Path) -> list[Path]:
    """The checkpoints below a folder, the newest first."""
    found = (path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal())
    return sorted(found, key=_number, reverse=True)


def _number(place: Path) -> int:
    return int(place.name[5:])


def latest(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest whole checkpoint, its numbers, and what is wrong with newer ones; None where there is none at all."""
    damaged: list[str] = []
    for place in steps(folder):
        try:
            return place, state(place), damaged
        except ValueError as error:
            damaged.append(str(error))
    if damaged:
        raise ValueError(f"no checkpoint below {folder} is whole: " + "; ".join(damaged))
    return None


def tidy(folder: Path, step: int, keep: int, best: int | None) -> None:
    """After a step was saved: only the newest ones up to it stay, and the best.

    Those beyond it are damaged, or the run would have gone on from there; they go, and so does what a crash left.
    """
    found = steps(folder)
    past = [place for place in found if _number(place) <= step]
    stay = {*past[:keep], *([] if best is None else [named(folder, best)])}
    for place in found:
        if place not in stay:
            atomic.removed(place)
    for pattern in (f"step-*{atomic.PART}", "step-*.gone"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def tensors(place: Path, kinds: tuple[str, ...]) -> dict[str, Tensor]:
    """The tensors of some kinds ("weights", "average") in a whole checkpoint, put together in one process."""
    wanted = lambda name: name.split("/", 1)[0] in kinds
    if not state(place)["sharded"]:
        from safetensors import safe_open

        with safe_open(place / TENSORS, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(place))
    entries: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    out = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items() if wanted(name)}
    dcp.load(out, storage_reader=reader, no_dist=True)
    return out
