"""Texts to tokens, and tokens to readable text: for display, and for questions about tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from keepleft.data.token_text import token_pieces, token_texts
from keepleft.decoding.batch import encode_prompts
from keepleft.decoding.generate import resolve_options
from keepleft.decoding.generation_config import GenerationConfig, decoder_start_token
from keepleft.disk.encode_text import encode_text
from keepleft.pipelines.text_generation import TextGenerator
from keepleft.serving.explorer.params import MAX_TOKENS, Params

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.serving.explorer.explorer import Explorer

TokenInfo = dict[str, Any]  # id, text, special
LANGUAGE_TAG = re.compile(r"(<2[^<>\s]{1,40}>)[ \t]*(.*)", re.DOTALL)  # before a source: the target language
MAX_VOCABULARY = 300_000  # tokens of one answer


class DisplayTokenizer:
    """Encodes texts as the model expects them, and describes tokens for the page."""

    def __init__(self, generator: TextGenerator) -> None:
        self.generator = generator
        # a page that continues a text token by token asks for the same prompt each time
        self._cached_token_texts = lru_cache(maxsize=16)(self._token_texts)

    @property
    def options(self) -> GenerationConfig:
        """Generation defaults of the model directory."""
        return resolve_options(self.generator.model, None, {})

    @property
    def start_tokens(self) -> list[int]:
        """The decoder start token of an encoder-decoder; empty for others."""
        return [decoder_start_token(self.options)] if self.generator.is_encoder_decoder else []

    # -- texts to tokens

    def encode_prompt(self, text: str) -> list[int]:
        """A text to continue, or the source of an encoder-decoder; ValueError if it is too long."""
        (tokens,) = encode_prompts(
            self.generator.model,
            self.generator.input_tokenizer,
            [self._encode_language_tag(text)],
            self.options,
        )
        if len(tokens) > MAX_TOKENS:
            raise ValueError(f"the text has {len(tokens):,} tokens: give at most {MAX_TOKENS:,}")
        return tokens

    def encode_text(self, text: str) -> list[int]:
        """A complete text to analyse: of a decoder the input, of an encoder-decoder the target."""
        if self.generator.is_encoder_decoder:
            tokens = encode_text(self.generator.tokenizer, text, add_special_tokens=False)
            return [*self.start_tokens, *tokens]
        first_token = None if self.generator.model.design.decoder is None else self.options.bos_or_eos
        tokens = encode_text(self.generator.tokenizer, text) or ([] if first_token is None else [first_token])
        if not tokens:
            raise ValueError("the text is empty: give some text to read")
        return tokens

    def encode_source(self, text: str) -> list[int]:
        """A complete source to analyse."""
        prompt = self._encode_language_tag(text)
        tokens = encode_text(self.generator.input_tokenizer, prompt) if isinstance(prompt, str) else prompt
        if not tokens:
            raise ValueError("the source is empty: give some text to read")
        return tokens

    def _encode_language_tag(self, text: str) -> str | list[int]:
        """A source may start with a language tag such as <2fr>, if the tokenizer has that token."""
        if (
            self.generator.is_encoder_decoder
            and (match := LANGUAGE_TAG.fullmatch(text))
            and self.generator.input_tokenizer.token_to_id(match[1]) is not None
        ):
            return self.generator.prompt(match[2], match[1])
        return text

    # -- tokens to text

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return _special_ids(self.generator.tokenizer)

    @cached_property
    def source_special_ids(self) -> frozenset[int]:
        return _special_ids(self.generator.input_tokenizer)

    def describe(self, tokens: Sequence[int], context: Sequence[int] = ()) -> list[TokenInfo]:
        """Tokens as they read one after the other, after the `context`."""
        texts = self._cached_token_texts(False, (*context, *tokens), len(context))
        return [
            self._token_info(token, text, self.special_ids) for token, text in zip(tokens, texts, strict=True)
        ]

    def describe_source(self, tokens: Sequence[int]) -> list[TokenInfo]:
        texts = self._cached_token_texts(True, tuple(tokens), 0)
        return [
            self._token_info(token, text, self.source_special_ids)
            for token, text in zip(tokens, texts, strict=True)
        ]

    def describe_candidates(self, context: Sequence[int], tokens: Sequence[int]) -> list[TokenInfo]:
        """Alternative tokens, as each would read directly after the context."""
        texts = token_texts(self.generator.tokenizer, context, tokens)
        return [
            self._token_info(token, text, self.special_ids) for token, text in zip(tokens, texts, strict=True)
        ]

    def vocabulary(self) -> list[str]:
        """The text of every token in the middle of a sentence: with the space before it."""
        size = min(self.generator.model.design.vocab, MAX_VOCABULARY)
        context = self.generator.tokenizer.encode("a", add_special_tokens=False).ids
        return token_texts(self.generator.tokenizer, context, range(size))

    def _token_texts(self, is_source: bool, tokens: tuple[int, ...], begin: int) -> list[str]:
        return token_pieces(
            self.generator.input_tokenizer if is_source else self.generator.tokenizer, tokens, begin
        )

    def _token_info(self, token: int, text: str, special_ids: frozenset[int]) -> TokenInfo:
        return {"id": int(token), "text": text, "special": token in special_ids}


def _special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(n for n, token in tokenizer.get_added_tokens_decoder().items() if token.special)


def describe_tokens(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The texts of tokens, one after the other, after those in `context`."""
    vocab = explorer.generator.model.design.vocab
    return {
        "tokens": explorer.display_tokenizer.describe(
            params.integers("ids", vocab), params.integers("context", vocab, default=[])
        )
    }


def vocabulary(explorer: Explorer, params: Params) -> dict[str, Any]:
    """The texts of all tokens."""
    return {"tokens": explorer.display_tokenizer.vocabulary()}
