"""The texts of a job: opened, looked at, and made into stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from keepleft.data import sources
from keepleft.data.fast_encode import encoder
from keepleft.data.prepare import Counts, EncodedField, label_encoder, prepare
from keepleft.data.sources import RecordSource
from keepleft.data.statistics import DataReport, profile
from keepleft.data.token_store import TokenStore, token_dtype
from keepleft.data.tokenizer import load_tokenizer, special_tokens, train_tokenizer, vocab_size
from keepleft.runs.job import DataConfig, TrainJob
from keepleft.runs.tasks import TASKS
from keepleft.weights.model_directory import load

MAX_SAMPLE_CHARACTERS = 100 << 20  # characters that a tokenizer is learned from, at most
PROGRESS_INTERVAL = 1 << 20  # characters between two words about progress

DataInput = DataConfig | str | list[DataConfig]
# what is being done, characters done, and of how many, if that is known
ProgressCallback = Callable[[str, int, int | None], None]


def no_progress(description: str, done: int, total: int | None) -> None:
    """No one asked."""


def with_progress(
    source: RecordSource, description: str, on_progress: ProgressCallback
) -> Iterator[tuple[str, ...]]:
    """The records of a source; now and then `watch` hears how far it has come."""
    total = None if source.size is None or ".gz" in source.name or ".parquet" in source.name else source.size
    done, last_reported = 0, 0
    for record in source:
        yield record
        done += sum(map(len, record)) + len(record)
        if done - last_reported >= PROGRESS_INTERVAL:
            last_reported = done
            on_progress(description, done, total)
    on_progress(description, done, done)


class ProgressSource(RecordSource):
    """A source whose reading can be watched."""

    def __init__(self, source: RecordSource, description: str, on_progress: ProgressCallback) -> None:
        self.source = source
        self.description = description
        self.on_progress = on_progress
        self.fields = source.fields
        self.name = source.name
        self.size = source.size

    @property
    def is_running_text(self) -> bool:
        return self.source.is_running_text

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return with_progress(self.source, self.description, self.on_progress)

    def location(self, n: int) -> str:
        return self.source.location(n)


@dataclass(frozen=True)
class Tokenizers:
    target: Any
    source: Any  # the same one, where the vocabulary is joint

    @property
    def joint(self) -> bool:
        return self.source is self.target


def open_sources(job: TrainJob, data: DataInput) -> list[tuple[RecordSource, str | None]]:
    """The sources, each with the language tag that goes before its texts."""
    parts = data if isinstance(data, list) else [data]
    return [
        (
            _open_source(job, DataConfig(path=part) if isinstance(part, str) else part),
            None if isinstance(part, str) else part.tag,
        )
        for part in parts
    ]


def _open_source(job: TrainJob, data: DataConfig) -> RecordSource:
    field_names = TASKS[job.task].fields
    if data.src is not None or data.tgt is not None:
        if data.src is None or data.tgt is None:
            given_side = "src" if data.tgt is None else "tgt"
            raise ValueError(f"only {given_side} was given: line-aligned texts need both src and tgt")
        if field_names != ("src", "tgt"):
            raise ValueError(
                f"src and tgt were given, but the task {job.task} reads {' and '.join(field_names)}: give one file"
            )
        return sources.parallel_text(data.src, data.tgt)
    if data.path is None:
        raise ValueError(
            "no text was given: name a file with --train, or two with --train.src and --train.tgt"
        )
    if field_names == ("text",) and data.columns is None and _is_plain_text(data.path):
        return (
            sources.documents(data.path)
            if job.tokenizer.documents or job.task != "lm"
            else sources.running_text(data.path)
        )
    return sources.open_source(data.path, field_names, data.columns)


def _is_plain_text(path: str) -> bool:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return (
        not path.startswith("hf:")
        and not Path(path).is_dir()
        and (not suffixes or suffixes[-1] not in (".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet"))
    )


def profile_sources(
    tagged_sources: list[tuple[RecordSource, str | None]], on_progress: ProgressCallback
) -> list[DataReport]:
    return [
        profile(ProgressSource(source, "looking at the texts", on_progress)) for source, _ in tagged_sources
    ]


def build_tokenizers(
    job: TrainJob,
    tagged_sources: list[tuple[RecordSource, str | None]],
    vocab: int,
    on_progress: ProgressCallback = no_progress,
) -> Tokenizers:
    """Read them, or learn them from the training texts."""
    task, tokenizer_config = TASKS[job.task], job.tokenizer
    if tokenizer_config.path is not None or job.init_from is not None:
        target = (
            load_tokenizer(tokenizer_config.path)
            if tokenizer_config.path is not None
            else _model_tokenizer(str(job.init_from))
        )
        source_path = tokenizer_config.source_path or str(
            Path(tokenizer_config.path or str(job.init_from)) / "source_tokenizer.json"
        )
        return Tokenizers(
            target,
            load_tokenizer(source_path)
            if tokenizer_config.source_path or Path(source_path).exists()
            else target,
        )
    tags = [tag for _, tag in tagged_sources if tag is not None]
    is_running_text = task.fields == ("text",) and job.task == "lm"
    extra_tokens = [*task.extra_special_tokens, *dict.fromkeys(tags)]

    def iter_texts(fields: tuple[int, ...]) -> Iterator[str]:
        for source, _ in tagged_sources:
            done = 0
            for record in ProgressSource(source, "learning the tokenizer", on_progress):
                for n in fields:
                    yield record[n]
                    done += len(record[n])
                if done > MAX_SAMPLE_CHARACTERS // len(tagged_sources):
                    break

    if task.fields == ("src", "tgt") and not tokenizer_config.joint:
        source, target = (
            train_tokenizer(
                tokenizer_config.kind,
                iter_texts((n,)),
                vocab,
                running_text=is_running_text,
                extra_special_tokens=extra_tokens if n == 0 else (),
                min_frequency=tokenizer_config.min_frequency,
            )
            for n in (0, 1)
        )
        return Tokenizers(target, source)
    fields = (0, 1) if task.fields == ("src", "tgt") else (0,)
    tokenizer = train_tokenizer(
        tokenizer_config.kind,
        iter_texts(fields),
        vocab,
        running_text=is_running_text,
        extra_special_tokens=extra_tokens,
        min_frequency=tokenizer_config.min_frequency,
    )
    return Tokenizers(tokenizer, tokenizer)


def _model_tokenizer(model_path: str) -> Any:
    """The tokenizer that belongs to a model."""
    _, tokenizer = load(model_path, device="meta")
    if tokenizer is None:
        raise ValueError(f"{model_path} has no tokenizer: name one with --tokenizer.path")
    tokenizer.encode_special_tokens = True
    return tokenizer


def build_store(
    job: TrainJob,
    tagged_sources: list[tuple[RecordSource, str | None]],
    tokenizers: Tokenizers,
    class_labels: list[str],
    max_length: int,
    folder: Path,
    on_progress: ProgressCallback = no_progress,
) -> tuple[TokenStore, Counts]:
    """The texts as integers, on disk."""
    task = TASKS[job.task]
    vocab = max(vocab_size(tokenizers.target), vocab_size(tokenizers.source), len(class_labels))
    dtype, specials = token_dtype(vocab), special_tokens(tokenizers.target)
    before, after = (
        np.array([n for name in part if (n := getattr(specials, name)) is not None], dtype).tobytes()
        for part in task.wrapper_tokens
    )
    encode = encoder(tokenizers.target, dtype)
    parts = []
    for source, tag in tagged_sources:
        if task.fields == ("src", "tgt"):
            (end,) = special_tokens(tokenizers.source).require("end")
            tag_prefix = np.array([] if tag is None else [_tag_id(tokenizers.source, tag)], dtype).tobytes()
            columns = [
                EncodedField(
                    "src",
                    encoder(tokenizers.source, dtype),
                    max_length,
                    tag_prefix,
                    np.array([end], dtype).tobytes(),
                    task.overlong,
                ),
                EncodedField("tgt", encode, max_length, suffix=after, overlong=task.overlong),
            ]
        elif (
            job.task == "lm" and not job.tokenizer.documents
        ):  # one running text; what comes in records ends with each
            columns = [EncodedField("text", encode, suffix=b"" if source.is_running_text else after)]
        else:
            columns = [EncodedField("text", encode, max_length, before, after, task.overlong)]
        if "label" in task.fields:
            columns.append(EncodedField("label", label_encoder(class_labels, source.name, vocab)))
        parts.append((ProgressSource(source, "turning texts into integers", on_progress), columns))
    return prepare(parts, folder, vocab=vocab)


def _tag_id(tokenizer: Any, tag: str) -> int:
    token_id = tokenizer.token_to_id(tag)
    if token_id is None:
        raise ValueError(
            f"the tokenizer does not know the tag {tag!r}: add it as a special token, or learn a new tokenizer"
        )
    return int(token_id)


def typical_length(
    job: TrainJob, tagged_sources: list[tuple[RecordSource, str | None]], tokenizers: Tokenizers
) -> int:
    """The tokens that 99 of 100 texts keep to, marks included, in a sample of the records."""
    max_tokens = 0
    for source, _ in tagged_sources:
        records = list(islice(source, 2000))
        for n, tokenizer in enumerate(
            (tokenizers.source, tokenizers.target) if "tgt" in source.fields else (tokenizers.target,)
        ):
            rows = encoder(tokenizer, np.dtype(np.uint32))([record[n] for record in records])
            max_tokens = max(max_tokens, int(np.quantile([len(row) // 4 for row in rows], 0.99)) + 3)
    return max_tokens


def label_names(job: TrainJob, tagged_sources: list[tuple[RecordSource, str | None]]) -> list[str]:
    """All labels of the training texts, sorted; none where the task has none."""
    if "label" not in TASKS[job.task].fields:
        return []
    label_counts = Counter(record[1] for source, _ in tagged_sources for record in source)
    if len(label_counts) < 2:
        raise ValueError(
            f"all texts have the label {next(iter(label_counts), None)!r}: to tell labels apart there must be two"
        )
    if len(label_counts) > 10_000:
        raise ValueError(
            f"there are {len(label_counts)} different labels, {', '.join(map(repr, list(label_counts)[:3]))} and so on: is the "
            "label in another column? Name the columns with train.columns"
        )
    return sorted(label_counts)
