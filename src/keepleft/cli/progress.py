"""Progress on stderr: a bar on a terminal, and for training a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

    from keepleft.auditing.progress import AuditProgress
    from keepleft.training.loop import TrainReport

BAR_WIDTH = 40  # columns
NARROW_BAR_WIDTH = 20  # beside a long text
REPORT_SECONDS = 10.0  # between two lines about training, where there is no terminal


class Bar:
    """A progress bar on a terminal, nothing elsewhere.

    It is drawn again ten times a second, over whatever is typed meanwhile. So where the command reads what is
    typed (`reads_terminal`), there is none.
    """

    def __init__(
        self, label: str, total: float | None, *, reads_terminal: bool = False, shows_count: bool = True
    ) -> None:
        self.label = label
        self.total = total
        self.reads_terminal = reads_terminal
        self.shows_count = shows_count  # how many of the total, and the time that is left
        self.rich_progress: RichProgress | None = None

    def __enter__(self) -> Bar:
        if sys.stderr.isatty() and not self.reads_terminal:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress
            from rich.table import Column

            bar_width = BAR_WIDTH if self.shows_count else NARROW_BAR_WIDTH
            count_columns = (MofNCompleteColumn(), TimeRemainingColumn()) if self.shows_count else ()
            self.rich_progress = RichProgress(
                TextColumn(self.label),
                BarColumn(bar_width=bar_width, table_column=Column(min_width=bar_width)),
                *count_columns,
                TextColumn(
                    "{task.fields[text]}",
                    markup=False,
                    table_column=Column(no_wrap=True, overflow="ellipsis"),  # the bar keeps its width
                ),
                console=Console(stderr=True),
            )
            self.rich_progress.start()
            self.task = self.rich_progress.add_task(self.label, total=self.total, text="")
        return self

    @property
    def is_shown(self) -> bool:
        return self.rich_progress is not None

    def update(self, done: float, text: str) -> None:
        if self.rich_progress is not None:
            self.rich_progress.update(self.task, completed=done, text=text)

    def print_line(self, line: str) -> None:
        """Print a line to stderr, above the bar if there is one."""
        if self.rich_progress is not None:
            self.rich_progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr)

    def __exit__(self, *_: Any) -> None:
        if self.rich_progress is not None:
            self.rich_progress.stop()


class AuditBar:
    """A progress bar for one audit: what is being checked, and above it each check that has ended, and each
    finding. Nothing where there is no terminal.
    """

    def __init__(self) -> None:
        self.bar = Bar("auditing", 1.0, shows_count=False)

    def __enter__(self) -> AuditBar:
        self.bar.__enter__()
        return self

    def __exit__(self, *_: Any) -> None:
        self.bar.update(1.0, "")
        self.bar.__exit__()

    def show(self, progress: AuditProgress) -> None:
        if not self.bar.is_shown:
            return
        if progress.finding is not None:
            finding = progress.finding
            place = f" in {finding.module}" if finding.module else ""
            self.bar.print_line(f"{finding.kind:8} leak{place}: {finding.message}")
        elif progress.outcome is not None and progress.outcome != "leak":  # its findings have been printed
            self.bar.print_line(_describe_outcome(progress))
        self.bar.update(progress.fraction, _describe_check(progress))


def _describe_outcome(progress: AuditProgress) -> str:
    paths = f" ({progress.num_paths} path{'' if progress.num_paths == 1 else 's'})"
    return f"{progress.check:8} {progress.outcome}" + (f": {progress.reason}" if progress.reason else paths)


def _describe_check(progress: AuditProgress) -> str:
    check = f"{progress.number}/{progress.num_checks} {progress.check}"
    if progress.num_passes > 1:
        check += f", pass {progress.pass_number} of {progress.num_passes}"
    return " · ".join(part for part in (check, progress.path, f"{progress.calls:,} calls") if part)


class Progress:
    """Shows the events of a training run: lines, and a bar while it trains."""

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
        elif isinstance(event, train.TrainingPlan):
            self.__exit__()
            for line in event.lines():
                self.print_line(line)
        elif isinstance(event, train.TrainingStarted):
            self.__exit__()
            self.bar = Bar("training", event.steps).__enter__()
        elif isinstance(event, TrainReport):
            self.report(event)
        elif isinstance(event, train.TrainingFinished):
            self.__exit__()
            if event.measures:
                self.print_line(f"best, held out: {_format_measures(event.measures)}")
            self.print_line(event.summary)
            self.print_line("next:")
            for command in event.next_commands:
                self.print_line(f"  {command}")
            print(event.folder if event.stopped else event.folder / "model")

    def watch(self, label: str, done: int, total: int | None) -> None:
        """Progress of the work before training: a bar for each kind of work, in megabytes of text."""
        if self.bar is None or self.bar.label != label:
            self.__exit__()
            self.bar = Bar(label, None if total is None else max(1, total >> 20)).__enter__()
        self.bar.update(done >> 20, "MB")

    def report(self, report: TrainReport) -> None:
        for note in report.notes:
            self.print_line(note)
        speed = f"{report.tokens_per_second:,.0f} tokens/s"
        text = f"loss {report.loss:.3f}  accuracy {report.accuracy:.1%}  {speed}"
        if report.mfu:
            text += f"  MFU {report.mfu:.0%}"
        if report.measures:
            best = "  (best)" if report.best else ""
            self.print_line(f"step {report.step}, held out: {_format_measures(report.measures)}{best}")
        if self.bar is not None:
            self.bar.update(report.step, text)
        is_due = report.last or time.monotonic() - self.last_report_time > REPORT_SECONDS
        if not sys.stderr.isatty() and is_due:
            self.last_report_time = time.monotonic()
            self.print_line(f"step {report.step}  {text}")

    def print_line(self, line: str) -> None:
        if self.bar is not None:
            self.bar.print_line(line)
        else:
            print(line, file=sys.stderr)


def _format_measures(measures: Mapping[str, float]) -> str:
    formats = {"accuracy": ".1%"}
    return "  ".join(f"{name} {value:{formats.get(name, '.4f')}}" for name, value in measures.items())
