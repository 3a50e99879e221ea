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

from keepleft.cli.found import installed_weights

HUB = re.compile(r"(?=[^/]*[a-z])\w[\w.-]*/(?=.*[a-z])[\w.-]*\w", re.ASCII | re.IGNORECASE)  # owner/name
PATH = re.compile(r"[~.]{0,2}/\S+|[^\s:]+/[^\s:]+/\S+|[^\s:]+\.gguf")  # nobody begins a text like this
SPELLED = re.compile(r"[a-z][A-Z]|[-_\d]")  # as names are and words are not


def divided(words: list[str], *, need: bool, file: str | None = None) -> tuple[str | None, list[str]]:
    """The model and the texts of a command line. Where no model is needed, the first word is one only if it looks like it."""
    if words and not os.path.exists(words[0]) and (installed := installed_weights().get(words[0])):
        return str(installed), words[1:]
    if words and (need or os.path.exists(words[0]) or PATH.fullmatch(words[0]) or _hub_name(words, file)):
        return words[0], words[1:]
    if need:
        raise ValueError("say which model: a directory, a GGUF file, an installed model or a name on the Hugging Face hub "
                         "comes first")
    return None, words


def _hub_name(words: list[str], file: str | None) -> bool:
    """Is the first a name on the hub? Two plain words, as in and/or, are one only where there are other texts to go on with, or
    where the first of them is a folder: then the second is missing from it."""
    first = words[0]
    if not HUB.fullmatch(first):
        return False
    return (file is not None or bool(SPELLED.search(first)) or os.path.isdir(os.path.dirname(first))
            or not all(HUB.fullmatch(word) for word in words))


def lines(texts: list[str], file: str | None) -> Iterator[str]:
    """The texts to work on: those of the command line, or the lines of a file or of stdin."""
    if texts and file:
        raise ValueError(f"{len(texts)} texts and --input {file} were given: give one of them")
    if texts:
        yield from texts
    elif file and file != "-":
        with Path(file).open(encoding="utf-8") as opened:
            yield from _stripped(opened, file)
    else:
        if sys.stdin.isatty():
            print("reading from the terminal, a text a line; Ctrl-D ends", file=sys.stderr)
        yield from _stripped(sys.stdin, "stdin")


def _stripped(opened: TextIO, name: str) -> Iterator[str]:
    try:
        for line in opened:
            yield line.rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not UTF-8 ({error.reason} at byte {error.start}): convert it first") from error


def in_batches(items: Iterable[str], size: int) -> Iterator[list[str]]:
    stream = iter(items)
    while batch := list(islice(stream, size)):
        yield batch


@contextmanager
def delivered(path: str | None) -> Iterator[TextIO]:
    """Where results go: stdout, or a file that is there whole or not at all."""
    if path is None or path == "-":
        yield sys.stdout
        return
    from keepleft.disk import atomic

    with atomic.written(Path(path)) as part, part.open("w", encoding="utf-8") as file:
        yield file


def as_line(text: str, several: bool) -> str:
    """A text as one line where there are several, so that line n of the output belongs to line n of the input; --json keeps
    line breaks as they are."""
    return text.replace("\n", "\\n").replace("\r", "\\r") if several else text


def as_json(record: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in record.items() if value is not None}, ensure_ascii=False)
