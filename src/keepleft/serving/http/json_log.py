"""The log of a server: one JSON object per line on stderr, which the lines of uvicorn and asyncio join."""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from typing import Any, Literal, get_args

from keepleft.serving.http.log_writer import LogWriter, write_to_descriptor
from keepleft.serving.http.middleware.request_log import Log, log_line

LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)


def make_log_writer(replica: str | None = None) -> LogWriter:
    """Writes to stderr, whoever reads it or does not."""

    def describe_dropped(num_lines: int) -> str:
        message = f"{num_lines} lines of the log were dropped: nobody read them in time"
        return _format_line("warning", {"dropped": num_lines, "message": message}, replica)

    if sys.__stderr__ is None:  # it is closed, and its number may be that of a connection
        return LogWriter(lambda line: None, describe_dropped)
    return LogWriter(partial(write_to_descriptor, sys.__stderr__.fileno()), describe_dropped)


def make_log(level: LogLevel, writer: LogWriter, replica: str | None = None) -> Log:
    """A log of the lines from this level on; `replica`: the name of this server among several."""
    threshold = LOG_LEVELS.index(level)

    def log(level: str, fields: dict[str, Any]) -> None:
        if LOG_LEVELS.index(level) >= threshold:  # type: ignore[arg-type]
            writer.write(_format_line(level, fields, replica))

    class JSONLogHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            name = record.levelname.lower()
            fields = {"logger": record.name, "message": record.getMessage()}
            log(name if name in LOG_LEVELS else "error", fields)

    for name in ("uvicorn", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [JSONLogHandler()]
        logger.propagate = False
        logger.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    return log


def _format_line(level: str, fields: dict[str, Any], replica: str | None) -> str:
    if replica is not None:
        fields = {**fields, "replica": replica}
    return json.dumps(log_line(level, fields), ensure_ascii=False) + "\n"
