"""Experiment trackers behind one protocol: TensorBoard, Weights & Biases, MLflow, trackio, metrics.jsonl.

Each of the four programs is one class and one row of TRACKERS, and is imported when a run uses it. None needs
a network: without a key or a server, metrics are kept in files, and `start` says where.
"""

from __future__ import annotations

import io
import logging
import netrc
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol
from urllib.parse import urlsplit

from keepleft.training.loop import METRICS_KEYS

PROJECT = "keepleft"  # what other programs call the group of all our runs
CONNECT_SECONDS = 30  # after which a server counts as unreachable
MLFLOW_FILE = "mlflow.db"  # beside the run folders, for all of them
MAX_PARAM_CHARACTERS = 500
MAX_PARAMS = 100  # of one request to MLflow
REPORT_FIELDS = {
    key: name for name, key in METRICS_KEYS.items()
}  # the field's words for those of metrics.jsonl


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told when a run starts or is resumed."""

    folder: Path
    run_id: str  # stays the same when the run is resumed
    config: Mapping[str, Any]  # the job and what was resolved, by dotted names
    step: int = 0  # that the run is resumed from
    resumed_report: str | None = None  # the line of metrics.jsonl that belongs to that step

    @property
    def name(self) -> str:
        return f"{self.folder.resolve().name}-{self.run_id[:6]}"


class Tracker(Protocol):
    """Keeps the metrics of a run."""

    def start(self, run: TrackedRun) -> str | None:
        """Begin a run, or go on with it. Returns where its metrics can be seen."""
        ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add the report of a step, a line of metrics.jsonl; `scalars` has its numbers."""
        ...

    def finish(self, completed: bool) -> None:
        """End the run: to the last step, or before."""
        ...


class RecordingTracker:
    """Keeps everything in memory: a stand-in for tests."""

    def __init__(self) -> None:
        self.runs: list[TrackedRun] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished: list[bool] = []

    def start(self, run: TrackedRun) -> str | None:
        self.runs.append(run)
        return None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.logged.append((step, scalars(metrics)))

    def finish(self, completed: bool) -> None:
        self.finished.append(completed)


class TensorBoardTracker:
    """Event files in the run folder."""

    def start(self, run: TrackedRun) -> str | None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "board"
        # events beyond the step that the run is resumed from will come again
        self.writer: Any = SummaryWriter(str(folder), purge_step=run.step + 1 if run.step else None)
        return f"tensorboard --logdir {folder}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics).items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def finish(self, completed: bool) -> None:
        self.writer.close()


class WandbTracker:
    """Weights & Biases: online with a key, otherwise in files that `wandb sync` uploads."""

    def start(self, run: TrackedRun) -> str | None:
        import wandb

        settings = wandb.setup().settings
        options: dict[str, Any] = {
            "project": settings.project or PROJECT,
            "id": run.run_id,
            "name": run.name,
            "dir": str(run.folder),
            "config": dict(run.config),
            "resume": "allow",
            "settings": wandb.Settings(silent=True, console="off", init_timeout=CONNECT_SECONDS),
        }
        if settings.mode == "online" and not (settings.api_key or _has_netrc_entry(settings.base_url)):
            options["mode"] = "offline"
        try:
            self.run: Any = wandb.init(**options)
        except wandb.errors.CommError:  # the server does not answer: keep the metrics in files
            wandb.teardown()
            self.run = wandb.init(**options | {"mode": "offline"})
        return f"wandb sync {Path(self.run.dir).parent}" if self.run.offline else str(self.run.url)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.run.log(scalars(metrics), step=step)

    def finish(self, completed: bool) -> None:
        self.run.finish(exit_code=0 if completed else 1)


class MLflowTracker:
    """MLflow: the server that its own settings name, or a database beside the run folders."""

    def start(self, run: TrackedRun) -> str | None:
        import mlflow
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        uri = f"sqlite:///{run.folder.resolve().parent / MLFLOW_FILE}"
        if mlflow.is_tracking_uri_set():
            uri = mlflow.get_tracking_uri()
        self.client: Any = MlflowClient(tracking_uri=uri)
        experiment = self.client.get_experiment_by_name(PROJECT)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(PROJECT)
        known_runs = self.client.search_runs([experiment_id], f"tags.run_id = '{run.run_id}'", max_results=1)
        if known_runs:
            self.id: str = known_runs[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
        else:
            tags = {"run_id": run.run_id}
            self.id = self.client.create_run(experiment_id, tags=tags, run_name=run.name).info.run_id
            params = [Param(name, str(value)[:MAX_PARAM_CHARACTERS]) for name, value in run.config.items()]
            for begin in range(0, len(params), MAX_PARAMS):
                self.client.log_batch(self.id, params=params[begin : begin + MAX_PARAMS])
        return f"mlflow ui --backend-store-uri {uri}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [Metric(name, value, now, step) for name, value in scalars(metrics).items()]
        self.client.log_batch(self.id, metrics=points)

    def finish(self, completed: bool) -> None:
        self.client.set_terminated(self.id, "FINISHED" if completed else "KILLED")


class TrackioTracker:
    """trackio: a local database, or the Space that its own settings name."""

    def start(self, run: TrackedRun) -> str | None:
        import trackio

        with redirect_stdout(_OtherThreadsOutput()):
            trackio.init(project=PROJECT, name=run.name, config=dict(run.config), resume="allow", embed=False)
        return f"trackio show --project {PROJECT}"

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        import trackio

        trackio.log(scalars(metrics), step=step)

    def finish(self, completed: bool) -> None:
        import trackio

        with redirect_stdout(_OtherThreadsOutput()):
            trackio.finish()


class _OtherThreadsOutput(io.StringIO):
    """Standard output without what the thread that made this prints: `keepleft train` prints a path alone."""

    def __init__(self) -> None:
        super().__init__()
        self.thread_id = get_ident()
        self.stdout = sys.stdout

    def write(self, text: str) -> int:
        return len(text) if get_ident() == self.thread_id else self.stdout.write(text)

    def flush(self) -> None:
        self.stdout.flush()


def _has_netrc_entry(url: str) -> bool:
    """Whether `wandb login` has stored a key for this server."""
    try:
        return netrc.netrc().authenticators(urlsplit(url).hostname or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


@dataclass(frozen=True)
class TrackerKind:
    make: type[Tracker]
    package: str  # that it needs
    extra: str  # of keepleft, that installs it


TRACKERS: dict[str, TrackerKind] = {
    "tensorboard": TrackerKind(TensorBoardTracker, "tensorboard", "board"),
    "wandb": TrackerKind(WandbTracker, "wandb", "wandb"),
    "mlflow": TrackerKind(MLflowTracker, "mlflow", "mlflow"),
    "trackio": TrackerKind(TrackioTracker, "trackio", "trackio"),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown tracker, ImportError for one whose package is not installed."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"there is no tracker {name!r}: there are {', '.join(TRACKERS)}")
        kind = TRACKERS[name]
        if find_spec(kind.package) is None:
            raise ImportError(f"--track {name} needs {kind.package}: pip install 'keepleft[{kind.extra}]'")


def make_trackers(names: Sequence[str]) -> dict[str, Tracker]:
    """Trackers by their names, each once."""
    return {name: TRACKERS[name].make() for name in names}


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of metrics.jsonl, under the names that trackers show: train/loss, valid/bleu …"""
    out = {
        f"train/{REPORT_FIELDS.get(name, name)}": float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in ("step", "after")
    }
    return out | {f"valid/{name}": float(value) for name, value in metrics.get("measures", {}).items()}
