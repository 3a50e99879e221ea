"""Schemas of request bodies, with outer bounds; Limits says how much of each field a server allows."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from keepleft.serving.http.schemas.generation import GenerationFields, StrictModel, Texts, TokenIds

ChoiceCount = Annotated[int, Field(ge=1, le=1024)]
PromptField = str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
LayerName = Annotated[str, Field(max_length=64)]
HeadIndex = Annotated[int, Field(ge=0, lt=65_536)]
MODEL_FIELD = Field(
    None, description="the name in GET /v1/models; may be left out, as there is one model", max_length=512
)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's; ignored


class IgnoredFields(StrictModel):
    """Fields of OpenAI's that do not change the output; they are accepted and ignored."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class GenerationRequestBody(GenerationFields, IgnoredFields):
    """The fields that completions and chats share."""

    model: str | None = MODEL_FIELD
    n: ChoiceCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Texts | None = None
    user: str | None = Field(None, description="the end user; prefix caching never shares between users")


class CompletionRequest(GenerationRequestBody):
    prompt: PromptField
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = Field(None, description="16 by default")
    best_of: ChoiceCount | None = None
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    echo: bool | None = None
    suffix: str | None = Field(None, description="rejected: fill-in-the-middle is not supported")


class ContentPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Annotated[str, Field(pattern=r"^[A-Za-z_]{1,32}$")]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None


class JsonSchema(StrictModel):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(GenerationRequestBody):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None, description="the old name of max_completion_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    response_format: ResponseFormat | None = None
    tools: Any = Field(None, description="rejected: tool calls are not supported")
    tool_choice: Any = Field(None, description="rejected, except none and auto")
    functions: Any = Field(None, description="rejected")
    parallel_tool_calls: bool | None = None  # ignored
    reasoning_effort: Any = None  # ignored


class TranslateRequest(GenerationFields):
    """The defaults are those of the model directory: greedy, or its beams."""

    model: str | None = MODEL_FIELD
    input: str | Texts
    to: str | None = Field(
        None,
        description="the language to write, such as fr; texts are cut into sentences and put together "
        "again. A model of several languages needs it, or tag, or texts that start with a tag",
        max_length=32,
    )
    tag: str | None = Field(
        None, description="the language tag, a token, for a multilingual model", max_length=256
    )
    num_return_sequences: ChoiceCount | None = Field(
        None, description="translations for each text, the best first"
    )
    user: str | None = None


class EmbeddingRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="rejected: the size of the vectors is that of the model"
    )
    user: str | None = None


class ClassifyRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str | Texts
    user: str | None = None


class ScoreRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str | Texts
    source: str | Texts | None = Field(None, description="encoder-decoders: the source of each text")
    user: str | None = None


class AttentionRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str
    source: str | None = Field(None, description="encoder-decoders: the source; input is the target")
    layers: Annotated[list[LayerName], Field(fail_fast=True, min_length=1, max_length=1024)] = Field(
        ["*"], description='names such as "decoder.3.self", or patterns such as "encoder.*"'
    )
    heads: Annotated[list[HeadIndex], Field(fail_fast=True, min_length=1, max_length=1024)] | None = None


@cache
def all_field_names() -> tuple[str, ...]:
    """The fields of all requests, to suggest one where a field is misspelt."""
    schemas = (
        CompletionRequest,
        ChatRequest,
        TranslateRequest,
        EmbeddingRequest,
        ClassifyRequest,
        ScoreRequest,
        AttentionRequest,
        StreamOptions,
        Message,
        ContentPart,
        ResponseFormat,
        JsonSchema,
    )
    return tuple(
        sorted({field.alias or name for schema in schemas for name, field in schema.model_fields.items()})
    )
