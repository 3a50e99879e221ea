"""Progress bars: on a terminal, but never over what is typed there."""

from __future__ import annotations

import io
import sys

import pytest

from decoding.words import byte_tokens, writer
from keepleft import save
from keepleft.cli import main, text_io
from keepleft.cli.progress import Bar

ESCAPE = "\x1b"  # what a bar is drawn with


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_stderr_a_terminal(monkeypatch) -> Terminal:
    """Within a test: pytest has a standard error for each phase of it."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    return stderr


def draw(**options) -> None:
    with Bar("texts", 2, **options) as bar:
        bar.update(1, "")
        bar.print_line("note: one")


def test_a_bar_is_drawn_on_a_terminal_unless_the_command_reads_from_it(monkeypatch):
    terminal = make_stderr_a_terminal(monkeypatch)
    draw()
    assert ESCAPE in terminal.getvalue()
    terminal.seek(0)
    terminal.truncate()
    draw(reads_terminal=True)
    assert terminal.getvalue() == "note: one\n"


def test_nothing_is_drawn_where_stderr_is_no_terminal(capsys):
    draw()
    assert capsys.readouterr().err == "note: one\n"


def test_texts_typed_at_a_terminal_are_answered_one_by_one_without_a_bar(tmp_path, monkeypatch, capsys):
    tokens = byte_tokens()
    save(writer(tokens), tokens, tmp_path)
    terminal = make_stderr_a_terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdin", Terminal("one\ntwo\n"))
    assert main(["generate", str(tmp_path), "--max-new-tokens", "3"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert terminal.getvalue() == "reading texts from the terminal, one per line; Ctrl-D ends\n"


@pytest.mark.parametrize(
    ("texts", "file", "expected"),
    [([], None, True), ([], "-", True), (["one"], None, False), ([], "texts.txt", False)],
)
def test_a_terminal_is_read_where_there_is_neither_a_text_nor_a_file(texts, file, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert text_io.reads_terminal(texts, file) is expected
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not text_io.reads_terminal(texts, file)
