"""Log-probabilities of tokens, in the two formats of OpenAI: of completions and of chats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from keepleft.data.token_text import token_bytes, token_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class TokenLogprob:
    """One token of the output, or of an echoed prompt."""

    token: int
    text_offset: int  # where its text begins in the text of the choice
    token_text: str  # as it reads after the tokens before it
    logprob: float | None  # None for the first token of a prompt, which nothing predicts
    top_logprobs: list[tuple[int, str, float]] = field(default_factory=list)  # token, its text, logprob


def token_logprob(
    tokenizer: Tokenizer,
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
    """Parallel lists; the token itself is always among its top logprobs."""
    top_logprobs: list[dict[str, float] | None] = []
    for entry in logprobs:
        if entry.logprob is None:
            top_logprobs.append(None)
            continue
        # Of two tokens with the same text the likelier stays: it comes first, and is inserted last.
        likeliest_last = {token_text: value for _, token_text, value in reversed(entry.top_logprobs)}
        top_logprobs.append({**dict(reversed(likeliest_last.items())), entry.token_text: entry.logprob})
    return {
        "tokens": [entry.token_text for entry in logprobs],
        "token_logprobs": [entry.logprob for entry in logprobs],
        "top_logprobs": top_logprobs,
        "text_offset": [entry.text_offset for entry in logprobs],
    }


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    """One object for each token, with its bytes."""

    def format_token(token: int, token_text: str, logprob: float | None) -> dict[str, Any]:
        return {"token": token_text, "logprob": logprob, "bytes": _utf8_bytes(tokenizer, token, token_text)}

    content = [
        {
            **format_token(entry.token, entry.token_text, entry.logprob),
            "top_logprobs": [format_token(*top_entry) for top_entry in entry.top_logprobs],
        }
        for entry in logprobs
    ]
    return {"content": content, "refusal": None}


def _utf8_bytes(tokenizer: Tokenizer, token: int, token_text: str) -> list[int]:
    byte_values = token_bytes(tokenizer, token)
    return list(token_text.encode() if byte_values is None else byte_values)
