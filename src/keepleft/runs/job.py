"""A training job as data: everything that `keepleft train` can be told.

What is left out is chosen from the data.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, Literal

from keepleft.training.recipe import Recipe

TaskName = Literal["classify", "denoise", "lm", "mlm", "span", "summarize", "translate"]
Size = Literal["tiny", "small", "base"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where texts are: one file, or two that belong together line by line.

    Args:
        path: a file (.txt .tsv .csv .jsonl .parquet, or .gz of these), "-" for stdin, or hf:NAME for a Hugging Face dataset
        src: the source side of line-aligned files
        tgt: the target side
        columns: names, or numbers from 0, of the columns to take from a table, in the order of the task's fields
        tag: a language tag, put before each source: <2fr> lets one model write several languages

    """

    path: str | None = None
    src: str | None = None
    tgt: str | None = None
    columns: list[str | int] | None = None
    tag: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer.

    Args:
        kind: bpe (byte-level) and unigram break words into pieces, word and char do not
        size: the most tokens; None: chosen from the data
        joint: one vocabulary for source and target
        path: a tokenizer.json, or a model directory, to use as it is
        source_path: the same for the source, where it has a vocabulary of its own
        min_frequency: how often a word or piece must have been seen
        documents: for lm, read blank-line separated documents and pack them, instead of running text
    """

    kind: Literal["bpe", "unigram", "word", "char"] = "bpe"
    size: int | None = None
    joint: bool = True
    path: str | None = None
    source_path: str | None = None
    min_frequency: int = 2
    documents: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How texts become batches.

    Args:
        tokens: in one step, padding included, the longer side counted; on all devices together
        micro_tokens: in one pass of one device; gradients pile up over tokens / micro_tokens passes. None: all at once
        max_length: longer texts are left out (pairs), cut (labelled texts) or broken up (running text)
        pack: put several texts into a row, none seeing another, instead of padding
        pad_to_multiple_of: round the width of batches up to a multiple of this; None: 8 on a GPU, 1 elsewhere
        prefetch: how many batches are made in the background

    """

    tokens: int | None = None
    micro_tokens: int | None = None
    max_length: int | None = None
    pack: bool | None = None
    pad_to_multiple_of: int | None = None
    prefetch: int = 8


def _make_overrides(config_class: type, name: str) -> type:
    """The same fields, each None unless it is given."""
    hints = typing.get_type_hints(config_class)
    overrides = make_dataclass(
        name, [(f.name, hints[f.name] | None, None) for f in fields(config_class)], frozen=True, kw_only=True
    )
    overrides.__doc__ = config_class.__doc__
    overrides.__module__ = __name__
    return overrides


RecipeOverrides: Any = _make_overrides(Recipe, "RecipeOverrides")


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    task: TaskName
    train: DataConfig | str | list[DataConfig]
    valid: DataConfig | str | list[DataConfig] | None = None
    out: str = "runs/new"
    size: Size = "small"
    init_from: str | None = None
    preset: str | None = None
    design: dict[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerConfig = TokenizerConfig()
    batch: BatchConfig = BatchConfig()
    recipe: Any = RecipeOverrides()  # noqa: RUF009 (it never changes)
    lora: int = 0
    average_last: int = 0
    parallel: Literal["ddp", "fsdp"] | None = None
    device: str | None = None
    tensorboard: bool = False
    audit: bool = True


def to_yaml(job: TrainJob) -> str:
    """A job as YAML; what was not given is left out."""
    import yaml

    def to_plain(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return {
                f.name: to_plain(getattr(value, f.name))
                for f in fields(value)
                if getattr(value, f.name) != _field_default(f)
            }
        if isinstance(value, list | tuple):
            return [to_plain(part) for part in value]
        return value

    return yaml.safe_dump(to_plain(job), sort_keys=False, allow_unicode=True)


def from_yaml(text: str, name: str = "the job") -> TrainJob:
    """A job from YAML; an unknown field, or a value of another kind, is an error that names it."""
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    return _parse_value(TrainJob, data, name)


def _field_default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _parse_value(expected_type: Any, data: Any, where: str) -> Any:
    if is_dataclass(expected_type):
        if not isinstance(data, dict):
            raise ValueError(
                f"{where} is {data!r}: it must name {', '.join(f.name for f in fields(expected_type))}"
            )
        hints = typing.get_type_hints(expected_type)
        if unknown := sorted(map(str, data.keys() - hints.keys())):
            raise ValueError(f"{where} has no {', '.join(unknown)}: it has {', '.join(hints)}")
        try:
            field_types = {
                key: RecipeOverrides if expected_type is TrainJob and key == "recipe" else hint
                for key, hint in hints.items()
            }
            values = {
                key: _parse_value(field_types[key], value, f"{where}: {key}") for key, value in data.items()
            }
            return typing.cast(Any, expected_type)(**values)
        except TypeError as error:
            raise ValueError(f"{where} is incomplete: {error}") from error
    origin, type_args = typing.get_origin(expected_type), typing.get_args(expected_type)
    if expected_type is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        for part in type_args:
            try:
                return _parse_value(part, data, where)
            except ValueError as error:
                last_error = error
                if is_dataclass(part) and isinstance(data, dict):
                    raise
        raise last_error
    if origin is Literal:
        if data not in type_args:
            raise ValueError(f"{where} is {data!r}: there are {', '.join(map(str, type_args))}")
        return data
    if origin is list and isinstance(data, list):
        return [_parse_value(type_args[0], part, where) for part in data]
    if origin is tuple and isinstance(data, list | tuple):
        return tuple(_parse_value(part, value, where) for part, value in zip(type_args, data, strict=True))
    if origin is dict and isinstance(data, dict):
        return data
    if expected_type is float and isinstance(data, int | float) and not isinstance(data, bool):
        return float(data)
    if expected_type is float and isinstance(data, str):  # YAML reads 3e-4 as a word
        try:
            return float(data)
        except ValueError:
            pass
    if expected_type is type(None) and data is None:
        return None
    if (
        isinstance(expected_type, type)
        and expected_type is not type(None)
        and origin is None
        and type(data) is expected_type
    ):
        return data
    raise ValueError(f"{where} is {data!r}: {getattr(expected_type, '__name__', expected_type)} is needed")
