"""Texts of a request as rows of tokens, within the limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepleft.serving.http.completions import several
from keepleft.serving.http.errors import RefusedError, too_long
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.service import Service
from keepleft.serving.http.settling import limited, readable


def listed(given: str | Sequence[str], limits: Limits, name: str = "input") -> list[str]:
    """One text or several, as a list."""
    texts = [given] if isinstance(given, str) else list(given)
    if not texts:
        raise RefusedError(400, f"{name} is an empty list: give at least one text", param=name)
    limited(len(texts), limits.inputs, name)
    return [readable(text, limits) for text in texts]


def rows_of(service: Service, given: Any) -> list[list[int]]:
    """Texts or tokens as rows that the model can read whole. Takes its time: call it in a thread."""
    prompts = several(given)
    limited(len(prompts), service.limits.inputs, "input")
    reading, vocab = service.voice.reading, service.model.design.source_vocab or service.model.design.vocab
    out = []
    for n, prompt in enumerate(prompts):
        row = list(reading.encode(readable(prompt, service.limits)).ids if isinstance(prompt, str) else prompt)
        if not row:
            raise RefusedError(400, f"text {n} is empty: there is nothing to read", param="input")
        if len(row) > service.reach:
            raise too_long(len(row), service.reach, f"text {n}")
        if odd := [token for token in row if not 0 <= token < vocab]:
            raise RefusedError(400, f"text {n} holds token {odd[0]}, and the model knows {vocab}", param="input")
        out.append(row)
    return out
