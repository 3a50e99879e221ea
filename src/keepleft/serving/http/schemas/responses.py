"""Schemas of responses, as /openapi.json documents them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

ChoiceFinishReason = Literal["stop", "length", "cancelled"]
HealthStatus = Literal["ready", "draining", "stalled", "failed"]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    finish_reason: ChoiceFinishReason
    logprobs: CompletionLogprobs | None


class CompletionResponse(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    seed: int | None = Field(description="the same request with this seed gets the same response")
    choices: list[CompletionChoice]
    usage: Usage


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    finish_reason: ChoiceFinishReason
    logprobs: ChatLogprobs | None


class ChatCompletionResponse(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    seed: int | None
    choices: list[ChatChoice]
    usage: Usage


class TranslationHypothesis(BaseModel):
    text: str
    score: float | None = Field(description="log-probability; with beams, what they are ranked by")
    finish_reason: ChoiceFinishReason


class TranslationResult(TranslationHypothesis):
    index: int
    n_best: list[TranslationHypothesis]


class TranslationResponse(BaseModel):
    object: Literal["list"]
    model: str
    seed: int | None
    data: list[TranslationResult]
    warnings: list[str] = Field(
        description="notes about the texts: one that seems to be in a language that the model does not "
        "translate into the one to write"
    )
    usage: Usage


class EmbeddingData(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingResponse(BaseModel):
    object: Literal["list"]
    model: str
    data: list[EmbeddingData]
    usage: PromptUsage


class ClassificationData(BaseModel):
    index: int
    label: str
    probabilities: dict[str, float]


class ClassificationResponse(BaseModel):
    object: Literal["list"]
    model: str
    data: list[ClassificationData]
    usage: PromptUsage


class TokenScore(BaseModel):
    token: str
    logprob: float


class ScoreData(BaseModel):
    index: int
    logprob: float
    perplexity: float
    tokens: list[TokenScore]


class ScoreResponse(BaseModel):
    object: Literal["list"]
    model: str
    data: list[ScoreData]
    usage: PromptUsage


class AttentionResponse(BaseModel):
    object: Literal["attention"]
    model: str
    tokens: list[str]
    source: list[str] | None
    maps: dict[str, list[list[list[float]]]] = Field(
        description="weights of each attention layer: heads, queries, keys"
    )
    heads: dict[str, list[int]]
    usage: PromptUsage


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    family: Literal["encoder", "decoder", "encoder-decoder"]
    tasks: list[str]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class HealthResponse(BaseModel):
    status: HealthStatus = Field(
        description="draining: the server shuts down and finishes its requests; stalled: a step of the "
        "engine takes longer than limits.step_seconds; failed: the engine has ended"
    )


class ExplorerAnswer(BaseModel):
    """The answer to a question of the explorer; each question has its own fields."""

    model_config = {"extra": "allow"}


def response_docs(
    response_model: type[BaseModel] | None,
    *,
    stream: bool = False,
    extra_responses: dict[int | str, Any] | None = None,
) -> dict[str, Any]:
    """The arguments of a route that document its responses."""
    responses: dict[int | str, dict[str, Any]] = {
        "4XX": {
            "model": ErrorResponse,
            "description": "the request is wrong; the message says why and what to do about it",
        },
        "5XX": {
            "model": ErrorResponse,
            "description": "shutting down (503, with Retry-After), too slow (504), or a bug of ours (500)",
        },
    }
    if stream:
        responses[200] = {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "the response; with stream: true as server-sent events that end with [DONE]",
        }
    return {"response_model": response_model, "responses": {**responses, **(extra_responses or {})}}
