"""Texts in and out of a command: from the line, a file or stdin; a line each, or JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from keepleft.cli.installed_weights import installed_weights

HUB_NAME = re.compile(r"(?=[^/]*[a-z])\w[\w.-]*/(?=.*[a-z])[\w.-]*\w", re.ASCII | re.IGNORECASE)  # owner/name
MODEL_PATH = re.compile(r"[~.]{0,2}/\S+|[^\s:]+/[^\s:]+/\S+|[^\s:]+\.gguf")  # nobody begins a text like this
NAME_LIKE = re.compile(r"[a-z][A-Z]|[-_\d]")  # as names are and words are not


def split_model_and_texts(
    arguments: list[str], *, require_model: bool, file: str | None = None
) -> tuple[str | None, list[str]]:
    """The model and the texts of a command line.

    Where no model is needed, the first word is one only if it looks like it.
    """
    if (
        arguments
        and not os.path.exists(arguments[0])
        and (installed := installed_weights().get(arguments[0]))
    ):
        return str(installed), arguments[1:]
    if arguments and (
        require_model
        or os.path.exists(arguments[0])
        or MODEL_PATH.fullmatch(arguments[0])
        or _is_hub_name(arguments, file)
    ):
        return arguments[0], arguments[1:]
    if require_model:
        raise ValueError(
            "say which model: a directory, a GGUF file, an installed model or a name on the Hugging Face hub "
            "comes first"
        )
    return None, arguments


def _is_hub_name(arguments: list[str], file: str | None) -> bool:
    """Is the first a name on the hub? Two plain words, as in and/or, are one only where there are other texts
    to go on with, or where the first of them is a folder: then the second is missing from it.
    """
    first = arguments[0]
    if not HUB_NAME.fullmatch(first):
        return False
    return (
        file is not None
        or bool(NAME_LIKE.search(first))
        or os.path.isdir(os.path.dirname(first))
        or not all(HUB_NAME.fullmatch(argument) for argument in arguments)
    )


def read_lines(texts: list[str], file: str | None) -> Iterator[str]:
    """The texts to work on: those of the command line, or the lines of a file or of stdin."""
    if texts and file:
        raise ValueError(f"{len(texts)} texts and --input {file} were given: give one of them")
    if texts:
        yield from texts
    elif file and file != "-":
        with Path(file).open(encoding="utf-8") as stream:
            yield from _strip_newlines(stream, file)
    else:
        if sys.stdin.isatty():
            print("reading from the terminal, a text a line; Ctrl-D ends", file=sys.stderr)
        yield from _strip_newlines(sys.stdin, "stdin")


def _strip_newlines(stream: TextIO, name: str) -> Iterator[str]:
    try:
        for line in stream:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name} is not UTF-8 ({error.reason} at byte {error.start}): convert it first"
        ) from error


def in_batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    stream = iter(items)
    while batch := list(islice(stream, size)):
        yield batch


@contextmanager
def open_output(path: str | None) -> Iterator[TextIO]:
    """Where results go: stdout, or a file that is there whole or not at all."""
    if path is None or path == "-":
        yield sys.stdout
        return
    from keepleft.disk import atomic

    with atomic.atomic_file(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


def as_line(text: str, multiple: bool) -> str:
    """A text as one line where there are several, so that line n of the output belongs to line n of the
    input; --json keeps line breaks as they are.
    """
    return text.replace("\n", "\\n").replace("\r", "\\r") if multiple else text


def as_json(record: dict[str, Any]) -> str:
    return json.dumps(
        {name: value for name, value in record.items() if value is not None}, ensure_ascii=False
    )
