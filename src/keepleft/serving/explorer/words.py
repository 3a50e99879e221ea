"""Texts into tokens and tokens into something to read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from keepleft.decoding.generate import encoded, settled
from keepleft.decoding.options import Options, start_of
from keepleft.runs.spelled import in_turn, spelled
from keepleft.runs.using import Voice
from keepleft.serving.explorer.given import TOKENS

Token = dict[str, Any]  # id, text, special
TAG = re.compile(r"(<2[^<>\s]{1,40}>)[ \t]*(.*)", re.DOTALL)  # before a source: which language to write
MOST = 300_000  # words of a vocabulary


class Words:
    """The tokens of one model."""

    def __init__(self, voice: Voice) -> None:
        self.voice = voice
        self._spelt = lru_cache(maxsize=16)(self._spell)  # who goes on token by token asks for the same prompt each time

    @property
    def options(self) -> Options:
        """What the model directory says of writing."""
        return settled(self.voice.model, None, {})

    @property
    def begun(self) -> list[int]:
        """What a text of an encoder-decoder begins with; nothing for others."""
        return [start_of(self.options)] if self.voice.pair else []

    # texts to tokens

    def prompt(self, text: str) -> list[int]:
        """The text that a model goes on with, or the source that it writes from; one that is too long is refused."""
        row, = encoded(self.voice.model, self.voice.reading, [self._tagged(text)], self.options)
        if len(row) > TOKENS:
            raise ValueError(f"the text has {len(row):,} tokens: give at most {TOKENS:,}")
        return row

    def read(self, text: str) -> list[int]:
        """A text to look at, whole: what a decoder was given, or what an encoder-decoder has written."""
        if self.voice.pair:
            return [*self.begun, *self.voice.tokenizer.encode(text, add_special_tokens=False).ids]
        first = None if self.voice.model.design.decoder is None else self.options.first
        row = list(self.voice.tokenizer.encode(text).ids) or ([] if first is None else [first])
        if not row:
            raise ValueError("the text is empty: give some text to read")
        return row

    def source(self, text: str) -> list[int]:
        """A source to look at, whole."""
        given = self._tagged(text)
        row = list(self.voice.reading.encode(given).ids) if isinstance(given, str) else given
        if not row:
            raise ValueError("the source is empty: give some text to read")
        return row

    def _tagged(self, text: str) -> str | list[int]:
        """A source may begin with the tag that names a language, such as <2fr>, where the tokenizer knows it."""
        if self.voice.pair and (found := TAG.fullmatch(text)) and self.voice.reading.token_to_id(found[1]) is not None:
            return self.voice.prompt(found[2], found[1])
        return text

    # tokens to words

    @cached_property
    def special(self) -> frozenset[int]:
        return _special(self.voice.tokenizer)

    @cached_property
    def source_special(self) -> frozenset[int]:
        return _special(self.voice.reading)

    def shown(self, tokens: Sequence[int], before: Sequence[int] = ()) -> list[Token]:
        """Tokens of a text, as they read one after the other."""
        words = self._spelt(False, (*before, *tokens), len(before))
        return [self._token(n, word, self.special) for n, word in zip(tokens, words, strict=True)]

    def source_shown(self, tokens: Sequence[int]) -> list[Token]:
        words = self._spelt(True, tuple(tokens), 0)
        return [self._token(n, word, self.source_special) for n, word in zip(tokens, words, strict=True)]

    def after(self, before: Sequence[int], tokens: Sequence[int]) -> list[Token]:
        """Tokens as each would read after the same text."""
        words = spelled(self.voice.tokenizer, before, tokens)
        return [self._token(n, word, self.special) for n, word in zip(tokens, words, strict=True)]

    def all(self) -> list[str]:
        """The word of each token, as it would read in the middle of a text: with the space before it."""
        size = min(self.voice.model.design.vocab, MOST)
        before = self.voice.tokenizer.encode("a", add_special_tokens=False).ids
        return spelled(self.voice.tokenizer, before, range(size))

    def _spell(self, source: bool, tokens: tuple[int, ...], begin: int) -> list[str]:
        return in_turn(self.voice.reading if source else self.voice.tokenizer, tokens, begin)

    def _token(self, number: int, word: str, special: frozenset[int]) -> Token:
        return {"id": int(number), "text": word, "special": number in special}


def _special(tokenizer: Any) -> frozenset[int]:
    return frozenset(n for n, token in tokenizer.get_added_tokens_decoder().items() if token.special)
