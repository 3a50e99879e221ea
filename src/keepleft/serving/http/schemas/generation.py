"""Generation options as fields of a request, named as in Hugging Face's GenerationConfig.

They are made from the option table (decoding/generation_config.py): its types, its help texts, and its
ranges, narrowed to what a server takes from anybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

from keepleft.decoding.generation_config import OPTIONS, GenerationConfig

# Every list fails fast: one error is enough, and a million of them would take seconds and gigabytes.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=65_536)]
TokenRow = Annotated[TokenIds, Field(min_length=1)]
TokenRows = Annotated[list[TokenRow], Field(fail_fast=True, max_length=65_536)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
SequenceBias = Annotated[tuple[TokenRow, Bias], Field(strict=False)]  # not strict: JSON has no tuples
# the type of an option → that of its field; numbers get the bounds of their option
FIELD_TYPES: dict[Any, Any] = {
    bool | None: bool,
    bool | Literal["never"] | None: bool | Literal["never"],
    str | None: str,
    str | list[str] | None: str | Texts,
    int | None: TokenId,
    list[int] | None: TokenIds,
    int | list[int] | None: TokenId | TokenIds,
    list[list[int]] | None: TokenRows,
}
# fields of a type or with a description of their own
SPECIAL_TYPES: dict[str, Any] = {
    "seed": int,
    "logit_bias": dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Bias],
    "sequence_bias": Annotated[list[SequenceBias], Field(fail_fast=True, max_length=65_536)],
    "prefix": str,
    "json_schema": dict[str, Any],
}
DESCRIPTIONS = {
    "temperature": "0 is greedy; below 1 sharper, above 1 flatter",
    "seed": "if not given, a random one, which the response names",
    "max_new_tokens": "another name of max_tokens",
    "stop_strings": "another name of stop",
}


class StrictModel(BaseModel):
    """No value is converted to another type, and no unknown field is accepted."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


def _generation_fields() -> dict[str, Any]:
    """Field definitions for create_model, one for each option that a request may set."""
    hints = get_type_hints(GenerationConfig)
    definitions: dict[str, Any] = {}
    for name, row in OPTIONS.items():
        if row["http"] is None:
            continue
        bounds = _bounds(row)
        field_type = SPECIAL_TYPES.get(name)
        if field_type is None:
            is_number = row["range"] is not None
            field_type = (
                (float if hints[name] == float | None else int) if is_number else FIELD_TYPES[hints[name]]
            )
        if bounds:
            field_type = Annotated[field_type, Field(**bounds)]
        description = DESCRIPTIONS.get(name, row["help"])
        definitions[name] = (field_type | None, Field(None, description=description))
    return definitions


def _bounds(row: Mapping[str, Any]) -> dict[str, Any]:
    """The range of an option, narrowed by the bounds of its HTTP field."""
    valid, http = row["range"], row["http"]
    bounds = {} if valid is None else {name: getattr(valid, name) for name in ("ge", "gt", "le", "lt")}
    if http.ge is not None:
        bounds |= {"ge": http.ge, "gt": None}
    if http.le is not None or http.lt is not None:
        bounds |= {"le": http.le, "lt": http.lt}
    return {name: bound for name, bound in bounds.items() if bound is not None}


if TYPE_CHECKING:

    class GenerationFields(StrictModel):
        def __getattr__(self, name: str) -> Any: ...

else:
    GenerationFields = create_model(
        "GenerationFields",
        __base__=StrictModel,
        __doc__="What is left out is taken from the generation_config.json of the model directory.",
        **_generation_fields(),
    )


RESOLVED_FIELDS = ("temperature", "top_p", "seed", "logit_bias", "max_new_tokens", "stop_strings", "prefix")
# become generation options as they are
PASS_THROUGH_FIELDS = tuple(name for name in GenerationFields.model_fields if name not in RESOLVED_FIELDS)
