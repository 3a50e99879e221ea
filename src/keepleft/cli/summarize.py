"""keepleft summarize"""

from __future__ import annotations

from keepleft.cli import text_io
from keepleft.cli.generate_texts import GenerateFlags, generate_texts
from keepleft.decoding.generation_config import SUMMARY_DEFAULTS, GenerationConfig


def summarize(inputs: list[str], options: GenerationConfig, flags: GenerateFlags) -> int:
    """Summarise texts with an encoder-decoder.

    Where neither an option nor the model directory says otherwise, a summary has at most half as many tokens
    as its text, and ten, and no three tokens in a row occur in it twice.

    Args:
        inputs: a model (a directory or a name on the Hugging Face hub), then texts; without texts, the lines
            of --input or stdin
    """
    model, texts = text_io.split_model_and_texts(inputs, require_model=True)
    assert model is not None
    return generate_texts(model, texts, options, flags, default_batch_size=8, defaults=SUMMARY_DEFAULTS)
