"""What is answered: the shapes that /openapi.json promises."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Why = Literal["stop", "length", "cancelled"]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Read(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Logprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: Why
    logprobs: Logprobs | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    seed: int | None = Field(description="of what was drawn; the same request with it gets the same answer")
    choices: list[CompletionChoice]
    usage: Usage


class Likely(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class Told(Likely):
    top_logprobs: list[Likely]


class ChatLogprobs(BaseModel):
    content: list[Told]
    refusal: None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: Why
    logprobs: ChatLogprobs | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    seed: int | None
    choices: list[ChatChoice]
    usage: Usage


class Text(BaseModel):
    text: str
    score: float | None = Field(description="log-probability; with beams, what they are ranked by")
    finish_reason: Why


class Translation(Text):
    index: int
    n_best: list[Text]


class Translations(BaseModel):
    object: Literal["list"]
    model: str
    seed: int | None
    data: list[Translation]
    usage: Usage


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(BaseModel):
    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: Read


class Label(BaseModel):
    index: int
    label: str
    probabilities: dict[str, float]


class Labels(BaseModel):
    object: Literal["list"]
    model: str
    data: list[Label]
    usage: Read


class Scored(BaseModel):
    token: str
    logprob: float


class Score(BaseModel):
    index: int
    logprob: float
    perplexity: float
    tokens: list[Scored]


class Scores(BaseModel):
    object: Literal["list"]
    model: str
    data: list[Score]
    usage: Read


class Maps(BaseModel):
    object: Literal["attention"]
    model: str
    tokens: list[str]
    source: list[str] | None
    maps: dict[str, list[list[list[float]]]] = Field(description="of each attention: heads, who looks, at whom")
    heads: dict[str, list[int]]
    usage: Read


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    family: Literal["encoder", "decoder", "encoder-decoder"]
    tasks: list[str]


class Models(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Health(BaseModel):
    status: Literal["ready", "draining", "failed"]


class Answer(BaseModel):
    """Of the explorer; each question has its own fields."""

    model_config = {"extra": "allow"}


def documented(kind: type[BaseModel] | None, *, stream: bool = False,
               also: dict[int | str, Any] | None = None) -> dict[str, Any]:
    """The arguments of a route that say what it answers."""
    responses: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": Error, "description": "what was asked cannot be done; the message says why and what to do about it"},
        "5XX": {"model": Error, "description": "not now (503, with Retry-After), not in time (504), or our fault (500)"}}
    if stream:
        responses[200] = {"content": {"text/event-stream": {"schema": {"type": "string"}}},
                          "description": "the answer; with stream: true in pieces, as server-sent events that end with [DONE]"}
    return {"response_model": kind, "responses": {**responses, **(also or {})}}
