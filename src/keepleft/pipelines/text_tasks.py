"""What generate, translate and summarize make of a text generator: a chat template, tags, a language."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from keepleft.pipelines.chat import model_chat_template
from keepleft.pipelines.text_generation import TextGenerator
from keepleft.pipelines.translator import TaggedTextGenerator, Translator

DEFAULT_MAX_NEW_TOKENS = 256  # of a decoder, where neither the user nor the model directory sets a limit

Generator = TypeVar("Generator", bound=TextGenerator)


def for_messages(generator: Generator, *, raw: bool, system: str | None) -> Generator:
    """A generator that answers texts as messages, if its model has a chat template; `raw`: it never does.

    Raises ValueError for a system message where there is no template.
    """
    if raw or (system is None and model_chat_template(generator.model, generator.tokenizer) is None):
        return generator
    return generator.with_chat_template(system)  # type: ignore[return-value]


def for_translation(
    generator: TextGenerator,
    *,
    to: str | None,
    tag: str | None,
    pivot: str | None,
    tagged: type[TaggedTextGenerator] = TaggedTextGenerator,
) -> TextGenerator | Translator:
    """A translator into the language `to`, or without one a generator whose texts begin with `tag`.

    Raises ValueError for a decoder that has no languages.
    """
    if to is not None:
        return Translator(generator, to, pivot=pivot)
    if tag is None and not generator.is_encoder_decoder:
        raise ValueError(
            "this model continues texts and does not translate them: take an encoder-decoder, or ask "
            'an instruct model, as in keepleft generate MODEL "Translate into French: …"'
        )
    values = {field.name: getattr(generator, field.name) for field in fields(generator)}
    return tagged(**{**values, "tag": tag})


def for_summaries(generator: Generator) -> Generator:
    """The generator. Raises ValueError for a decoder."""
    if not generator.is_encoder_decoder:
        raise ValueError(
            "this model continues texts and does not summarize them: take an encoder-decoder, or ask an "
            'instruct model, as in keepleft generate MODEL "Summarize this text: …"'
        )
    return generator
