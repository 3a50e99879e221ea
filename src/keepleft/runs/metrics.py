"""The metrics of a run as files: metrics.jsonl, and the loss curve as SVG."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from keepleft.disk import atomic
from keepleft.runs.trackers import TrackedRun

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """The tracker that every run has. When a run is resumed, lines beyond the checkpoint are dropped."""

    file: TextIO

    def start(self, run: TrackedRun) -> str | None:
        restore_lines(run.folder, run.step, run.resumed_report)
        self.file = (run.folder / METRICS_FILE).open("a", encoding="utf-8")
        return None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.file.write(json.dumps(metrics) + "\n")
        self.file.flush()

    def finish(self, completed: bool) -> None:
        self.file.close()


def restore_lines(out: Path, step: int, resumed_report: str | None) -> None:
    """Make metrics.jsonl end where a checkpoint of `step` was saved.

    Later lines are dropped. The line of the checkpoint itself, `resumed_report`, is added if it is missing: a
    crash came between.
    """
    path = out / METRICS_FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    kept_lines = [line for line in lines if _line_step(line) <= step]
    if resumed_report is not None and _line_step(resumed_report) not in map(_line_step, kept_lines):
        kept_lines.append(resumed_report)
    if kept_lines != lines:
        atomic.write_text(path, "".join(line + "\n" for line in kept_lines))


def _line_step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # an incomplete line, written in the moment of a crash: drop it


def read_best_measures(out: Path) -> dict[str, float]:
    """The metrics of the best evaluation, or of the last if none was the best; empty if there was none."""
    path = out / METRICS_FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    evaluations = [record for line in lines if (record := json.loads(line)).get("measures")]
    best = [record for record in evaluations if record.get("best")] or evaluations
    return dict(best[-1]["measures"]) if best else {}


def plot_loss(out: Path) -> None:
    """Draw the training and validation loss as loss.svg beside metrics.jsonl."""
    from keepleft.plots.charts import line_chart

    records = [json.loads(line) for line in (out / METRICS_FILE).read_text("utf-8").splitlines()]
    evaluations = [record for record in records if "loss" in record.get("measures", {})]
    series = {
        "training": [(record["step"], record["plain"]) for record in records if "plain" in record],
        "validation": [(record["step"], record["measures"]["loss"]) for record in evaluations],
    }
    series = {name: points for name, points in series.items() if points}
    if series:
        path = out / "loss.svg"
        line_chart(path, series, title=out.name, x_label="step", y_label="cross-entropy per token")
