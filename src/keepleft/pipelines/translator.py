"""Translate texts of any length with a model of several languages: `keepleft translate --to fr`.

A text is cut into sentences, since that is what translation models learn from; white space and blank lines
between them stay. What is to be copied is protected by placeholders, if the model knows them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.disk.encode_text import encode_text
from keepleft.pipelines.placeholders import PLACEHOLDERS, ProtectedText, is_complete, protect, restore
from keepleft.pipelines.sentence_splitter import Sentence, split_clauses, split_sentences
from keepleft.pipelines.text_generation import GenerationResult, TextGenerator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_SENTENCE_WORDS = 30  # longer sentences are cut into clauses
_TAG = re.compile(r"<2(\w+)>")
LANGUAGE_NAMES = {"en": "English", "fr": "French", "de": "German", "hi": "Hindi"}
# invisible characters that web pages have and training texts have not, and typographic apostrophes
_CHARACTERS = str.maketrans({"\u200b": None, "\u200c": None, "\u00ad": None, "\ufeff": None, "\u00a0": " ", "\u202f": " ", "’": "'"})


class TextPart(NamedTuple):
    """A part of a text: a sentence to translate, or what stands between sentences, to keep."""

    text: str
    is_sentence: bool


def target_languages(tokenizer: Tokenizer) -> dict[str, str]:
    """The languages that a model writes, with the tag of each: those of the special tokens <2fr>, <2de>, …"""
    tags = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return {match[1]: tag for tag in tags if (match := _TAG.fullmatch(tag))}


def knows_placeholders(tokenizer: Tokenizer) -> bool:
    """Whether placeholders are tokens of their own, as they are where a model was trained with them."""
    return all(len(encode_text(tokenizer, f"{mark}")) == 1 for mark in PLACEHOLDERS)


def split_text(text: str) -> list[TextPart]:
    """The sentences of a text and what stands between them; put together they are the text."""
    out: list[TextPart] = []
    for line in re.split(r"(\s*\n\s*)", text):
        if not line or line.isspace():
            out.append(TextPart(line, False))
            continue
        for sentence in split_sentences(line):
            for clause in split_clauses(sentence.text, MAX_SENTENCE_WORDS):
                out += _parts(clause)
            out.append(TextPart(sentence.space, False))
    return [part for part in out if part.text]


def _parts(clause: Sentence) -> list[TextPart]:
    stripped = clause.text.strip()
    begin = clause.text.index(stripped) if stripped else len(clause.text)
    return [
        TextPart(clause.text[:begin], False),
        TextPart(stripped, bool(re.search(r"\w", stripped))),  # "…" needs no translation
        TextPart(clause.text[begin + len(stripped) :] + clause.space, False),
    ]


@dataclass(frozen=True)
class Translator:
    """A text generator with language tags."""

    generator: TextGenerator

    @cached_property
    def languages(self) -> dict[str, str]:
        return target_languages(self.generator.input_tokenizer)

    @cached_property
    def uses_placeholders(self) -> bool:
        return knows_placeholders(self.generator.input_tokenizer)

    def tag(self, language: str) -> str:
        """The tag of a language. Raises ValueError, with those that there are."""
        if language.lower() not in self.languages:
            known = ", ".join(f"{code} ({LANGUAGE_NAMES.get(code, code)})" for code in self.languages)
            raise ValueError(
                f"this model does not write {language!r}: "
                + (f"there are {known}" if known else "it has one target language; leave --to out")
            )
        return self.languages[language.lower()]

    def translate(self, texts: Sequence[str], to: str, options: GenerationConfig) -> list[str]:
        """The translation of each text; blank ones stay as they are."""
        tag = self.tag(to)
        parts = [split_text(text) for text in texts]
        sentences = list(dict.fromkeys(part.text for text_parts in parts for part in text_parts if part.is_sentence))
        translations = dict(zip(sentences, self._translate_sentences(sentences, tag, options), strict=True))
        return [
            "".join(translations[part.text] if part.is_sentence else part.text for part in text_parts)
            for text_parts in parts
        ]

    def _translate_sentences(self, sentences: Sequence[str], tag: str, options: GenerationConfig) -> list[str]:
        protected = [self.protect(sentence) for sentence in sentences]
        out = [
            restore(source, result.text)
            for source, result in zip(protected, self._generate([source.text for source in protected], tag, options), strict=True)
        ]
        ...
        return out

    def protect(self, sentence: str) -> ProtectedText:
        """The sentence as the model wants it."""
        text = sentence.translate(_CHARACTERS)
        return protect(text) if self.uses_placeholders else ProtectedText(text, ())

    def _generate(self, texts: Sequence[str], tag: str, options: GenerationConfig) -> list[GenerationResult]:
        return [results[0] for results in self.generator.generate(texts, options, tag=tag)] if texts else []
