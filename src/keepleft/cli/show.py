"""What happens in a run, on stderr: a bar and numbers on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    def __init__(self) -> None:
        self.bar: Any = None
        self.began = self.told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        self._close()

    def show(self, event: Any) -> None:
        from keepleft.runs import train as runs
        from keepleft.train.loop import Report

        if isinstance(event, str):
            self._say(event)
        elif isinstance(event, runs.Progress):
            if event.what == "training":
                self.total = event.total
            elif sys.stderr.isatty():
                self._say(f"{event.what} …")
        elif isinstance(event, Report):
            self._report(event)
        elif isinstance(event, runs.Finished):
            self._close()
            for name, value in event.measures.items():
                self._say(f"{name}: {value:.4f}")
            self._say(event.said)
            print(event.folder / "model" if not event.stopped else event.folder)

    def _report(self, report: Any) -> None:
        for note in report.notes:
            self._say(note)
        text = (f"loss {report.loss:.3f}  accuracy {report.accuracy:.1%}  {report.speed:,.0f} tokens/s"
                + (f"  {report.share:.0%} of peak" if report.share else ""))
        if report.measures:
            self._say(f"step {report.step}: " + "  ".join(f"{name} {value:.4f}" for name, value in report.measures.items())
                      + ("  (best)" if report.best else ""))
        if sys.stderr.isatty():
            self._draw(report, text)
        elif report.last or time.monotonic() - self.told > 10:
            self.told = time.monotonic()
            self._say(f"step {report.step}  {text}")

    def _draw(self, report: Any, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        if self.bar is None:
            self.bar = Bar(TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                           TextColumn("{task.fields[text]}"), console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task("training", total=self.total, text=text)
        self.bar.update(self.task, completed=report.step, text=text)

    total: int | None = None

    def _say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.console.print(line, highlight=False)
        else:
            print(line, file=sys.stderr)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
