"""The options of GenerationConfig as command-line flags: the option table's help texts are their help."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, get_type_hints

from keepleft.decoding.generation_config import GenerationConfig

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def add_generation_flags(parser: ArgumentParser) -> None:
    hints = get_type_hints(GenerationConfig)
    group = parser.add_argument_group(
        "generation options",
        "named as in Hugging Face's GenerationConfig; what is left out is taken from the model directory",
    )
    for field in fields(GenerationConfig):
        option = f"--{field.name}"
        help_text = field.metadata["help"]
        if hints[field.name] == bool | None:
            group.add_argument(option, nargs="?", const=True, type=bool, default=None, help=help_text)
        else:
            group.add_argument(option, type=hints[field.name], default=None, help=help_text)
