"""What several routes read and tell alike: texts as rows of tokens, within the limits; whose they are; how
many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keepleft.serving.http.errors import APIError, too_long
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import Prompt, check_limit, check_text
from keepleft.serving.http.service import Service


def as_texts(value: str | Sequence[str], limits: Limits, name: str = "input") -> list[str]:
    """One text or several, as a list."""
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        raise APIError(400, f"{name} is an empty list: give at least one text", param=name)
    check_limit(len(texts), limits.inputs, name)
    return [check_text(text, limits) for text in texts]


def token_rows(service: Service, inputs: Any) -> list[list[int]]:
    """Texts or tokens as rows that the model can read whole. Takes its time: call it in a thread."""
    prompts = as_prompts(inputs)
    check_limit(len(prompts), service.limits.inputs, "input")
    tokenizer = service.generator.input_tokenizer
    vocab = service.model.design.source_vocab or service.model.design.vocab
    out = []
    for n, prompt in enumerate(prompts):
        row = list(
            tokenizer.encode(check_text(prompt, service.limits)).ids if isinstance(prompt, str) else prompt
        )
        if not row:
            raise APIError(400, f"text {n} is empty: there is nothing to read", param="input")
        if len(row) > service.max_model_len:
            raise too_long(len(row), service.max_model_len, f"text {n}")
        if unknown := [token for token in row if not 0 <= token < vocab]:
            raise APIError(
                400, f"text {n} holds token {unknown[0]}, and the model knows {vocab}", param="input"
            )
        out.append(row)
    return out


def as_prompts(prompt: Any) -> list[Prompt]:
    """One prompt or many, texts or tokens."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [list(prompt)]
    if not prompt or [] in prompt:
        raise APIError(
            400,
            "there is an empty list where a text or tokens should be: give at least one of them",
            param="prompt",
        )
    return list(prompt)


def tenant_of(service: Service, tenant: str, user: str | None) -> str:
    """The caller: a user inside an API key."""
    check_limit(len(user or ""), service.limits.user, "user")
    return f"{tenant}:{user or ''}"


def usage(record: RequestRecord) -> dict[str, int]:
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
    }
