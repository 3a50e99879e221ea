"""What happens in a run, on stderr: a bar and numbers on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Bar:
    """Progress on stderr: a bar on a terminal, nothing elsewhere."""

    def __init__(self, what: str, total: int | None) -> None:
        self.what, self.total = what, total
        self.bar: Any = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Drawn

            self.bar = Drawn(TextColumn(self.what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                             TextColumn("{task.fields[text]}"), console=Console(stderr=True))
            self.bar.start()
            self.task = self.bar.add_task(self.what, total=self.total, text="")
        return self

    def at(self, done: int, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, text=text)

    def say(self, line: str) -> None:
        """A line above the bar, or by itself."""
        if self.bar is not None:
            self.bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr)

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.stop()


class Progress:
    """What happens in a run: lines, and a bar while it trains."""

    def __init__(self) -> None:
        self.bar: Bar | None = None
        self.told = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__()
            self.bar = None

    def show(self, event: Any) -> None:
        from keepleft.runs import train as runs
        from keepleft.training.loop import Report

        if isinstance(event, str):
            self.say(event)
        elif isinstance(event, runs.Begun):
            self.__exit__()
            self.bar = Bar("training", event.steps).__enter__()
        elif isinstance(event, Report):
            self.report(event)
        elif isinstance(event, runs.Finished):
            self.__exit__()
            if event.measures:
                self.say("best, held out: " + "  ".join(f"{name} {value:.4f}" for name, value in event.measures.items()))
            self.say(event.said)
            print(event.folder if event.stopped else event.folder / "model")

    def watch(self, what: str, done: int, total: int | None) -> None:
        """The work before training: a bar for each kind, in megabytes of text."""
        if self.bar is None or self.bar.what != what:
            self.__exit__()
            self.bar = Bar(what, None if total is None else max(1, total >> 20)).__enter__()
        self.bar.at(done >> 20, "MB")

    def report(self, report: Any) -> None:
        for note in report.notes:
            self.say(note)
        text = (f"loss {report.loss:.3f}  accuracy {report.accuracy:.1%}  {report.speed:,.0f} tokens/s"
                + (f"  {report.share:.0%} of peak" if report.share else ""))
        if report.measures:
            told = "  ".join(f"{name} {value:.4f}" for name, value in report.measures.items())
            self.say(f"step {report.step}, held out: {told}{'  (best)' if report.best else ''}")
        if self.bar is not None:
            self.bar.at(report.step, text)
        if not sys.stderr.isatty() and (report.last or time.monotonic() - self.told > 10):
            self.told = time.monotonic()
            self.say(f"step {report.step}  {text}")

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.say(line)
        else:
            print(line, file=sys.stderr)
