"""Messages typed at a terminal, with readline's editing and history, or read from a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TextIO

PROMPT = "> "
CONTINUATION_PROMPT = ". "
QUOTES = '"""'
MAX_HISTORY_LINES = 1000


class MessageInput:
    """Reads one message after the other; `history_file` keeps what was typed for the next time.

    A message goes on in the next line after a backslash at its end, and from three quotes to three quotes.
    """

    def __init__(self, stream: TextIO, *, history_file: Path | None, completions: Sequence[str]) -> None:
        self.stream = stream
        self.is_interactive = stream.isatty() and sys.stdout.isatty()
        self.history_file = history_file
        self.readline = _load_readline() if self.is_interactive else None
        if self.readline is not None:
            _complete(self.readline, completions)
            if history_file is not None:
                _read_history(self.readline, history_file)

    def read(self) -> str | None:
        """The next message; None at the end. Raises KeyboardInterrupt for Ctrl-C at the prompt."""
        line = self._read_line(PROMPT)
        if line is None:
            return None
        if line.startswith(QUOTES):
            return self._read_quoted(line.removeprefix(QUOTES))
        lines = []
        while line is not None and line.endswith("\\"):
            lines.append(line[:-1])
            line = self._read_line(CONTINUATION_PROMPT)
        return "\n".join([*lines, *([] if line is None else [line])])

    def close(self) -> None:
        """Save the history. Raises OSError where that is impossible."""
        if self.readline is None or self.history_file is None:
            return
        self.history_file.parent.mkdir(parents=True, exist_ok=True)
        self.history_file.touch(mode=0o600)  # what one typed is one's own
        self.readline.set_history_length(MAX_HISTORY_LINES)
        self.readline.write_history_file(self.history_file)

    def _read_quoted(self, line: str | None) -> str:
        lines = []
        while line is not None and not line.endswith(QUOTES):
            lines.append(line)
            line = self._read_line(CONTINUATION_PROMPT)
        return "\n".join([*lines, *([] if line is None else [line.removesuffix(QUOTES)])]).strip("\n")

    def _read_line(self, prompt: str) -> str | None:
        if self.is_interactive:
            try:
                return input(prompt)
            except EOFError:
                return None
        line = self.stream.readline()
        return line.rstrip("\r\n") if line else None


def user_state_folder() -> Path:
    """The folder for what a program remembers of a user between its runs."""
    if sys.platform == "win32":
        folder = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
    else:
        folder = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(folder) / "keepleft"


def _load_readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # not on Windows, whose terminal edits lines itself
        return None
    return readline


def _complete(readline: ModuleType, completions: Sequence[str]) -> None:
    """Complete the first word of a line by the Tab key."""

    def complete(text: str, state: int) -> str | None:
        matches = [word for word in completions if text and word.startswith(text)]
        return f"{matches[state]} " if state < len(matches) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" ")
    is_libedit = "libedit" in (readline.__doc__ or "")
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")


def _read_history(readline: ModuleType, file: Path) -> None:
    try:
        readline.read_history_file(file)
    except OSError:  # there is none yet, or another program has written it
        return
