"""keepleft audit --watch: audit again whenever a file changes."""

from __future__ import annotations

import subprocess  # nosec B404 # it starts this program again
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from keepleft.cli import audit_targets

POLL_SECONDS = 0.5
MAX_WATCHED_FILES = 5000
MODEL_SUFFIXES = frozenset({".gguf", ".json", ".safetensors"})

FileStates = dict[Path, tuple[int, int]]  # time of the last change in nanoseconds, and size


def audit_on_change(inputs: list[str], hf_config: str | None, arguments: list[str]) -> int:
    """Audit, and again with every change, each time in a new process: an import happens once in each. Ends
    with KeyboardInterrupt.
    """
    folder = watched_folder(inputs, hf_config)
    num_files = len(file_states(folder))
    if not num_files:
        raise ValueError(f"--watch finds no .py, .json or model file in {folder}: name a model that has some")
    print(f"keepleft: watching {num_files} files in {folder}; Ctrl-C ends", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "keepleft", "audit", *arguments]
    before = file_states(folder)
    subprocess.run(command, check=False)  # nosec B603 # the options of this command
    for changed in changes(folder, before):
        names = ", ".join(path.name for path in changed[:3]) + (" …" if len(changed) > 3 else "")
        print(f"\nkeepleft: {names} changed", file=sys.stderr, flush=True)
        subprocess.run(command, check=False)  # nosec B603
    return 0


def changes(folder: Path, before: FileStates, poll_seconds: float = POLL_SECONDS) -> Iterator[list[Path]]:
    """The files that changed, were added or removed since the last time, once nothing changes any more."""
    while True:
        time.sleep(poll_seconds)
        now = file_states(folder)
        if now == before:
            continue
        time.sleep(poll_seconds / 2)  # an editor may still be writing
        if file_states(folder) != now:
            continue
        changed = sorted(path for path in {*before, *now} if before.get(path) != now.get(path))
        before = now
        yield changed


def file_states(path: Path) -> FileStates:
    """Every watched file of a folder and when it was changed; at most MAX_WATCHED_FILES of them."""
    from itertools import chain, islice

    from keepleft.auditing.static.hints import python_files

    model_files: Iterator[Path] = iter(())
    if path.is_dir():
        model_files = (file for file in path.iterdir() if file.suffix in MODEL_SUFFIXES)
    states: FileStates = {}
    try:
        for file in islice(chain(model_files, python_files(path)), MAX_WATCHED_FILES):
            try:
                status = file.stat()
            except OSError:  # removed meanwhile
                continue
            states[file] = (status.st_mtime_ns, status.st_size)
    except OSError:  # the folder itself, for a moment
        return states
    return states


def watched_folder(inputs: list[str], hf_config: str | None) -> Path:
    """The package, file or folder whose files make up the model. Raises ValueError where there is none."""
    if hf_config is not None:
        return _existing(Path(hf_config))
    if not audit_targets.is_code(inputs[0]):
        return _existing(Path(inputs[0]))
    module = inputs[0].rpartition(":")[0]
    if module.endswith(".py"):
        path = _existing(Path(module)).resolve().parent
        while (path / "__init__.py").exists() and (path.parent / "__init__.py").exists():
            path = path.parent
        return path
    spec = PathFinder.find_spec(module.partition(".")[0], [str(Path.cwd()), *sys.path])
    if spec is None or spec.origin is None:
        raise ValueError(f"--watch finds no files of {module}: give path/to/file.py:function")
    path = Path(spec.origin)
    return path.parent if path.name == "__init__.py" else path


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ValueError(f"--watch needs files on this machine, and there is no {path}: fetch it first")
    return path


def command_line(values: Mapping[str, Any], explicit_options: Collection[str]) -> list[str]:
    """The command line that gives these options again."""
    arguments = list(values["inputs"])
    for key in sorted({*explicit_options} - {"inputs"}):
        flag = "--" + key.rstrip("_").replace("_", "-")
        value = values[key]
        if value is True:
            arguments.append(flag)
        elif value is not None and value is not False:
            arguments.append(f"{flag}={value}")
    return arguments
