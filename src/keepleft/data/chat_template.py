"""Chat messages as tokens, by a model's chat template. Special tokens that a message spells out stay text.

A template is Jinja from the model's files: it is rendered in a sandboxed environment that reaches nothing
outside. The server also renders it in a process of its own, with limits of time and memory
(serving/http/sandbox).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from secrets import choice
from typing import TYPE_CHECKING, Any

from keepleft.data.tokenizer import copy_tokenizer
from keepleft.disk.encode_text import encode_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PlainMessage = dict[str, str]  # role, content, perhaps name
# texts → tokens of each
EncodeTexts = Callable[[list[str]], list[list[int]]]

PRIVATE_USE_CHARACTERS = range(0xE000, 0xF8FF)  # of Unicode: they have no meaning of their own
SEPARATOR_LENGTH = 8
MAX_CHARACTERS = 16 << 20  # of a rendered chat


class ChatTemplateError(ValueError):
    """The template cannot be rendered with these messages."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model's chat template rejects these messages: {reason}")
        self.reason = reason


@dataclass(frozen=True)
class RenderedChat:
    """`separator`: what breaks up special tokens that a message spells out; empty if none does."""

    text: str
    special_tokens: dict[str, int]
    separator: str


@dataclass(frozen=True)
class ChatTemplate:
    """The Jinja source of a template, and what it is rendered and encoded with."""

    source: str
    tokenizer: Tokenizer
    notes: Mapping[str, Any]  # of the model: the ids of its special tokens

    def encode(self, messages: Sequence[PlainMessage]) -> list[int]:
        """The tokens of a chat, up to where the answer begins.

        Raises ChatTemplateError, and ImportError without jinja2.
        """
        render = lambda source, variables: render_template(source, variables, MAX_CHARACTERS)
        chat = render_chat(self.source, messages, self.tokenizer, self.notes, render)
        encode = lambda tokenizer, texts: [
            encode_text(tokenizer, text, add_special_tokens=False) for text in texts
        ]
        return encode_chat(
            chat, partial(encode, self._special_tokenizer), partial(encode, self._plain_tokenizer)
        )

    @cached_property
    def _special_tokenizer(self) -> Tokenizer:
        return copy_tokenizer(self.tokenizer, encode_special_tokens=False)

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        return copy_tokenizer(self.tokenizer, encode_special_tokens=True)


def template_source(notes: Mapping[str, Any]) -> str | None:
    """The chat template among a model's notes; None where there is none."""
    source = notes.get("chat_template")
    return source if isinstance(source, str) else None


def render_chat(
    source: str,
    messages: Sequence[PlainMessage],
    tokenizer: Tokenizer,
    notes: Mapping[str, Any],
    render: Callable[[str, dict[str, Any]], str],
) -> RenderedChat:
    """The text of a chat, including the generation prompt; `render` takes a template and its variables.

    Where a message spells out a special token, that spelling is broken up before the template is rendered, so
    that the special tokens in the rendered text are those of the template alone.
    """
    messages = [dict(message) for message in messages]
    special_tokens = {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    conflicting = [
        special for special in special_tokens if any(special in message["content"] for message in messages)
    ]
    separator = _unused_separator(messages) if conflicting else ""
    for message in messages:
        for special in conflicting:
            message["content"] = message["content"].replace(special, f"{special[0]}{separator}{special[1:]}")
    text = render(source, _variables(messages, tokenizer, notes))
    return RenderedChat(text, special_tokens, separator)


def encode_chat(chat: RenderedChat, encode_special: EncodeTexts, encode_plain: EncodeTexts) -> list[int]:
    """The tokens of a rendered chat.

    `encode_special` makes special tokens of those that are spelled out, `encode_plain` does not.
    """
    if not chat.separator:
        (tokens,) = encode_special([chat.text])
        return tokens
    longest_first = sorted(chat.special_tokens, key=len, reverse=True)
    pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
    parts = [part for part in re.split(pattern, chat.text) if part]
    plain_texts = [part.replace(chat.separator, "") for part in parts if part not in chat.special_tokens]
    encoded = iter(encode_plain(plain_texts))
    tokens = []
    for part in parts:
        tokens += [chat.special_tokens[part]] if part in chat.special_tokens else next(encoded)
    return tokens


def render_template(source: str, variables: dict[str, Any], max_characters: int) -> str:
    """Render a template. Raises ChatTemplateError, and ImportError without jinja2."""
    try:
        template = _compile_template(source)
        pieces = []
        size = 0
        for piece in template.generate(**variables):
            size += len(piece)
            if size > max_characters:
                limit = f"more than {max_characters:,} characters"
                raise ChatTemplateError(f"the text has {limit}: send fewer or shorter messages")
            pieces.append(piece)
    except (ChatTemplateError, ImportError):
        raise
    except Exception as error:  # a template can fail like any program
        raise ChatTemplateError(f"{type(error).__name__}: {error}") from error
    return "".join(pieces)


def _variables(
    messages: list[PlainMessage], tokenizer: Tokenizer, notes: Mapping[str, Any]
) -> dict[str, Any]:
    eos_token_ids = notes.get("eos_token_id")
    eos_token_id = eos_token_ids[0] if isinstance(eos_token_ids, list) else eos_token_ids
    token_text = lambda token_id: "" if token_id is None else tokenizer.id_to_token(token_id) or ""
    return {
        "messages": messages,
        "add_generation_prompt": True,
        "bos_token": token_text(notes.get("bos_token_id")),
        "eos_token": token_text(eos_token_id),
        "pad_token": token_text(notes.get("pad_token_id")),
    }


def _unused_separator(messages: list[PlainMessage]) -> str:
    """Random characters that occur in no message."""
    while True:
        separator = "".join(chr(choice(PRIVATE_USE_CHARACTERS)) for _ in range(SEPARATOR_LENGTH))
        if not any(separator in message["content"] for message in messages):
            return separator


@cache
def _compile_template(source: str) -> Any:
    """A Jinja template in the environment of transformers, sandboxed: nothing outside can be reached."""
    from datetime import datetime

    try:
        from jinja2.exceptions import TemplateError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            "a chat template is rendered by jinja2, which is not installed: pip install jinja2, or do "
            "without the template (--raw)"
        ) from error

    class GenerationBlock(Extension):
        """{% generation %} … {% endgeneration %} marks what the model wrote, for training: only text here."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda time_format: datetime.now().strftime(time_format),
    }
    return environment.from_string(source)
