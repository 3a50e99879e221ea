"""Training under accidents: killed, disk full, clock set back, two writers, data changed.

A tiny run is disturbed and resumed until it is finished; then every file of it is compared, byte for byte,
with that of an undisturbed run, but for the times in metrics.jsonl. `make chaos` runs it.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from command_line import make_parser, parse_arguments
from report import Row, environment, print_table, write_json

RUN_FOLDER = Path("runs/chaos")
DATA_FILE = "data.txt"
LOG_FILE = "log.txt"
CHILD_TIMEOUT = 300.0  # seconds
SAVE_DELAY = 0.01  # seconds that each fsync takes longer, so that kills hit it
WORDS = (
    "the a sea wind hill old small calm bright boat bird sings runs sleeps falls over under near and".split()
)
TIMES = ("speed", "share", "notes")  # of metrics.jsonl, in which equal runs differ


def train_arguments(steps: int) -> list[str]:
    options = f"--task lm --train {DATA_FILE} --out {RUN_FOLDER} --size tiny --device cpu --no-audit"
    options += (
        f" --design.dim 32 --design.layers 1 --batch.tokens 256 --batch.max-length 32 --recipe.steps {steps}"
    )
    options += (
        " --recipe.save-every 10 --recipe.eval-every 10 --recipe.log-every 4 --recipe.save-minutes 0.003"
    )
    return ["train", *options.split(), "--resume"]


def run_child(folder: str, arguments: list[str], accident: Callable[[], None] | None, slow: bool) -> None:
    """In a process of its own: `keepleft train`, with stderr in a file, after an accident was prepared."""
    import torch

    from keepleft.cli import main as keepleft
    from keepleft.disk import atomic, safetensors

    os.chdir(folder)
    torch.set_num_threads(1)
    log = os.open(LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if slow:
        sync = atomic.sync

        def slow_sync(path: Path) -> None:
            time.sleep(SAVE_DELAY)
            sync(path)

        atomic.sync = slow_sync
        safetensors.sync = slow_sync
    if accident is not None:
        accident()
    code = keepleft(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class FullDisk:
    """The disk is full after so many writes have been synced."""

    def __init__(self, writes: int) -> None:
        self.writes = writes

    def __call__(self) -> None:
        from keepleft.disk import atomic, safetensors

        def sync(path: Path) -> None:
            self.writes -= 1
            if self.writes < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        atomic.sync = sync
        safetensors.sync = sync


def set_clock_back() -> None:
    """Every look at the clock shows an earlier day than the one before."""
    start = time.time()
    looks = iter(range(1, 1 << 60))
    time.time = lambda: start - 86_400.0 * next(looks)
    time.time_ns = lambda: int(1e9 * time.time())


class Lab:
    """Folders with the same data, and processes that train in them."""

    def __init__(self, root: Path, steps: int, seed: int) -> None:
        self.root = root
        self.rng = random.Random(seed)
        self.arguments = train_arguments(steps)
        self.processes = multiprocessing.get_context("forkserver")
        modules = ["runs.train", "cli.train", "cli.parser", "cli.progress", "plots.charts", "data.statistics"]
        self.processes.set_forkserver_preload(
            [*(f"keepleft.{module}" for module in modules), "torch._dynamo", "tokenizers", "yaml"]
        )
        words = random.Random(0)
        self.text = "".join(" ".join(words.choices(WORDS, k=9)) + ".\n" for _ in range(1500))
        self.count = 0

    def new_folder(self) -> Path:
        self.count += 1
        folder = self.root / f"{self.count:03d}"
        folder.mkdir()
        (folder / DATA_FILE).write_text(self.text, "utf-8")
        return folder

    def start(
        self,
        folder: Path,
        *,
        arguments: list[str] | None = None,
        accident: Callable[[], None] | None = None,
        slow: bool = False,
    ) -> multiprocessing.process.BaseProcess:
        child = self.processes.Process(
            target=run_child, args=(str(folder), arguments or self.arguments, accident, slow)
        )
        child.start()
        return child

    def run(self, folder: Path, **options: Any) -> tuple[int | None, str]:
        """Train until the process ends: its exit code, and what it said."""
        log = folder / LOG_FILE
        log.unlink(missing_ok=True)
        child = self.start(folder, **options)
        child.join(CHILD_TIMEOUT)
        if child.is_alive():
            child.kill()
            child.join()
            return None, "it did not end"
        return child.exitcode, log.read_text("utf-8") if log.exists() else ""


def run_content(folder: Path) -> dict[str, bytes]:
    """The content of every file of a run, without times."""
    run_folder = folder / RUN_FOLDER
    files = {
        path.relative_to(run_folder).as_posix(): path.read_bytes()
        for path in run_folder.rglob("*")
        if path.is_file()
    }
    if (metrics := files.pop("metrics.jsonl", None)) is not None:
        reports = [json.loads(line) for line in metrics.splitlines()]
        timeless = [{name: report[name] for name in report if name not in TIMES} for report in reports]
        files["metrics"] = json.dumps(timeless).encode()
    return files


def difference(folder: Path, expected: dict[str, bytes]) -> str:
    """The names of files that differ from an undisturbed run; "" if none does."""
    content = run_content(folder)
    names = sorted(
        name for name in content.keys() | expected.keys() if content.get(name) != expected.get(name)
    )
    return ", ".join(names)


def moment(folder: Path) -> str:
    """What a run was doing when it was killed, for a row of the table."""
    run_folder = folder / RUN_FOLDER
    if not (run_folder / "resolved.json").exists():
        return "while preparing"
    if any(run_folder.rglob("*.part")):
        return "while writing"
    has_checkpoint = any((run_folder / "checkpoints").rglob("state.json"))
    return "while training" if has_checkpoint else "before the first checkpoint"


def try_kills(lab: Lab, expected: dict[str, bytes], kills: int, seconds: float) -> list[Row]:
    """SIGKILL at random moments, until so many were survived and the last run is finished."""
    moments: Counter[str] = Counter()
    differences = []
    finished_runs = 0
    unclear = 0
    folder = lab.new_folder()
    finished = False
    while sum(moments.values()) < kills or not finished:
        if finished:
            folder = lab.new_folder()
        remaining = kills - sum(moments.values())
        child = lab.start(folder, slow=remaining > 0)
        if remaining > 0:
            resolved = folder / RUN_FOLDER / "resolved.json"
            if not resolved.exists() and lab.rng.random() < 0.5:  # to hit it before the first checkpoint
                while child.is_alive() and not resolved.exists():
                    time.sleep(0.005)
                child.join(lab.rng.uniform(0.0, 0.1))
            else:
                child.join(lab.rng.uniform(0.0, seconds / 3 if remaining % 3 == 0 else seconds))
            if child.is_alive():
                child.kill()
        child.join(CHILD_TIMEOUT)
        finished = child.exitcode == 0
        if finished:
            finished_runs += 1
            if names := difference(folder, expected):
                differences.append(names)
        elif child.exitcode == -9:
            moments[moment(folder)] += 1
            if not (folder / RUN_FOLDER / "config.yaml").exists():
                code, said = lab.run(folder, arguments=["train", "--out", str(RUN_FOLDER), "--resume"])
                unclear += code != 2 or "there is no run to resume" not in said or "--train" not in said
        else:
            return [{"accident": "SIGKILL", "passed": "NO", "seen": (folder / LOG_FILE).read_text()[-300:]}]
    return [
        {
            "accident": f"SIGKILL {name}",
            "times": count,
            "passed": "NO" if differences or (name == "while preparing" and unclear) else "yes",
            "seen": "; ".join(differences) or f"{finished_runs} runs finished, all files equal",
        }
        for name, count in sorted(moments.items())
    ]


def try_full_disk(lab: Lab, expected: dict[str, bytes], times: int) -> Row:
    """No space left, at a random write: the error says so; with space again, the run ends equal."""
    bad = []
    for _ in range(times):
        folder = lab.new_folder()
        code, said = lab.run(folder, accident=FullDisk(lab.rng.randrange(60)))
        if code != 0 and not ("could not be written" in said and "free some space" in said):
            bad.append(said[-300:])
        code, said = lab.run(folder)
        if code != 0 or (names := difference(folder, expected)):
            bad.append(said[-300:] if code else names)
    return result_row("disk full", times, bad, "named, and resumed: all files equal")


def try_clock(lab: Lab, expected: dict[str, bytes]) -> Row:
    folder = lab.new_folder()
    code, said = lab.run(folder, accident=set_clock_back)
    bad = [said[-300:]] if code else [names for names in [difference(folder, expected)] if names]
    return result_row("clock set back", 1, bad, "all files equal")


def try_two_writers(lab: Lab, expected: dict[str, bytes]) -> Row:
    """A second process in the same run directory is refused, and the first is not disturbed."""
    folder = lab.new_folder()
    first = lab.start(folder, slow=True)
    deadline = time.monotonic() + CHILD_TIMEOUT
    while not (folder / RUN_FOLDER / ".lock").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    code, said = lab.run(folder)
    bad = [] if code == 2 and "another process is at work in" in said else [said[-300:] or f"code {code}"]
    first.join(CHILD_TIMEOUT)
    if first.exitcode != 0 or (names := difference(folder, expected)):
        bad.append(names if first.exitcode == 0 else f"the first ended with {first.exitcode}")
    return result_row("two writers", 1, bad, "the second is refused, all files equal")


def try_changed_data(lab: Lab, expected: dict[str, bytes]) -> Row:
    """Data that changed between kill and resume are refused; with the old data the run ends equal."""
    folder = lab.new_folder()
    child = lab.start(folder, slow=True)
    deadline = time.monotonic() + CHILD_TIMEOUT
    checkpoints = folder / RUN_FOLDER / "checkpoints"
    while not any(checkpoints.rglob("state.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.join()
    bad = []
    for changed in (lab.text + "more\n", lab.text[:-3] + "x.\n"):
        (folder / DATA_FILE).write_text(changed, "utf-8")
        code, said = lab.run(folder)
        if code != 2 or f"{DATA_FILE} has changed since the run" not in said:
            bad.append(said[-300:])
    (folder / DATA_FILE).write_text(lab.text, "utf-8")
    code, said = lab.run(folder)
    if code != 0 or (names := difference(folder, expected)):
        bad.append(said[-300:] if code else names)
    return result_row("data changed", 2, bad, "refused by name; with the old data, all files equal")


def result_row(accident: str, times: int, bad: list[str], seen: str) -> Row:
    return {
        "accident": accident,
        "times": times,
        "passed": "NO" if bad else "yes",
        "seen": "; ".join(bad).replace("\n", " ") or seen,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--full-disks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parse_arguments(parser, argv, kills=1, full_disks=1, steps=6)
    root = Path(tempfile.mkdtemp(prefix="keepleft-chaos-"))
    try:
        lab = Lab(root, options.steps, options.seed)
        whole = lab.new_folder()
        code, said = lab.run(whole)  # the fork server starts, too
        if code != 0:
            print(said)
            return 1
        expected = run_content(whole)
        started = time.monotonic()
        lab.run(lab.new_folder(), slow=True)
        seconds = time.monotonic() - started
        rows = try_kills(lab, expected, options.kills, seconds)
        rows.append(try_full_disk(lab, expected, options.full_disks))
        rows += [trial(lab, expected) for trial in (try_clock, try_two_writers, try_changed_data)]
    finally:
        shutil.rmtree(root, ignore_errors=True)
    passed = all(row["passed"] == "yes" for row in rows)
    print_table(f"a run of {options.steps} steps, {len(expected)} files, {seconds:.1f} s undisturbed", rows)
    print("every run ended as the undisturbed one" if passed else "FAILED")
    write_json(options.json, {"environment": environment(), "rows": rows, "passed": passed})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
