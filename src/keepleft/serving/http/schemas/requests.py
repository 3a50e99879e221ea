"""What may be asked: the fields of each request, with the outermost bounds.

Limits says how much of each is served.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from keepleft.serving.http.schemas.generation import GenerationFields, StrictModel, TokenIds

ChoiceCount = Annotated[int, Field(ge=1, le=1024)]
MODEL_FIELD = Field(
    None,
    description="the name that GET /v1/models tells; the only model where it is left out",
    max_length=512,
)


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's; changes nothing here


class IgnoredFields(StrictModel):
    """Fields of OpenAI's that change nothing about the text; they are taken and passed over."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class GenerationRequestBody(GenerationFields, IgnoredFields):
    """What completions and chats share."""

    model: str | None = MODEL_FIELD
    n: ChoiceCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    user: str | None = Field(
        None, description="whose request it is: beginnings of texts are shared within one user alone"
    )


class CompletionRequest(GenerationRequestBody):
    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = Field(
        None, description="16 where nothing is said"
    )
    best_of: ChoiceCount | None = None
    logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    echo: bool | None = None
    suffix: str | None = Field(None, description="refused: no text is put between two others here")


class ContentPart(StrictModel):
    type: Literal["text"]
    text: str


class Message(StrictModel):
    role: Annotated[str, Field(pattern=r"^[A-Za-z_]{1,32}$")]
    content: str | list[ContentPart] | None = None
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
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = Field(
        None, description="the old name of max_completion_tokens"
    )
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=1024)] | None = None
    response_format: ResponseFormat | None = None
    tools: Any = Field(None, description="refused: no tools are called here")
    tool_choice: Any = Field(None, description="refused, but for none and auto")
    functions: Any = Field(None, description="refused")
    parallel_tool_calls: bool | None = None  # changes nothing without tools
    reasoning_effort: Any = None  # changes nothing here


class TranslateRequest(GenerationFields):
    """The options of the model directory hold: greedy or beams, unless something else is said."""

    model: str | None = MODEL_FIELD
    input: str | list[str]
    tag: str | None = Field(
        None, description="the token that names the language, for a model that has several", max_length=256
    )
    num_return_sequences: ChoiceCount | None = Field(
        None, description="so many texts for each, the best first"
    )
    user: str | None = None


class EmbeddingRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str | TokenIds | list[str] | list[TokenIds]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="refused: vectors are as long as they are"
    )
    user: str | None = None


class ClassifyRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str | list[str]
    user: str | None = None


class ScoreRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str | list[str]
    source: str | list[str] | None = Field(
        None, description="encoder-decoders: what the text was written for, one for each"
    )
    user: str | None = None


class AttentionRequest(StrictModel):
    model: str | None = MODEL_FIELD
    input: str
    source: str | None = Field(
        None, description="encoder-decoders: the source; input is the text that was written for it"
    )
    layers: Annotated[list[Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=1024)] = (
        Field(["*"], description='names such as "decoder.3.self", or patterns such as "encoder.*"')
    )
    heads: (
        Annotated[list[Annotated[int, Field(ge=0, lt=65_536)]], Field(min_length=1, max_length=1024)] | None
    ) = None


@cache
def all_field_names() -> tuple[str, ...]:
    """Every field that some request has: a misspelt one is told what was perhaps meant."""
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
