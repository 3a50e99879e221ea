"""What the routes share: texts and tokens of a request as rows within the limits, its tenant, its usage."""

from __future__ import annotations

from collections.abc import Sequence

from keepleft.serving.http.errors import APIError, too_long
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.request_log import RequestRecord
from keepleft.serving.http.request_builder import Prompt, check_limit, check_text
from keepleft.serving.http.schemas.requests import PromptField
from keepleft.serving.http.service import Service


def as_texts(value: str | Sequence[str], limits: Limits, name: str = "input") -> list[str]:
    """One text or several, as a list. Raises APIError for none, too many or too long ones."""
    texts = [value] if isinstance(value, str) else list(value)
    if not texts:
        raise APIError(400, f"{name} is an empty list: give at least one text", param=name)
    check_limit(len(texts), limits.inputs, name)
    return [check_text(text, limits) for text in texts]


def token_rows(service: Service, inputs: PromptField) -> list[list[int]]:
    """Texts or tokens as rows of tokens within max_model_len. Slow for long texts: call it in a thread."""
    prompts = as_prompts(inputs)
    check_limit(len(prompts), service.limits.inputs, "input")
    tokenizer = service.generator.input_tokenizer
    vocab = service.model.design.source_vocab or service.model.design.vocab
    rows = []
    for n, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            row = list(tokenizer.encode(check_text(prompt, service.limits)).ids)
        else:
            row = list(prompt)
        if not row:
            raise APIError(400, f"text {n} is empty: give at least one token", param="input")
        if len(row) > service.max_model_len:
            raise too_long(len(row), service.max_model_len, f"text {n}")
        if unknown := [token for token in row if not 0 <= token < vocab]:
            message = f"text {n} holds token {unknown[0]}, and the vocabulary has {vocab}"
            raise APIError(400, message, param="input")
        rows.append(row)
    return rows


def as_prompts(prompt: PromptField) -> list[Prompt]:
    """One prompt or several, each a text or tokens, as a list. Raises APIError for an empty list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt or [] in prompt:
        raise APIError(
            400,
            "there is an empty list where a text or tokens should be: give at least one of them",
            param="prompt",
        )
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


def tenant_of(service: Service, key_tenant: str, user: str | None) -> str:
    """The tenant of a request: a user within an API key."""
    check_limit(len(user or ""), service.limits.user, "user")
    return f"{key_tenant}:{user or ''}"


def usage(record: RequestRecord) -> dict[str, int]:
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "total_tokens": record.prompt_tokens + record.completion_tokens,
    }


def prompt_usage(record: RequestRecord) -> dict[str, int]:
    """The usage of routes that generate nothing."""
    return {"prompt_tokens": record.prompt_tokens, "total_tokens": record.prompt_tokens}
