"""keepleft audit --explain: suspicious lines of Python files, which are not run."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from keepleft import __version__
from keepleft.cli import audit_targets
from keepleft.cli.help_pages import heading

if TYPE_CHECKING:
    from keepleft.auditing.static.hints import Hint

MAX_CODE_WIDTH = 200  # of a line that is shown
NO_VERDICT = "hints are no verdict: keepleft audit FILE.py:NAME runs the model and says what leaks"


def explain_files(inputs: list[str], *, json: bool, sarif: str | None, other_options: Collection[str]) -> int:
    """Print the hints for files and folders. Exit codes: 0, or 2 where one could not be read."""
    from keepleft.auditing.static.hints import find_hints

    if other_options:
        option = min(other_options).rstrip("_").replace("_", "-")
        raise ValueError(
            f"--{option} is for an audit that runs the model, which --explain does not: leave it out"
        )
    files = _files(inputs)
    found: list[Hint] = []
    errors: list[str] = []
    for file in files:
        try:
            hints = find_hints(file)
        except (OSError, ValueError) as error:
            errors.append(_explain_error(error))
            continue
        found += hints
        for hint in hints:
            print(dumps(asdict(hint), ensure_ascii=False) if json else _describe(hint))
    if not json and len(errors) < len(files):
        print(f"{_count(len(found), 'hint')} in {_count(len(files) - len(errors), 'file')}; {NO_VERDICT}")
    for message in errors:
        print(f"keepleft: {message}", file=sys.stderr)
    if sarif is not None:
        from keepleft.auditing.sarif import sarif as sarif_log
        from keepleft.disk import atomic

        with atomic.explain_os_error(sarif):
            Path(sarif).parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(Path(sarif), sarif_log(hints=found, failures=errors, version=__version__))
    return 2 if errors else 0


def _files(inputs: list[str]) -> list[Path]:
    """Every file once. Raises ValueError where there is none."""
    from keepleft.auditing.static.hints import python_files

    if not inputs:
        raise ValueError(
            "--explain needs Python files or folders, as in keepleft audit --explain my/model.py"
        )
    files: dict[Path, None] = {}
    for name in inputs:
        if audit_targets.is_code(name):
            module, _, function = name.rpartition(":")
            file = module if module.endswith(".py") else module.replace(".", "/") + ".py"
            raise ValueError(f"--explain reads whole files: give {file} without :{function}")
        found = list(python_files(Path(name)))
        if not found:
            raise ValueError(f"there is no Python file in the folder {name}: give another, or name a file")
        files |= dict.fromkeys(found)
    return list(files)


def _describe(hint: Hint) -> str:
    from textwrap import indent, wrap

    from keepleft.cli.help_pages import terminal_width

    message = "\n".join(
        wrap(hint.message, terminal_width() - 4, break_on_hyphens=False, break_long_words=False)
    )
    title = heading(f"{hint.path}:{hint.line}:{hint.column}")
    level = "" if hint.level == "warning" else f" ({hint.level})"
    return f"{title}: {hint.rule}{level}\n    {_printable(hint.code)}\n{indent(message, '    ')}\n"


def _printable(code: str) -> str:
    """The line as a terminal may show it: escape sequences of a file must not reach it."""
    shown = code if len(code) <= MAX_CODE_WIDTH else f"{code[:MAX_CODE_WIDTH]} …"
    return "".join(
        letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}" for letter in shown
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _explain_error(error: Exception) -> str:
    from keepleft.cli.usage_errors import explain_os_error

    return explain_os_error(error) if isinstance(error, OSError) else str(error)
