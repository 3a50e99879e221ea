"""The fields of GenerationConfig as command-line options; the comment beside each field is its help text."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def add_generation_flags(parser: ArgumentParser) -> None:
    help_texts = field_comments()
    hints = get_type_hints(GenerationConfig)
    group = parser.add_argument_group(
        "generation options",
        "named as in Hugging Face's GenerationConfig; what is left out is taken from the model directory",
    )
    for field in fields(GenerationConfig):
        option = f"--{field.name}"
        help_text = help_texts.get(field.name)
        if hints[field.name] == bool | None:
            group.add_argument(option, nargs="?", const=True, type=bool, default=None, help=help_text)
        else:
            group.add_argument(option, type=hints[field.name], default=None, help=help_text)


def field_comments() -> dict[str, str]:
    """The comment that follows each field of GenerationConfig in its source."""
    try:
        source = inspect.getsource(GenerationConfig)
    except OSError:  # a frozen application without source files
        return {}
    return dict(re.findall(r"^    (\w+): [^#\n]*?# (.*)$", source, re.M))
