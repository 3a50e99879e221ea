"""keepleft translate"""

from __future__ import annotations

from keepleft.cli import text_io
from keepleft.cli.generate_texts import GenerateFlags, generate_texts
from keepleft.decoding.generation_config import GenerationConfig


def translate(
    inputs: list[str],
    options: GenerationConfig,
    flags: GenerateFlags,
    tag: str | None = None,
    alignments: bool = False,
) -> int:
    """Translate texts with an encoder-decoder.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts, the lines
            of --input or stdin
        tag: the language tag, a token, for a multilingual model
        alignments: print the source token that each token attends to most, as i-j pairs
    """
    model, texts = text_io.split_model_and_texts(inputs, require_model=True)
    assert model is not None
    return generate_texts(model, texts, options, flags, tag=tag, alignments=alignments)
