"""The options of generation on the command line, each under its own name, told by the comment beside its
field.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any, get_type_hints

from keepleft.decoding.generation_config import GenerationConfig


def add_generation_flags(parser: Any) -> None:
    help_texts, hints = field_comments(), get_type_hints(GenerationConfig)
    group = parser.add_argument_group(
        "how to write",
        "named as in Hugging Face's GenerationConfig; what the model directory "
        "says holds where nothing is said here",
    )
    for field in fields(GenerationConfig):
        if hints[field.name] == bool | None:
            group.add_argument(
                f"--{field.name}",
                nargs="?",
                const=True,
                type=bool,
                default=None,
                help=help_texts.get(field.name),
            )
        else:
            group.add_argument(
                f"--{field.name}", type=hints[field.name], default=None, help=help_texts.get(field.name)
            )


def collect_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command, with those that are options as one value."""
    names = {field.name for field in fields(GenerationConfig)}
    return {
        **{name: value for name, value in arguments.items() if name not in names},
        "options": GenerationConfig(**{name: value for name, value in arguments.items() if name in names}),
    }


def field_comments() -> dict[str, str]:
    """What stands beside each field of GenerationConfig in its source."""
    try:
        source = inspect.getsource(GenerationConfig)
    except OSError:  # a program packed without its source
        return {}
    return dict(re.findall(r"^    (\w+): [^#\n]*?# (.*)$", source, re.M))
