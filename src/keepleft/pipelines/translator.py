"""Translate texts of any length with a model of several languages: `keepleft translate --to fr`.

A text is cut into sentences, since that is what translation models learn from; white space and blank lines
between them stay. What is to be copied is protected by placeholders, if the model knows them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.disk.encode_text import encode_text
from keepleft.pipelines.language_guess import guess_language
from keepleft.pipelines.number_notation import convert_number
from keepleft.pipelines.placeholders import (
    EMOJI,
    PLACEHOLDERS,
    ProtectedText,
    cut_around_copied,
    is_complete,
    protect,
    restore,
)
from keepleft.pipelines.sentence_form import SentenceForm, usual_form
from keepleft.pipelines.sentence_splitter import Sentence, split_clauses, split_in_two, split_sentences
from keepleft.pipelines.text_generation import GenerationResult, TextGenerator

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ResultT = TypeVar("ResultT", bound=Any)  # a dataclass with a field `text`

MAX_SENTENCE_WORDS = 30  # longer sentences are cut into clauses
MIN_CLAUSE_WORDS = 3  # of a sentence that is cut because its translation lost a placeholder
NUM_CANDIDATES = 4  # translations of such a sentence, of which the first complete one is taken
MAX_GUESSED_CHARACTERS = 500  # of a text, to guess its language from
_EDGES = re.compile(rf"((?:\s|{EMOJI})*)(.*?)((?:\s|{EMOJI})*)", re.DOTALL)
_TAG = re.compile(r"<2(\w+)>")
LANGUAGE_NAMES = {"en": "English", "fr": "French", "de": "German", "hi": "Hindi"}
_LANGUAGE_CODES = {name.lower(): code for code, name in LANGUAGE_NAMES.items()}
# invisible characters that web pages have and training texts have not, and typographic apostrophes
_CHARACTERS = str.maketrans(
    {**dict.fromkeys("\u200b\u00ad\ufeff"), **dict.fromkeys("\u00a0\u202f", " "), "’": "'"}
)


class PreparedSentence(NamedTuple):
    """A sentence as the model wants it."""

    protected: ProtectedText
    form: SentenceForm

    @property
    def text(self) -> str:
        return self.protected.text

    def restore(self, translation: str, language: str) -> str:
        """The translation with what was copied, in the form that the sentence had."""
        return self.form.undo(restore(self.protected, translation, language))

    def without_placeholders(self) -> PreparedSentence:
        return self._replace(protected=ProtectedText(restore(self.protected, self.text)))


class TranslationRound(NamedTuple):
    """What the model has to translate, and how many translations of each are wanted, best first."""

    sources: list[str]
    num_candidates: int = 1


class TextPart(NamedTuple):
    """A part of a text: a sentence to translate, or what stands between sentences, to keep."""

    text: str
    is_sentence: bool


def target_languages(tokenizer: Tokenizer) -> dict[str, str]:
    """The languages that a model writes, with the tag of each: those of the special tokens <2fr>, <2de>, …"""
    tags = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return {match[1]: tag for tag in tags if (match := _TAG.fullmatch(tag))}


def name_languages(codes: Iterable[str]) -> str:
    """The languages of a message: en (English), fr (French)."""
    return ", ".join(f"{code} ({LANGUAGE_NAMES.get(code, code)})" for code in codes)


def require_language(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Raise ValueError if the model has language tags, and a text starts with none of them."""
    languages = target_languages(tokenizer)
    tags = tuple(languages.values())
    if tags and not all(text.lstrip().startswith(tags) for text in texts if text.strip()):
        example = next((code for code in languages if code != "en"), "en")
        raise ValueError(
            f"this model writes {name_languages(languages)}: say which language to write, "
            f"as in --to {example}"
        )


def knows_placeholders(tokenizer: Tokenizer) -> bool:
    """Whether placeholders are tokens of their own, as they are where a model was trained with them."""
    return all(len(encode_text(tokenizer, mark, add_special_tokens=False)) == 1 for mark in PLACEHOLDERS)


def with_candidates(options: GenerationConfig, num_candidates: int) -> GenerationConfig:
    """Options that return this many candidates, or as many as they have beams or another strategy allows."""
    if num_candidates <= options.num_sequences or options.penalty_alpha:
        return options
    return options.with_num_sequences(
        min(num_candidates, options.beam_count) if options.beam_count > 1 else num_candidates
    )


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
    """A clause without the white space and the emoji around it, which no translation changes."""
    match = _EDGES.fullmatch(clause.text)
    assert match is not None
    begin, text, end = match.groups()
    return [
        TextPart(begin, False),
        TextPart(text, bool(re.search(r"\w", text))),  # "…" needs no translation
        TextPart(end + clause.space, False),
    ]


@dataclass(frozen=True)
class TaggedTextGenerator(TextGenerator):
    """A text generator whose texts name the language to write: each starts with a tag of the model.

    Raises ValueError for a text that does not, if the model has language tags.
    """

    def prompt(self, text: str, tag: str | None) -> str | list[int]:
        if (tag or self.tag) is None:
            require_language(self.input_tokenizer, [text])
        return super().prompt(text, tag)


class Translator:
    """A text generator that writes one language: `to` is its code, such as fr.

    `pivot` is the language that a model translates to and from, if it knows no pair without it: texts in
    others get a warning. Raises ValueError if the model does not write that language.
    """

    def __init__(self, generator: TextGenerator, to: str, *, pivot: str | None = None) -> None:
        languages = target_languages(generator.input_tokenizer)
        to = _LANGUAGE_CODES.get(to.lower(), to)
        if to.lower() not in languages:
            known = name_languages(languages)
            raise ValueError(
                f"this model does not write {to!r}: "
                + (f"there are {known}" if known else "it has no language tags, so leave --to out")
            )
        self.to = to.lower()
        self.pivot = pivot
        self.generator = replace(generator, tag=languages[to.lower()])
        self.uses_placeholders = knows_placeholders(generator.input_tokenizer)

    @property
    def keeps_blank_texts(self) -> bool:
        return True

    def resolve(self, options: GenerationConfig) -> GenerationConfig:
        return self.generator.resolve(options)

    def generate(
        self, texts: Sequence[str], options: GenerationConfig, **details: Any
    ) -> list[list[GenerationResult]]:
        """The translations of each text, best first; blank texts stay as they are.

        `details` are those of `TextGenerator.generate`. Where they, or several translations, are asked for, a
        text is translated as a whole and not sentence by sentence.
        """
        if (note := self.language_note(texts)) is not None:
            warnings.warn(note, stacklevel=2)
        whole = options.num_sequences > 1 or any(value for value in details.values())
        rounds = self.rounds(texts, _join, whole=whole)
        try:
            sources, num_candidates = next(rounds)
            while True:
                round_options = with_candidates(options, num_candidates)
                results = self.generator.generate(sources, round_options, **details)
                sources, num_candidates = rounds.send(results)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    def rounds(
        self, texts: Sequence[str], join: Callable[[Sequence[ResultT | str]], ResultT], *, whole: bool = False
    ) -> Generator[TranslationRound, list[list[ResultT]], list[list[ResultT]]]:
        """Yield what the model has to translate, be sent the results of each, and return those of the texts.

        A result is a dataclass with a field `text`; `join` makes one of those of several sentences and what
        stands between them.
        """
        parts = [[TextPart(text, bool(text.strip()))] if whole else split_text(text) for text in texts]
        sentences = list(dict.fromkeys(part.text for row in parts for part in row if part.is_sentence))
        translations = yield from self._translate_sentences(sentences, join, n_best=whole)
        return [
            translations[row[0].text]
            if len(row) == 1 and row[0].is_sentence
            else [join([translations[part.text][0] if part.is_sentence else part.text for part in row])]
            for row in parts
        ]

    def _translate_sentences(
        self,
        sentences: list[str],
        join: Callable[[Sequence[ResultT | str]], ResultT],
        *,
        n_best: bool = False,
    ) -> Generator[TranslationRound, list[list[ResultT]], dict[str, list[ResultT]]]:
        """The results of each sentence. One that loses a placeholder is tried again: with the next best
        candidates, then clause by clause, then in parts that have one placeholder, or are one (none of it
        with `n_best`). A sentence with more to copy than there are placeholders is cut at once.
        """
        out: dict[str, list[ResultT]] = {}
        prepared = {sentence: self.prepare(sentence) for sentence in sentences}
        sources = {
            sentence: source
            for sentence, source in prepared.items()
            if n_best or not source.protected.is_partial
        }
        for num_candidates in (1,) if n_best else (1, NUM_CANDIDATES):
            if not sources:
                break
            results = yield TranslationRound([source.text for source in sources.values()], num_candidates)
            for (sentence, source), candidates in zip(list(sources.items()), results, strict=True):
                best = next(
                    (result for result in candidates if is_complete(source.protected, result.text)), None
                )
                if best is not None and (best is candidates[0] or not n_best):
                    out[sentence] = self._restore(source, candidates if n_best else [best])
                    del sources[sentence]
        for sentence in [] if n_best else list(sources):
            clauses = split_in_two(sentence, MIN_CLAUSE_WORDS)
            if len(clauses) == 1:
                continue
            translations = yield from self._translate_sentences([clause.text for clause in clauses], join)
            pieces = [(translations[clause.text][0], clause.space) for clause in clauses]
            out[sentence] = [join([part for piece in pieces for part in piece])]
            del sources[sentence]
        for sentence in [] if n_best else [sentence for sentence in prepared if sentence not in out]:
            if (result := (yield from self._translate_around_copied(sentence, join))) is not None:
                out[sentence] = [result]
                sources.pop(sentence, None)
        if sources:
            plain = {sentence: source.without_placeholders() for sentence, source in sources.items()}
            results = yield TranslationRound([source.text for source in plain.values()])
            for (sentence, source), candidates in zip(plain.items(), results, strict=True):
                out[sentence] = self._restore(source, candidates)
        return out

    def _translate_around_copied(
        self, sentence: str, join: Callable[[Sequence[ResultT | str]], ResultT]
    ) -> Generator[TranslationRound, list[list[ResultT]], ResultT | None]:
        """The result of a sentence from those of its parts between what is copied; None if nothing is."""
        if not self.uses_placeholders:
            return None
        language = self._source_language(sentence)
        cut = cut_around_copied(sentence.translate(_CHARACTERS), language)
        if len(cut) == 1 and not cut[0].is_copied:
            return None
        parts: list[TextPart] = []
        for part in cut:
            is_text = not part.is_copied
            text = part.text if is_text else convert_number(part.text, language, self.to)
            parts += _parts(Sentence(text, "")) if is_text else [TextPart(text, False)]
        texts = [part.text for part in parts if part.is_sentence]
        translations = yield from self._translate_sentences(texts, join)
        return join([translations[part.text][0] if part.is_sentence else part.text for part in parts])

    def _restore(self, source: PreparedSentence, candidates: list[ResultT]) -> list[ResultT]:
        return [replace(result, text=source.restore(result.text, self.to)) for result in candidates]

    def has_limit(self, options: GenerationConfig) -> bool:
        return self.generator.has_limit(options)

    def stream(
        self, text: str, options: GenerationConfig, *, on_token: Callable[[int], object] = lambda token: None
    ) -> Iterator[str]:
        """The translation of one text, sentence by sentence; `on_token` is called with each token."""
        for part in split_text(text):
            if not part.is_sentence:
                yield part.text
                continue
            result = self.generate([part.text], options)[0][0]
            for token in result.tokens:
                on_token(token)
            yield result.text

    def plot(self, path: Path, text: str, options: GenerationConfig) -> Path:
        return self.generator.plot(path, text, options)

    def prepare(self, sentence: str) -> PreparedSentence:
        """The sentence as the model wants it."""
        text = sentence.translate(_CHARACTERS)
        if not self.uses_placeholders:  # nothing is known about what the model has learned
            return PreparedSentence(ProtectedText(text), SentenceForm(text))
        form = usual_form(text)
        return PreparedSentence(protect(form.text, self._source_language(form.text)), form)

    def _source_language(self, text: str) -> str:
        """The language whose numbers a text has: German and French ones are read alike."""
        return guess_language(text) or ("de" if self.to == "en" else "en")

    def language_note(self, texts: Sequence[str]) -> str | None:
        """What is to be said of the first text in a language that the model does not translate from here."""
        if self.pivot is None:
            return None
        for text in texts:
            language = guess_language(text[:MAX_GUESSED_CHARACTERS])
            if language is None or (language != self.to and self.pivot in (language, self.to)):
                continue
            name, pivot = LANGUAGE_NAMES[language], LANGUAGE_NAMES[self.pivot]
            if language != self.to:
                problem = (
                    f"this model translates to and from {pivot} only: translate --to {self.pivot} first, "
                    f"and the result --to {self.to}"
                )
            else:
                outcome = "say the same in other words" if language == self.pivot else f"be in {pivot}"
                problem = f"that is the language to write: the output may {outcome}"
            return f"{text[:40]!r} looks like {name}, and {problem}"
        return None


def _join(parts: Sequence[GenerationResult | str]) -> GenerationResult:
    """One result from those of the sentences and what stands between them."""
    results = [part for part in parts if isinstance(part, GenerationResult)]
    return GenerationResult(
        "".join(part if isinstance(part, str) else part.text for part in parts),
        [token for result in results for token in result.tokens],
        sum(result.score for result in results),
        all(result.ended for result in results),
        [token for result in results for token in result.prompt],
    )
