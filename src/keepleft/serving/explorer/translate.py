"""Question that translates a text, sentence by sentence, with a model of several languages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.translator import (
    LANGUAGE_NAMES,
    Translator,
    require_language,
    split_text,
    target_languages,
)
from keepleft.serving.explorer.params import Params

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

MAX_TRANSLATED_CHARACTERS = 5_000


def language_names(explorer: Explorer) -> dict[str, str]:
    """The languages that the model writes, by code; empty for a model without language tags."""
    if not (explorer.is_generative and explorer.generator.is_encoder_decoder):
        return {}
    codes = target_languages(explorer.generator.input_tokenizer)
    return {code: LANGUAGE_NAMES.get(code, code) for code in codes}


def tag_source(explorer: Explorer, source: str | None, to: str | None) -> str | None:
    """The source with the tag of the language to write; of the example if there is no source.

    Raises ValueError if the model has language tags, and neither `to` nor the source names a language.
    """
    if to is None:
        if source is not None and language_names(explorer):
            require_language(explorer.generator.input_tokenizer, [source])
        return source
    tag = Translator(explorer.generator, to).generator.tag
    text = explorer.example.get("source", "") if source is None else source
    own_tag = next((own for own in _tags(explorer) if text.startswith(own)), None)
    if own_tag is not None and source is not None:
        raise ValueError(f"--to is {to}, and the source starts with {own_tag}: give one of them")
    return f"{tag} {text.removeprefix(own_tag or '').lstrip()}"


def _tags(explorer: Explorer) -> list[str]:
    return list(target_languages(explorer.generator.input_tokenizer).values())


def plain_note(note: str) -> str:
    """A note about the language, where there are fields and buttons and no options."""
    return note.replace("--to ", "to ")


def translate(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The translation of a text, and the sentences that it was put together from."""
    to = params.choice("to", list(language_names(explorer)))
    text = params.text("text", max_characters=MAX_TRANSLATED_CHARACTERS)
    translator = Translator(explorer.generator, to)
    note = Translator(explorer.generator, to, pivot=explorer.pivot).language_note([text])
    parts = split_text(text)
    sources = list(dict.fromkeys(part.text for part in parts if part.is_sentence))
    options = translator.resolve(GenerationConfig())
    targets = {source: translator.generate([source], options)[0][0].text for source in sources}
    return {
        "text": "".join(
            targets.get(part.text, part.text) if part.is_sentence else part.text for part in parts
        ),
        "sentences": [
            {
                "source": source,
                "target": target,
                "input": f"{translator.generator.tag} {translator.prepare(source).text}",
            }
            for source, target in targets.items()
        ],
        "warnings": [] if note is None else [plain_note(note)],
    }
