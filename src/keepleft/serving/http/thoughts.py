"""What a model thought of each token, in the two shapes that OpenAI has for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from keepleft.runs.spelled import raw, spelled

LOWEST = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class Thought:
    """Of one token of an answer."""

    token: int
    offset: int                    # where its text begins in the whole
    name: str                      # as it is read after the tokens before it
    logprob: float | None          # None: of the first token of all nothing can be thought
    likely: list[tuple[int, str, float]] = field(default_factory=list)


def thought(tokenizer: Any, before: Sequence[int], token: int, offset: int, logprob: float | None,
            likely: Sequence[tuple[int, float]]) -> Thought:
    name, *names = spelled(tokenizer, before, [token, *(other for other, _ in likely)])
    return Thought(token, offset, name, None if logprob is None else bounded(logprob),
                   [(other, word, bounded(value)) for (other, value), word in zip(likely, names, strict=True)])


def bounded(value: float) -> float:
    return round(value, 6) if math.isfinite(value) else LOWEST


def of_completion(thoughts: Sequence[Thought]) -> dict[str, Any]:
    """Lists side by side; the token itself is always among the likely ones."""
    tops: list[dict[str, float] | None] = []
    for one in thoughts:
        top = {word: value for _, word, value in reversed(one.likely)}  # of two that read alike the likelier stays
        tops.append(None if one.logprob is None else {**dict(reversed(top.items())), one.name: one.logprob})
    return {"tokens": [one.name for one in thoughts], "token_logprobs": [one.logprob for one in thoughts],
            "top_logprobs": tops, "text_offset": [one.offset for one in thoughts]}


def of_chat(tokenizer: Any, thoughts: Sequence[Thought]) -> dict[str, Any]:
    shaped = lambda token, name, value: {"token": name, "logprob": value, "bytes": _bytes(tokenizer, token, name)}
    return {"content": [{**shaped(one.token, one.name, one.logprob),
                         "top_logprobs": [shaped(*other) for other in one.likely]} for one in thoughts], "refusal": None}


def _bytes(tokenizer: Any, token: int, name: str) -> list[int] | None:
    found = raw(tokenizer, token)
    return list(name.encode() if found is None else found)
