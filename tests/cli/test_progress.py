"""Progress bars: on a terminal, but never over what is typed there."""

from __future__ import annotations

import io
import re
import sys

import pytest

from decoding.words import byte_tokens, writer
from keepleft import save
from keepleft.auditing.progress import AuditProgress
from keepleft.auditing.report import Finding
from keepleft.cli import main, text_io
from keepleft.cli.progress import AuditBar, Bar, _describe_check

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


def audit_events() -> list[AuditProgress]:
    finding = Finding("future", 1, 3, 0.2, "eval", "conv", "position 1 reads position 3, its future.")
    at = {"number": 1, "num_checks": 7, "calls": 1412, "path": "train, batch 2, length 13"}
    return [
        AuditProgress("future", check="future", **at),
        AuditProgress("…", kind="finding", check="future", finding=finding, **at),
        AuditProgress("…", kind="outcome", check="future", outcome="leak", num_paths=12, **at),
        AuditProgress("…", kind="outcome", check="batch", outcome="clean", num_paths=1, **at),
        AuditProgress(
            "…", kind="outcome", check="labels", outcome="not applicable", reason="it takes none", **at
        ),
        AuditProgress("…", kind="path", check="nan", fraction=0.5, num_passes=2, **at),
    ]


def show_audit() -> None:
    with AuditBar() as bar:
        for event in audit_events():
            bar.show(event)


def test_an_audit_shows_what_it_checks_and_a_line_for_each_check_that_has_ended(monkeypatch):
    terminal = make_stderr_a_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "120")
    show_audit()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert [line for line in lines if not line.startswith("auditing")] == [
        "future   leak in conv: position 1 reads position 3, its future.",
        "batch    clean (1 path)",
        "labels   not applicable: it takes none",
    ]
    assert _describe_check(audit_events()[0]) == "1/7 future · train, batch 2, length 13 · 1,412 calls"
    assert _describe_check(audit_events()[-1]).startswith("1/7 nan, pass 1 of 2 · train")


def test_an_audit_is_quiet_where_stderr_is_no_terminal(capsys):
    show_audit()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("texts", "file", "expected"),
    [([], None, True), ([], "-", True), (["one"], None, False), ([], "texts.txt", False)],
)
def test_a_terminal_is_read_where_there_is_neither_a_text_nor_a_file(texts, file, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert text_io.reads_terminal(texts, file) is expected
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not text_io.reads_terminal(texts, file)
