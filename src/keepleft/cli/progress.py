"""What happens in a run, on stderr: a bar and numbers on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepleft.training.loop import TrainReport


class Bar:
    """Progress on stderr: a bar on a terminal, nothing elsewhere."""

    def __init__(self, label: str, total: int | None) -> None:
        self.label = label
        self.total = total
        self.rich_progress: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self.rich_progress = RichProgress(
                TextColumn(self.label),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self.rich_progress.start()
            self.task = self.rich_progress.add_task(self.label, total=self.total, text="")
        return self

    def update(self, done: int, text: str) -> None:
        if self.rich_progress is not None:
            self.rich_progress.update(self.task, completed=done, text=text)

    def print_line(self, line: str) -> None:
        """A line above the bar, or by itself."""
        if self.rich_progress is not None:
            self.rich_progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr)

    def __exit__(self, *_: Any) -> None:
        if self.rich_progress is not None:
            self.rich_progress.stop()


class Progress:
    """What happens in a run: lines, and a bar while it trains."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.last_report_time = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None

    def show(self, event: Any) -> None:
        from keepleft.runs import train
        from keepleft.training.loop import TrainReport

        if isinstance(event, str):
            self.print_line(event)
        elif isinstance(event, train.TrainingStarted):
            self.__exit__()
            self.bar = Bar("training", event.steps).__enter__()
        elif isinstance(event, TrainReport):
            self.report(event)
        elif isinstance(event, train.TrainingFinished):
            self.__exit__()
            if event.measures:
                self.print_line(
                    "best, held out: "
                    + "  ".join(f"{name} {value:.4f}" for name, value in event.measures.items())
                )
            self.print_line(event.summary)
            print(event.folder if event.stopped else event.folder / "model")

    def watch(self, label: str, done: int, total: int | None) -> None:
        """The work before training: a bar for each kind, in megabytes of text."""
        if self.bar is None or self.bar.label != label:
            self.__exit__()
            self.bar = Bar(label, None if total is None else max(1, total >> 20)).__enter__()
        self.bar.update(done >> 20, "MB")

    def report(self, report: TrainReport) -> None:
        for note in report.notes:
            self.print_line(note)
        text = (
            f"loss {report.loss:.3f}  accuracy {report.accuracy:.1%}  {report.tokens_per_second:,.0f} tokens/s"
            + (f"  {report.mfu:.0%} of peak" if report.mfu else "")
        )
        if report.measures:
            measures_text = "  ".join(f"{name} {value:.4f}" for name, value in report.measures.items())
            self.print_line(
                f"step {report.step}, held out: {measures_text}{'  (best)' if report.best else ''}"
            )
        if self.bar is not None:
            self.bar.update(report.step, text)
        if not sys.stderr.isatty() and (report.last or time.monotonic() - self.last_report_time > 10):
            self.last_report_time = time.monotonic()
            self.print_line(f"step {report.step}  {text}")

    def print_line(self, line: str) -> None:
        if self.bar is not None:
            self.bar.print_line(line)
        else:
            print(line, file=sys.stderr)
