"""Chats as tokens: by the model's own template, with the users' words kept from being taken for its special tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from secrets import choice

from keepleft.serving.http.asked import Message
from keepleft.serving.http.errors import RefusedError
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.service import Service

PRIVATE = range(0xE000, 0xF8FF)  # characters that stand for nothing


def chat(service: Service, messages: Sequence[Message]) -> list[int]:
    """The tokens of a chat, up to where the model is to answer."""
    assert service.template is not None
    said = [_plain(message) for message in messages]
    special = {token.content: number for number, token in service.tokenizer.get_added_tokens_decoder().items() if token.special}
    odd = [mark for mark in special if any(mark in message["content"] for message in said)]
    split = _unused(said) if odd else ""
    for message in said if odd else []:
        for mark in odd:  # so that what a user wrote is not what the template writes
            message["content"] = message["content"].replace(mark, f"{mark[0]}{split}{mark[1:]}")
    text = _rendered(service, said)
    if not odd:
        return list(service.marked.encode(text, add_special_tokens=False).ids)
    return _apart(service, text, special, split)


def _rendered(service: Service, said: list[dict[str, str]]) -> str:
    notes, word, limits = service.model.notes, service.tokenizer.id_to_token, service.limits
    ends = notes.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) else ends
    named = lambda number: "" if number is None else word(number) or ""
    given = {"messages": said, "add_generation_prompt": True, "bos_token": named(notes.get("bos_token_id")),
             "eos_token": named(end), "pad_token": named(notes.get("pad_token_id"))}
    return service.templates.render(str(service.template), given, 2 * limits.characters, limits.template_seconds)


def _apart(service: Service, text: str, special: dict[str, int], split: str) -> list[int]:
    """The template's marks by their numbers, everything else as plain text."""
    out: list[int] = []
    for part in re.split("(" + "|".join(re.escape(mark) for mark in sorted(special, key=len, reverse=True)) + ")", text):
        if part in special:
            out.append(special[part])
        elif part:
            out.extend(service.plain.encode(part.replace(split, ""), add_special_tokens=False).ids)
    return out


def _plain(message: Message) -> dict[str, str]:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content or [])
    return {"role": message.role, "content": text, **({"name": message.name} if message.name else {})}


def _unused(said: list[dict[str, str]]) -> str:
    """A run of characters that no message holds."""
    while True:
        found = "".join(chr(choice(PRIVATE)) for _ in range(8))
        if not any(found in message["content"] for message in said):
            return found


def check(messages: Sequence[Message], limits: Limits) -> None:
    if len(messages) > limits.messages:
        raise RefusedError(400, f"there are {len(messages)} messages: at most {limits.messages} are read", param="messages")
    size = sum(len(message["content"]) for message in map(_plain, messages))
    if size > limits.characters:
        raise RefusedError(400, f"the messages have {size:,} characters together: at most {limits.characters:,} are read",
                           param="messages", code="context_length_exceeded")
