"""keepleft generate"""

from __future__ import annotations

import sys

from keepleft.cli import text_io
from keepleft.cli.generate_texts import GenerateFlags, generate_texts
from keepleft.cli.paths import installed_weights
from keepleft.decoding.generation_config import GenerationConfig


def generate_text(inputs: list[str], options: GenerationConfig, flags: GenerateFlags) -> int:
    """Continue a text.

    Args:
        inputs: a model (a directory, a GGUF file, the name of an installed model or of one on the Hugging
            Face hub), then texts. Without a model, the best installed one; without texts, the lines of
            --input or stdin
    """
    model, texts = text_io.split_model_and_texts(inputs, require_model=False, file=flags.input)
    return generate_texts(best_installed() if model is None else model, texts, options, flags)


def best_installed() -> str:
    """Path of the largest language model that is installed as a package."""
    installed = {name: path for name, path in installed_weights().items() if path.suffix == ".gguf"}
    if not installed:
        raise ValueError(
            "no model was named, and none is installed: give a model directory first, or `make weights`"
        )
    name, path = max(installed.items(), key=lambda item: item[1].stat().st_size)
    print(f"using {name}, which is installed", file=sys.stderr)
    return str(path)
