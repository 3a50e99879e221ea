"""The data files of a run: fingerprinted when it begins, compared when it is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from keepleft.disk.fingerprint import fingerprint
from keepleft.runs.job import DataConfig, TrainJob

STORE_FOLDER = "data"  # of a run: its token stores


def data_fingerprints(job: TrainJob) -> dict[str, str]:
    """The fingerprint of every data file of a job, by its path.

    Datasets of the hub are not files, and stdin cannot be read again: they have none.
    """
    return {str(path): fingerprint(path) for path in _data_paths(job)}


def store_fingerprints(out: Path) -> dict[str, str]:
    """The fingerprint of every file of a run's token stores, by its path in the run folder."""
    paths = sorted(path for path in (out / STORE_FOLDER).rglob("*") if path.is_file())
    return {path.relative_to(out).as_posix(): fingerprint(path) for path in paths}


def check_stable(job: TrainJob, before: Mapping[str, str]) -> None:
    """Raise ValueError if a data file has changed since `before`, while it was read."""
    after = data_fingerprints(job)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            raise ValueError(
                f"{name} has changed while it was read: start again once nothing writes to it any more"
            )


def check_unchanged(out: Path, data: Mapping[str, str], stores: Mapping[str, str]) -> Iterator[str]:
    """Compare the files of a run with their fingerprints, and yield lines for the log.

    A data file that is gone is reported: the run reads its token stores. Raises ValueError for a file that
    has changed.
    """
    for name, expected in data.items():
        path = Path(name).expanduser()
        if not path.exists():
            yield f"{name} is gone; going on with {out / STORE_FOLDER}, which was made from it"
            continue
        _compare(name, expected, fingerprint(path), out, "bring the old file back")
    for name, expected in stores.items():
        path = out / name
        if not path.exists():
            raise ValueError(f"{path} is missing: copy the run again, or start a new one with another --out")
        _compare(str(path), expected, fingerprint(path), out, "copy the run again")


def _compare(name: str, expected: str, found: str, out: Path, remedy: str) -> None:
    if found == expected:
        return
    expected_bytes, found_bytes = (int(value.partition(":")[0]) for value in (expected, found))
    difference = (
        "its content differs"
        if expected_bytes == found_bytes
        else f"it had {expected_bytes:,} bytes and has {found_bytes:,}"
    )
    raise ValueError(
        f"{name} has changed since the run in {out} began ({difference}): {remedy}, or start a new run with "
        "another --out"
    )


def is_local_file(name: str) -> bool:
    """Whether a name of data means a file or folder: not stdin, and not a dataset of the hub."""
    return name != "-" and not name.startswith("hf:")


def data_names(data: DataConfig | str | list[DataConfig]) -> list[str]:
    """What a job's data are called: files without their folders, datasets of the hub, "standard input"."""
    names = [_short_name(name) for name in _data_inputs(data)]
    return list(dict.fromkeys(names))


def _short_name(name: str) -> str:
    if not is_local_file(name):
        return name.removeprefix("hf:") if name != "-" else "standard input"
    return Path(name).name


def _data_inputs(data: DataConfig | str | list[DataConfig] | None) -> Iterator[str]:
    """All files, datasets and pipes of a job's training or validation data."""
    for config in data if isinstance(data, list) else [data]:
        names = (config.path, config.src, config.tgt) if isinstance(config, DataConfig) else (config,)
        yield from (name for name in names if name is not None)


def _data_paths(job: TrainJob) -> Iterator[Path]:
    for data in (job.train, job.valid):
        for name in filter(is_local_file, _data_inputs(data)):
            path = Path(name).expanduser()
            if path.is_dir():  # a dataset that save_to_disk() wrote
                yield from sorted(entry for entry in path.iterdir() if entry.is_file())
            elif path.is_file():
                yield path
