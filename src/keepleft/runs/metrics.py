"""What a run leaves to look at: a line of JSON for each report, the loss curve, and TensorBoard's files where wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from keepleft.disk import atomic
from keepleft.training.loop import Report

METRICS = "metrics.jsonl"


class Metrics:
    """Takes reports. When a run goes on, lines of steps that were lost are dropped."""

    def __init__(self, out: Path, *, board: bool = False) -> None:
        self.out = out
        self.file: TextIO | None = None
        self.board = writer()(str(out / "board")) if board else None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *_: Any) -> None:
        for open_ in (self.file, self.board):
            if open_ is not None:
                open_.close()

    def add(self, report: Report) -> None:
        if self.file is None:
            path = self.out / METRICS
            if path.exists():
                old = [line for line in path.read_text("utf-8").splitlines() if _step(line) <= report.after]
                atomic.text(path, "".join(line + "\n" for line in old))
            self.file = path.open("a", encoding="utf-8")
        self.file.write(json.dumps(report.record()) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in {"loss": report.loss, "rate": report.rate, "norm": report.norm, "speed": report.speed,
                                **{f"valid/{key}": value for key, value in report.measures.items()}}.items():
                self.board.add_scalar(name, value, report.step)


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62  # half a line, written in the last moment


def writer() -> Any:
    """What writes TensorBoard's files."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError("the board needs tensorboard: pip install 'keepleft[board]'") from error
    return SummaryWriter


def curve(out: Path) -> None:
    """The loss curve as a picture beside the numbers."""
    from keepleft.runs.chart import lines

    records = [json.loads(line) for line in (out / METRICS).read_text("utf-8").splitlines()]
    series = {"training": [(r["step"], r["plain"]) for r in records if "plain" in r],
              "validation": [(r["step"], r["measures"]["loss"]) for r in records if "loss" in r.get("measures", {})]}
    series = {name: points for name, points in series.items() if points}
    if series:
        lines(out / "loss.svg", series, title=out.name, x="step", y="cross-entropy per token")
