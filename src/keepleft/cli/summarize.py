"""keepleft summarize"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepleft.cli import text_io
from keepleft.cli.generate_texts import GenerateFlags, generate_texts
from keepleft.decoding.generation_config import SUMMARY_DEFAULTS, GenerationConfig

if TYPE_CHECKING:
    from keepleft.pipelines.text_generation import TextGenerator


def summarize(inputs: list[str], options: GenerationConfig, flags: GenerateFlags) -> int:
    """Summarize texts with an encoder-decoder.

    By default, a summary has at most about half as many tokens as its text.

    Args:
        inputs: a model (a folder, a GGUF file, an installed one, a name on the hub), then texts
    """
    model, texts = text_io.split_model_and_texts(inputs, require_model=True)
    assert model is not None
    return generate_texts(
        model,
        texts,
        options,
        flags,
        default_batch_size=8,
        prepare=_require_encoder_decoder,
        defaults=SUMMARY_DEFAULTS,
    )


def _require_encoder_decoder(generator: TextGenerator) -> TextGenerator:
    if not generator.is_encoder_decoder:
        raise ValueError(
            "this model continues texts and does not summarize them: take an encoder-decoder, or ask an "
            'instruct model, as in keepleft generate MODEL "Summarize this text: …"'
        )
    return generator
