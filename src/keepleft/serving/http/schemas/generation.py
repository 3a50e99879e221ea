"""Generation options as fields of a request, bounded, named as in Hugging Face's GenerationConfig."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(max_length=65_536)]
Count = Annotated[int, Field(ge=0, le=2**31)]
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
FractionBelowOne = Annotated[float, Field(ge=0, lt=1)]
Penalty = Annotated[float, Field(gt=0, le=100)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Bias = Annotated[float, Field(ge=-100, le=100)]
SequenceBias = Annotated[tuple[TokenIds, Bias], Field(strict=False)]  # not strict: JSON has no tuples
SignedPenalty = Annotated[float, Field(ge=-2, le=2)]


class StrictModel(BaseModel):
    """No value is converted to another type, and no unknown field is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class GenerationFields(StrictModel):
    """What is left out is taken from the generation_config.json of the model directory."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description="0 is greedy")
    top_p: PositiveFraction | None = None
    seed: Seed | None = Field(None, description="if not given, a random one, which the response names")
    presence_penalty: SignedPenalty | None = None
    frequency_penalty: SignedPenalty | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias] | None = None

    max_new_tokens: Count | None = Field(None, description="another name of max_tokens")
    min_new_tokens: Count | None = None
    max_time: Annotated[float, Field(gt=0, le=86_400)] | None = None
    stop_strings: str | list[str] | None = Field(None, description="another name of stop")
    do_sample: bool | None = None
    num_beams: Annotated[int, Field(ge=1, le=1024)] | None = None
    num_beam_groups: Annotated[int, Field(ge=1, le=1024)] | None = None
    diversity_penalty: Annotated[float, Field(ge=0, le=100)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    penalty_alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Count | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_h: PositiveFraction | None = None
    typical_p: PositiveFraction | None = None
    epsilon_cutoff: FractionBelowOne | None = None
    eta_cutoff: FractionBelowOne | None = None
    repetition_penalty: Penalty | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=1024)] | None = None
    encoder_repetition_penalty: Penalty | None = None
    encoder_no_repeat_ngram_size: Annotated[int, Field(ge=0, le=1024)] | None = None
    bad_words_ids: list[TokenIds] | None = None
    sequence_bias: list[SequenceBias] | None = None
    suppress_tokens: TokenIds | None = None
    begin_suppress_tokens: TokenIds | None = None
    shortlist: TokenIds | None = None
    forced_bos_token_id: TokenId | None = None
    forced_eos_token_id: TokenId | TokenIds | None = None
    eos_token_id: TokenId | TokenIds | None = None
    renormalize_logits: bool | None = None
    prefix: str | None = Field(None, description="what the generated text begins with")
    regex: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = Field(None, description="in llguidance's Lark dialect")


RESOLVED_FIELDS = ("temperature", "top_p", "seed", "logit_bias", "max_new_tokens", "stop_strings", "prefix")
# become generation options as they are
PASS_THROUGH_FIELDS = tuple(name for name in GenerationFields.model_fields if name not in RESOLVED_FIELDS)
