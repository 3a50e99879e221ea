"""Trackers get every report of a run, go on with it when it is resumed, and never hold it up."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from keepleft.cli import main
from keepleft.demo.phrases.corpus import split
from keepleft.runs import background_tracker, tracking
from keepleft.runs.background_tracker import BackgroundTracker
from keepleft.runs.job import RecipeOverrides, TrainJob
from keepleft.runs.trackers import TRACKERS, RecordingTracker, TrackedRun, check_trackers, scalars
from keepleft.runs.train import TrainingFinished, run_job

pytestmark = pytest.mark.usefixtures("one_thread")
JOB = TrainJob(
    task="lm",
    train="a.txt",
    out="runs/mine",
    size="tiny",
    device="cpu",
    design={"dim": 32, "layers": 1},
    recipe=RecipeOverrides(steps=4, log_every=1, eval_every=2, save_every=2),
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The working directory, with a text; nothing that a tracker keeps lies elsewhere."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    lines = [french for _, french in split("fr", test=100)[0][:300]]
    Path("a.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return tmp_path


def stop_after(steps: int):
    calls = []

    def stop() -> bool:
        calls.append(1)
        return len(calls) == steps

    return stop


def notes_of(events) -> list[str]:
    return [event for event in events if isinstance(event, str)]


# -- the protocol


def test_a_tracker_gets_the_configuration_every_report_and_the_end():
    tracker = RecordingTracker()
    list(run_job(JOB, trackers={"mine": tracker}))
    (run,) = tracker.runs
    assert run.folder == Path("runs/mine")
    assert run.step == 0
    assert run.config["task"] == "lm"
    assert run.config["recipe.steps"] == 4
    assert run.config["design.dim"] == 32
    steps = [step for step, _ in tracker.logged]
    assert steps == [1, 2, 3, 4]
    lines = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    for (_, metrics), line in zip(tracker.logged, lines, strict=True):
        assert metrics["train/loss"] == line["loss"]
        assert metrics["train/lr"] == line["rate"]
        assert ("valid/loss" in metrics) == ("measures" in line)
    assert tracker.finished == [True]


def test_a_resumed_run_goes_on_under_the_same_name():
    first, second = RecordingTracker(), RecordingTracker()
    list(run_job(JOB, stop=stop_after(3), trackers={"mine": first}))
    assert first.finished == [False]
    list(run_job(JOB, resume=True, trackers={"mine": second}))
    assert first.runs[0].run_id == second.runs[0].run_id
    assert second.runs[0].step == 3
    assert [step for step, _ in second.logged] == [4]
    third = RecordingTracker()
    list(run_job(replace(JOB, out="runs/other"), trackers={"mine": third}))
    assert third.runs[0].run_id != first.runs[0].run_id


def test_names_are_those_of_the_field():
    line = {
        "step": 3,
        "after": 2,
        "loss": 2.0,
        "plain": 1.5,
        "rate": 0.1,
        "norm": 2,
        "speed": 9.0,
        "best": True,
    }
    assert scalars({**line, "measures": {"bleu": 30.0}, "saved": "x"}) == {
        "train/loss": 2.0,
        "train/cross_entropy": 1.5,
        "train/lr": 0.1,
        "train/grad_norm": 2.0,
        "train/tokens_per_second": 9.0,
        "valid/bleu": 30.0,
    }


# -- trackers that fail


class BrokenTracker(RecordingTracker):
    def __init__(self, verb: str, error: BaseException) -> None:
        super().__init__()
        self.verb = verb
        self.error = error

    def start(self, run):
        self._fail("start")
        return super().start(run)

    def log(self, step, metrics):
        self._fail("log")
        super().log(step, metrics)

    def finish(self, completed):
        self._fail("finish")
        super().finish(completed)

    def _fail(self, verb: str) -> None:
        if verb == self.verb:
            raise self.error


@pytest.mark.parametrize("verb", ["start", "log", "finish"])
@pytest.mark.parametrize("error", [ConnectionError("no\nroute"), SystemExit(3), KeyboardInterrupt()])
def test_a_tracker_that_fails_is_named_once_and_left_out(verb, error):
    tracker = BrokenTracker(verb, error)
    sound = RecordingTracker()
    events = list(run_job(JOB, trackers={"broken": tracker, "sound": sound}))
    assert isinstance(events[-1], TrainingFinished)
    assert not events[-1].stopped
    (note,) = [note for note in notes_of(events) if "broken" in note]
    assert note.startswith("broken failed and is left out; metrics.jsonl has all metrics (")
    assert len(sound.logged) == 4
    assert len(Path("runs/mine/metrics.jsonl").read_text().splitlines()) == 4


class StuckTracker(RecordingTracker):
    """Waits for a server that never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def log(self, step, metrics):
        self.released.wait(60)
        super().log(step, metrics)


def test_a_tracker_that_hangs_holds_nothing_up(monkeypatch):
    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.2)
    tracker = StuckTracker()
    events = list(run_job(JOB, trackers={"stuck": tracker}))
    assert isinstance(events[-1], TrainingFinished)
    assert any("stuck does not answer" in note for note in notes_of(events))
    tracker.released.set()


def test_a_tracker_that_falls_behind_misses_reports_and_says_how_many(monkeypatch):
    monkeypatch.setattr(background_tracker, "MAX_WAITING", 5)
    tracker = StuckTracker()
    background = BackgroundTracker(tracker, "slow")
    background.start(TrackedRun(Path("runs/mine"), "id", {}))
    start_time = time.monotonic()
    for step in range(100):
        background.log(step, {"loss": 1.0})
    assert time.monotonic() - start_time < 5
    tracker.released.set()
    background.finish(True)
    background.wait(30)
    (note,) = background.take_notes()
    num_missed = 100 - len(tracker.logged)
    assert note == f"slow was too slow for {num_missed} reports: metrics.jsonl has them"
    assert num_missed >= 90
    assert tracker.finished == [True]


# -- the command


def test_a_tracker_is_checked_before_any_data_is_read(monkeypatch, folder, capsys):
    train = ["train", "--task", "lm", "--train", "a.txt", "--size", "tiny"]
    assert main([*train, "--track", "tensorboard,clearml"]) == 2
    message = "there is no tracker 'clearml': there are tensorboard, wandb, mlflow, trackio\n"
    stderr = capsys.readouterr().err
    assert stderr.endswith(message) or "keepleft[board]" in stderr
    monkeypatch.setattr("keepleft.runs.trackers.find_spec", lambda name: None)
    for name, kind in TRACKERS.items():
        assert main([*train, "--track", name]) == 2
        assert f"pip install 'keepleft[{kind.extra}]'" in capsys.readouterr().err
    assert main([*train, "--tensorboard"]) == 2
    assert "--track tensorboard needs tensorboard: pip install 'keepleft[board]'" in capsys.readouterr().err
    assert not (folder / "runs").exists()


def test_trackers_are_named_with_commas_or_as_a_list(monkeypatch):
    recorders: dict[str, RecordingTracker] = {}

    def make(names):
        return {name: recorders.setdefault(name, RecordingTracker()) for name in names}

    monkeypatch.setattr("keepleft.runs.tracking.make_trackers", make)
    monkeypatch.setattr("keepleft.runs.trackers.find_spec", lambda name: True)
    train = (
        "train --task lm --train a.txt --size tiny --design.dim 32 --design.layers 1 --recipe.steps 1".split()
    )
    assert main([*train, "--out", "runs/1", "--track", "wandb,mlflow"]) == 0
    assert main([*train, "--out", "runs/2", "--track", "[wandb, trackio]", "--tensorboard"]) == 0
    assert {name: len(tracker.runs) for name, tracker in recorders.items()} == {
        "wandb": 2,
        "mlflow": 1,
        "trackio": 1,
        "tensorboard": 1,
    }


# -- the programs themselves, where they are installed


def train_in_two_parts(name: str) -> list[str]:
    """A run with a tracker, stopped after three steps and resumed; its notes."""
    try:
        check_trackers([name])
    except ImportError as error:
        pytest.skip(f"{error}")
    job = replace(JOB, track=[name])
    notes = notes_of(run_job(job, stop=stop_after(3)))
    return notes + notes_of(run_job(job, resume=True))


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_all_steps_once():
    train_in_two_parts("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("runs/mine/board")
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Scalars("valid/loss")] == [2, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_works_offline_without_a_key_and_goes_on_with_the_same_run():
    notes = train_in_two_parts("wandb")
    run_id = json.loads(Path("runs/mine/tracking.json").read_text())["run_id"]
    folders = sorted(Path("runs/mine/wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert all((folder / f"run-{run_id}.wandb").stat().st_size > 0 for folder in folders)
    assert [
        note
        for note in notes
        if note.startswith("tracking with wandb: wandb sync runs/mine/wandb/offline-run-")
    ]
    assert not [note for note in notes if "failed" in note]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_one_run_in_a_database_beside_the_runs():
    notes = train_in_two_parts("mlflow")
    assert not [note for note in notes if "failed" in note]
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{Path('runs/mlflow.db').resolve()}")
    experiment = client.get_experiment_by_name("keepleft")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["recipe.steps"] == "4"
    points = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in points) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_keeps_one_run_and_prints_nothing_to_stdout(capsys):
    notes = train_in_two_parts("trackio")
    assert not [note for note in notes if "failed" in note]
    assert capsys.readouterr().out == ""
    import trackio

    (run,) = trackio.Api().runs("keepleft")
    assert run.name.startswith("mine-")
