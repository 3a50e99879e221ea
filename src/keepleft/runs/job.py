"""A training job as data: every option of `keepleft train`, read from and written to YAML.

Options that are left out are resolved from the data (runs/prepare.py).
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
    """Training or validation data: one file, or two line-aligned files.

    Args:
        path: a file (.txt .tsv .csv .jsonl .parquet, or .gz of these), "-" for stdin, or hf:NAME for a
            Hugging Face dataset
        src: the source side of line-aligned files
        tgt: the target side of line-aligned files
        columns: the columns of a table to read, by name or number from 0, in the order of the task's fields
        tag: a language tag to put before each source: with <2fr>, one model can write several languages
    """

    path: str | None = None
    src: str | None = None
    tgt: str | None = None
    columns: list[str | int] | None = None
    tag: str | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The tokenizer: trained on the data, or loaded.

    Args:
        kind: bpe (byte-level) and unigram split words into subwords, word and char do not
        size: the largest size of the vocabulary (default: chosen from the data)
        joint: one vocabulary for source and target
        path: a tokenizer.json, a SentencePiece .model or a model directory, to use instead of training one
        source_path: the same for the source, if it has a vocabulary of its own
        min_frequency: how often a word or subword must occur to become a token
        documents: for lm, read documents separated by blank lines and pack them, instead of running text
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
        tokens: tokens in a step, on all devices together. Padding counts; of a pair, the longer side counts
            (default: chosen by size)
        micro_tokens: tokens in a micro-batch, one pass of one device; the gradients of several are
            accumulated into a step; if not given, a step is one pass
        max_length: the most tokens of a text; longer ones are left out (translate), truncated (summarize,
            classify) or split (all other tasks)
        pack: sequence packing: put several texts into a row, masked from each other, instead of padding
        pad_to_multiple_of: round the width of batches up to a multiple of this; if not given, 8 on a
            GPU and 1 elsewhere
        prefetch: how many batches are prepared ahead, in the background
    """

    tokens: int | None = None
    micro_tokens: int | None = None
    max_length: int | None = None
    pack: bool | None = None
    pad_to_multiple_of: int | None = None
    prefetch: int = 8


def _make_overrides(config_class: type, name: str) -> type:
    """A dataclass with the same fields, each None unless it is given."""
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
    """One run of `keepleft train`, whose help describes the options."""

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
    recipe: Any = RecipeOverrides()  # noqa: RUF009 (it is frozen)
    lora: int = 0
    average_last: int = 0
    minutes: float | None = None
    parallel: Literal["ddp", "fsdp"] | None = None
    device: str | None = None
    track: list[str] = field(default_factory=list)
    audit: bool = True

    @property
    def is_running_text(self) -> bool:
        """Whether the data are one running text, cut into windows without regard to documents."""
        return self.task == "lm" and not self.tokenizer.documents


def to_yaml(job: TrainJob) -> str:
    """A job as YAML; fields that have their default are left out."""
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
    """A job from YAML. Raises ValueError, with the field, if it is unknown or its value has another type.

    `name` is what error messages call the job.
    """
    import yaml

    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    return _parse_value(TrainJob, data, name)


def _field_default(f: dataclasses.Field) -> Any:
    return f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default


def _parse_dataclass(expected_type: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        names = ", ".join(f.name for f in fields(expected_type))
        raise ValueError(f"{where} is {data!r}: it must name {names}")
    field_types = typing.get_type_hints(expected_type)
    if unknown := sorted(map(str, data.keys() - field_types.keys())):
        raise ValueError(f"{where} has no {', '.join(unknown)}: it has {', '.join(field_types)}")
    if expected_type is TrainJob:
        field_types["recipe"] = RecipeOverrides
    try:
        values = {
            key: _parse_value(field_types[key], value, f"{where}: {key}") for key, value in data.items()
        }
        return expected_type(**values)
    except TypeError as error:
        raise ValueError(f"{where} is incomplete: {error}") from error


def _parse_value(expected_type: Any, data: Any, where: str) -> Any:
    if is_dataclass(expected_type):
        return _parse_dataclass(expected_type, data, where)
    origin = typing.get_origin(expected_type)
    type_args = typing.get_args(expected_type)
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
    if expected_type is float and isinstance(data, str):  # YAML reads 3e-4 as a string
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
