"""Input and output of commands: texts from arguments, a file or stdin; results as lines of text or JSON."""

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

from keepleft.cli.paths import WEIGHT_PACKAGES, installed_weights, is_on_disk, similar_name

HUB_NAME = re.compile(  # owner/name or owner/name@revision
    r"(?=[^/]*[a-z])\w[\w.-]*/(?=.*[a-z])[\w.-]*\w(@[\w./-]+)?", re.ASCII | re.IGNORECASE
)
MODEL_PATH = re.compile(r"[~.]{0,2}/\S+|[^\s:]+/[^\s:]+/\S+|[^\s:]+\.gguf")  # no text starts like this
MODEL_SUFFIXES = (".gguf", ".json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
NAME_LIKE = re.compile(r"[a-z][A-Z]|[-_\d]")  # typical of names, not of words


def split_model_and_texts(
    arguments: list[str], *, require_model: bool, file: str | None = None
) -> tuple[str | None, list[str]]:
    """The model and the texts among positional arguments.

    Where a model is not required, the first argument is one only if it looks like a path or a name. `file` is
    that of --input. Raises ValueError if a required model is missing, or if a name seems misspelt.
    """
    if not arguments:
        if require_model:
            raise ValueError(
                "say which model: a directory, a GGUF file, an installed model or a name on the Hugging Face "
                "hub comes first"
            )
        return None, []
    first, *texts = arguments
    if not is_on_disk(first) and (installed := installed_weights().get(first)):
        return str(installed), texts
    if require_model:
        return first, texts
    if is_text_file(first):
        raise ValueError(f"{first} is a file, not a model: to read texts from it, give --input {first}")
    if looks_like_path(first) or _is_hub_name(arguments, file):
        return first, texts
    if not re.search(r"\s", first):
        _check_single_word(first, texts, file)
    return None, arguments


def is_text_file(path: str) -> bool:
    """Is it a file, and none of a model?"""
    return os.path.isfile(path) and Path(path).suffix not in MODEL_SUFFIXES


def looks_like_path(text: str) -> bool:
    """Is it a model on this machine, several as MODEL1,MODEL2, or a path, even if nothing is there?"""
    return (
        text in WEIGHT_PACKAGES
        or os.path.exists(text)
        or bool(MODEL_PATH.fullmatch(text))
        or _is_model_list(text)
    )


def _check_single_word(word: str, texts: list[str], file: str | None) -> None:
    """Raise ValueError for a word in place of a model that is nearly a model's name.

    Print a note where other texts follow it, so that it may have been meant as a model.
    """
    if not texts and file is None and not NAME_LIKE.search(word):
        return
    if suggestion := similar_name(word, installed_weights()):
        raise ValueError(f"no model is called {word!r}: did you mean {suggestion}?")
    if texts:
        is_unquoted = not any(re.search(r"\s", text) for text in texts)
        hint = "; a text with spaces goes into quotes" if is_unquoted else ""
        print(
            f"note: no model is called {word!r}, so it is the first of {len(texts) + 1} texts{hint}",
            file=sys.stderr,
        )


def _is_model_list(text: str) -> bool:
    """Is this MODEL1,MODEL2? Then each of them is on this machine."""
    names = text.split(",")
    return len(names) > 1 and all(os.path.exists(name) or name in installed_weights() for name in names)


def _is_hub_name(arguments: list[str], file: str | None) -> bool:
    """Is the first argument a name on the hub?

    Two plain words, as in and/or, are one only if there are other texts to work on, or if the first word is a
    folder: then the second is meant to be in it, and missing.
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


def reads_terminal(texts: list[str], file: str | None) -> bool:
    """Whether `read_lines` will wait for lines that someone types."""
    return not texts and file in (None, "", "-") and sys.stdin.isatty()


def read_lines(texts: list[str], file: str | None) -> Iterator[str]:
    """The texts of the command line, or else the lines of a file or of stdin."""
    if texts and file:
        number = "a text" if len(texts) == 1 else f"{len(texts)} texts"
        raise ValueError(f"{number} and --input {file} were given: leave one of them out")
    if texts:
        yield from texts
    elif file and file != "-":
        with Path(file).open(encoding="utf-8") as stream:
            yield from _strip_newlines(stream, file)
    else:
        if reads_terminal(texts, file):
            print("reading texts from the terminal, one per line; Ctrl-D ends", file=sys.stderr)
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
    """Open stdout, or a file that is written completely or not at all."""
    if path is None or path == "-":
        yield sys.stdout
        return
    from keepleft.disk import atomic

    with atomic.atomic_file(Path(path)) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file


def as_line(text: str, multiple: bool) -> str:
    """The text, on one line if there are several: line n of the output belongs to line n of the input.

    --json keeps line breaks as they are.
    """
    return text.replace("\n", "\\n").replace("\r", "\\r") if multiple else text


def quote(text: str) -> str:
    """The text in quotes, as in JSON: a space at its end and a line break can be seen."""
    return json.dumps(text, ensure_ascii=False)


def as_json(record: dict[str, Any]) -> str:
    """The record as one line of JSON, without the fields that are None."""
    present = {name: value for name, value in record.items() if value is not None}
    return json.dumps(present, ensure_ascii=False)
