"""Chat messages as tokens, by the model's template. Special tokens that users spell out stay plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import choice

from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.schemas.requests import Message
from keepleft.serving.http.service import Service

PRIVATE_USE_CHARACTERS = range(0xE000, 0xF8FF)  # of Unicode: they have no meaning of their own
SEPARATOR_LENGTH = 8


@dataclass(frozen=True)
class RenderedChat:
    """`separator`: what breaks up special tokens that a message spells out; empty if none does."""

    text: str
    special_tokens: dict[str, int]
    separator: str


def render_chat(service: Service, messages: Sequence[Message]) -> RenderedChat:
    """The text of a chat, including the generation prompt.

    Where a message spells out a special token, that spelling is broken up before the template is rendered, so
    that the special tokens in the rendered text are those of the template alone.
    """
    assert service.chat_template is not None
    plain_messages = [_plain_message(message) for message in messages]
    special_tokens = {
        token.content: token_id
        for token_id, token in service.tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    conflicting = [
        special
        for special in special_tokens
        if any(special in message["content"] for message in plain_messages)
    ]
    separator = _unused_separator(plain_messages) if conflicting else ""
    for message in plain_messages:
        for special in conflicting:
            message["content"] = message["content"].replace(special, f"{special[0]}{separator}{special[1:]}")
    return RenderedChat(_render(service, plain_messages), special_tokens, separator)


def encode_chat(service: Service, chat: RenderedChat) -> list[int]:
    """The tokens of a chat. Slow: call it in a thread."""
    if chat.separator:
        return _encode_with_special(service, chat)
    (tokens,) = service.special_encoder.encode([chat.text], add_special_tokens=False)
    return tokens


def _render(service: Service, messages: list[dict[str, str]]) -> str:
    metadata = service.model.notes
    id_to_token = service.tokenizer.id_to_token
    limits = service.limits
    eos_token_ids = metadata.get("eos_token_id")
    eos_token_id = eos_token_ids[0] if isinstance(eos_token_ids, list) else eos_token_ids
    token_text = lambda token_id: "" if token_id is None else id_to_token(token_id) or ""
    variables = {
        "messages": messages,
        "add_generation_prompt": True,
        "bos_token": token_text(metadata.get("bos_token_id")),
        "eos_token": token_text(eos_token_id),
        "pad_token": token_text(metadata.get("pad_token_id")),
    }
    with service.template_sandboxes.borrow() as sandbox:
        return sandbox.render(
            str(service.chat_template), variables, 2 * limits.characters, limits.template_seconds
        )


def _encode_with_special(service: Service, chat: RenderedChat) -> list[int]:
    """Encode special tokens by their ids, and everything else as plain text without the separators."""
    longest_first = sorted(chat.special_tokens, key=len, reverse=True)
    pattern = "(" + "|".join(map(re.escape, longest_first)) + ")"
    parts = [part for part in re.split(pattern, chat.text) if part]
    plain_texts = [part.replace(chat.separator, "") for part in parts if part not in chat.special_tokens]
    encoded = iter(service.plain_encoder.encode(plain_texts, add_special_tokens=False))
    tokens: list[int] = []
    for part in parts:
        tokens += [chat.special_tokens[part]] if part in chat.special_tokens else next(encoded)
    return tokens


def _plain_message(message: Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or [])
    return {"role": message.role, "content": text, **({"name": message.name} if message.name else {})}


def _unused_separator(messages: list[dict[str, str]]) -> str:
    """Random characters that occur in no message."""
    while True:
        separator = "".join(chr(choice(PRIVATE_USE_CHARACTERS)) for _ in range(SEPARATOR_LENGTH))
        if not any(separator in message["content"] for message in messages):
            return separator


def check_messages(messages: Sequence[Message], limits: Limits) -> None:
    """Raise APIError for more messages or characters than the limits allow."""
    if len(messages) > limits.messages:
        message = f"there are {len(messages)} messages: at most {limits.messages} are allowed"
        raise APIError(400, message, param="messages")
    size = sum(len(message["content"]) for message in map(_plain_message, messages))
    if size > limits.characters:
        raise APIError(
            400,
            f"the messages have {size:,} characters together: at most {limits.characters:,} are allowed",
            param="messages",
            code="context_length_exceeded",
        )
