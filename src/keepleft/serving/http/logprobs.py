"""What a model thought of each token, in the two shapes that OpenAI has for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keepleft.data.token_text import token_bytes, token_texts

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class TokenLogprob:
    """Of one token of an answer."""

    token: int
    text_offset: int  # where its text begins in the whole
    token_text: str  # as it is read after the tokens before it
    logprob: float | None  # None: of the first token of all nothing can be thought
    top_logprobs: list[tuple[int, str, float]] = field(default_factory=list)


def token_logprob(
    tokenizer: Any,
    previous_tokens: Sequence[int],
    token: int,
    text_offset: int,
    logprob: float | None,
    top_logprobs: Sequence[tuple[int, float]],
) -> TokenLogprob:
    token_text, *top_texts = token_texts(
        tokenizer, previous_tokens, [token, *(top_token for top_token, _ in top_logprobs)]
    )
    return TokenLogprob(
        token,
        text_offset,
        token_text,
        None if logprob is None else finite_logprob(logprob),
        [
            (top_token, top_text, finite_logprob(value))
            for (top_token, value), top_text in zip(top_logprobs, top_texts, strict=True)
        ],
    )


def finite_logprob(value: float) -> float:
    return round(value, 6) if math.isfinite(value) else MIN_LOGPROB


def completion_logprobs(logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Lists side by side; the token itself is always among the likely ones."""
    top_logprobs: list[dict[str, float] | None] = []
    for entry in logprobs:
        # of two that read alike the likelier stays
        top = {token_text: value for _, token_text, value in reversed(entry.top_logprobs)}
        top_logprobs.append(
            None
            if entry.logprob is None
            else {**dict(reversed(top.items())), entry.token_text: entry.logprob}
        )
    return {
        "tokens": [entry.token_text for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": top_logprobs,
        "text_offset": [entry.text_offset for entry in logprobs],
    }


def chat_logprobs(tokenizer: Any, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    format_entry = lambda token, token_text, value: {
        "token": token_text,
        "logprob": value,
        "bytes": _utf8_bytes(tokenizer, token, token_text),
    }
    return {
        "content": [
            {
                **format_entry(entry.token, entry.token_text, entry.logprob),
                "top_logprobs": [format_entry(*top_entry) for top_entry in entry.top_logprobs],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def _utf8_bytes(tokenizer: Any, token: int, token_text: str) -> list[int] | None:
    byte_values = token_bytes(tokenizer, token)
    return list(token_text.encode() if byte_values is None else byte_values)
