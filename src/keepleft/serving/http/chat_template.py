"""Chat requests as tokens: the model's template, rendered in the sandbox process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from keepleft.data.chat_template import PlainMessage, RenderedChat
from keepleft.data.chat_template import encode_chat as encode_rendered_chat
from keepleft.data.chat_template import render_chat as render_plain_chat
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.schemas.requests import Message
from keepleft.serving.http.service import Service


def render_chat(service: Service, messages: Sequence[Message]) -> RenderedChat:
    """The text of a chat, including the generation prompt. Slow: call it in a thread."""
    assert service.chat_template is not None
    limits = service.limits

    def render(source: str, variables: dict[str, Any]) -> str:
        with service.template_sandboxes.borrow() as sandbox:
            return sandbox.render(source, variables, 2 * limits.characters, limits.template_seconds)

    plain_messages = [_plain_message(message) for message in messages]
    return render_plain_chat(
        service.chat_template, plain_messages, service.tokenizer, service.model.notes, render
    )


def encode_chat(service: Service, chat: RenderedChat) -> list[int]:
    """The tokens of a chat. Slow: call it in a thread."""
    return encode_rendered_chat(
        chat,
        partial(service.special_encoder.encode, add_special_tokens=False),
        partial(service.plain_encoder.encode, add_special_tokens=False),
    )


def _plain_message(message: Message) -> PlainMessage:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or [])
    return {"role": message.role, "content": text, **({"name": message.name} if message.name else {})}


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
