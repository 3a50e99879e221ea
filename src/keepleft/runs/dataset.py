"""The data of a job: opened, profiled, tokenized, and written as token stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from keepleft.data import sources
from keepleft.data.fast_encode import encoder
from keepleft.data.prepare import Counts, EncodedField, label_encoder, prepare
from keepleft.data.sources import RecordSource
from keepleft.data.statistics import DataReport, profile
from keepleft.data.token_store import TokenStore, token_dtype
from keepleft.data.tokenizer import (
    SOURCE_TOKENIZER_FILE,
    load_tokenizer,
    special_tokens,
    train_tokenizer,
    vocab_size,
)
from keepleft.disk.regular_file import exists_in
from keepleft.runs.job import DataConfig, TrainJob
from keepleft.runs.tasks import TASKS
from keepleft.weights.model_directory import load, resolve_model

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_SAMPLE_CHARACTERS = 100 << 20  # that a tokenizer is trained on
PROGRESS_INTERVAL = 1 << 20  # characters between two calls of the progress callback
LENGTH_SAMPLE_RECORDS = 2000  # of each source, to find out how long texts are
MAX_LABELS = 10_000
TABLE_SUFFIXES = (".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet")

DataInput = DataConfig | str | list[DataConfig]
TaggedSources = list[tuple[RecordSource, str | None]]  # each with the language tag to put before its texts
# called with what is being done, the characters done, and of how many, if that is known
ProgressCallback = Callable[[str, int, int | None], None]


def no_progress(description: str, done: int, total: int | None) -> None:
    """The callback that ignores progress."""


def with_progress(
    source: RecordSource, description: str, on_progress: ProgressCallback
) -> Iterator[tuple[str, ...]]:
    """The records of a source; `on_progress` is called now and then, and at the end."""
    is_compressed = ".gz" in source.name or ".parquet" in source.name  # the size is not in characters
    total = None if is_compressed else source.size
    done = 0
    last_reported = 0
    for record in source:
        yield record
        done += sum(map(len, record)) + len(record)
        if done - last_reported >= PROGRESS_INTERVAL:
            last_reported = done
            on_progress(description, done, total)
    on_progress(description, done, done)


class ProgressSource(RecordSource):
    """A source that reports the progress of each iteration over it."""

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
    """The tokenizers of source and target; they are the same object if the vocabulary is joint."""

    target: Tokenizer
    source: Tokenizer

    @property
    def joint(self) -> bool:
        return self.source is self.target


def open_sources(job: TrainJob, data: DataInput) -> TaggedSources:
    """Open the training or validation data of a job. Raises ValueError if they do not suit its task."""
    if isinstance(data, str):
        data = DataConfig(path=data)
    configs = data if isinstance(data, list) else [data]
    return [(_open_source(job, config), config.tag) for config in configs]


def _open_source(job: TrainJob, data: DataConfig) -> RecordSource:
    field_names = TASKS[job.task].fields
    if data.src is not None or data.tgt is not None:
        if data.src is None or data.tgt is None:
            given_side = "src" if data.tgt is None else "tgt"
            raise ValueError(
                f"only {given_side} was given: line-aligned texts need both src and tgt, as in --train.src "
                "a.en --train.tgt a.fr"
            )
        if not TASKS[job.task].is_paired:
            raise ValueError(
                f"src and tgt were given, but the task {job.task} reads {' and '.join(field_names)}: give "
                "one file"
            )
        return sources.parallel_text(data.src, data.tgt)
    if data.path is None:
        raise ValueError(
            "no text was given: name a file with --train, or two with --train.src and --train.tgt"
        )
    if field_names == ("text",) and data.columns is None and is_plain_text(data.path):
        return sources.running_text(data.path) if job.is_running_text else sources.documents(data.path)
    return sources.open_source(data.path, field_names, data.columns)


def is_plain_text(path: str) -> bool:
    """Whether a file is read as text, and not as a table."""
    if path.startswith("hf:") or Path(path).is_dir():
        return False
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return not suffixes or suffixes[-1] not in TABLE_SUFFIXES


def profile_sources(tagged_sources: TaggedSources, on_progress: ProgressCallback) -> list[DataReport]:
    return [
        profile(ProgressSource(source, "profiling the data", on_progress)) for source, _ in tagged_sources
    ]


def build_tokenizers(
    job: TrainJob, tagged_sources: TaggedSources, vocab: int, on_progress: ProgressCallback = no_progress
) -> Tokenizers:
    """Load the tokenizers that the job names, or train them on the training data.

    `vocab` is the largest size of a vocabulary.
    """
    task = TASKS[job.task]
    config = job.tokenizer
    if config.path is not None or job.init_from is not None:
        if config.path is not None:
            target = load_tokenizer(config.path)
            folder = Path(config.path)
        else:
            folder = resolve_model(str(job.init_from))
            target = _model_tokenizer(folder)
        if config.source_path:
            return Tokenizers(target, load_tokenizer(config.source_path))
        if exists_in(folder, SOURCE_TOKENIZER_FILE):
            return Tokenizers(target, load_tokenizer(folder, SOURCE_TOKENIZER_FILE))
        return Tokenizers(target, target)
    tags = [tag for _, tag in tagged_sources if tag is not None]
    extra_tokens = [*task.extra_special_tokens, *dict.fromkeys(tags)]

    def iter_texts(fields: tuple[int, ...]) -> Iterator[str]:
        for source, _ in tagged_sources:
            done = 0
            for record in ProgressSource(source, "training the tokenizer", on_progress):
                for n in fields:
                    yield record[n]
                    done += len(record[n])
                if done > MAX_SAMPLE_CHARACTERS // len(tagged_sources):
                    break

    def train(fields: tuple[int, ...], extra_special_tokens: list[str]) -> Tokenizer:
        return train_tokenizer(
            config.kind,
            iter_texts(fields),
            vocab,
            running_text=job.task == "lm",
            extra_special_tokens=extra_special_tokens,
            min_frequency=config.min_frequency,
        )

    if task.is_paired and not config.joint:
        source = train((0,), extra_tokens)
        return Tokenizers(target=train((1,), []), source=source)
    tokenizer = train((0, 1) if task.is_paired else (0,), extra_tokens)
    return Tokenizers(tokenizer, tokenizer)


def _model_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer in a model directory."""
    _, tokenizer = load(model_path, device="meta")
    if tokenizer is None:
        raise ValueError(f"{model_path} has no tokenizer: name one with --tokenizer.path")
    tokenizer.encode_special_tokens = True  # "</s>" within a text is text
    return tokenizer


def build_store(
    job: TrainJob,
    tagged_sources: TaggedSources,
    tokenizers: Tokenizers,
    class_labels: list[str],
    max_length: int,
    folder: Path,
    on_progress: ProgressCallback = no_progress,
) -> tuple[TokenStore, Counts]:
    """Tokenize the data into a token store on disk, with the task's special tokens around each text."""
    task = TASKS[job.task]
    vocab = max(vocab_size(tokenizers.target), vocab_size(tokenizers.source), len(class_labels))
    dtype = token_dtype(vocab)
    specials = special_tokens(tokenizers.target)
    before, after = (
        np.array([n for name in names if (n := getattr(specials, name)) is not None], dtype).tobytes()
        for names in task.wrapper_tokens
    )
    encode = encoder(tokenizers.target, dtype)
    parts = []
    for source, tag in tagged_sources:
        if task.is_paired:
            (end,) = special_tokens(tokenizers.source).require("end")
            tag_ids = [] if tag is None else [_tag_id(tokenizers.source, tag)]
            source_column = EncodedField(
                "src",
                encoder(tokenizers.source, dtype),
                max_length,
                prefix=np.array(tag_ids, dtype).tobytes(),
                suffix=np.array([end], dtype).tobytes(),
                overlong=task.overlong,
            )
            target_column = EncodedField("tgt", encode, max_length, suffix=after, overlong=task.overlong)
            columns = [source_column, target_column]
        elif (
            job.is_running_text
        ):  # the records of a table are texts of their own, with an end token after each
            columns = [EncodedField("text", encode, suffix=b"" if source.is_running_text else after)]
        else:
            columns = [EncodedField("text", encode, max_length, before, after, task.overlong)]
        if "label" in task.fields:
            columns.append(EncodedField("label", label_encoder(class_labels, source.name, vocab)))
        parts.append((ProgressSource(source, "tokenizing", on_progress), columns))
    return prepare(parts, folder, vocab=vocab)


def _tag_id(tokenizer: Tokenizer, tag: str) -> int:
    token_id = tokenizer.token_to_id(tag)
    if token_id is None:
        raise ValueError(
            f"the tokenizer does not know the tag {tag!r}: add it as a special token, or train a new "
            "tokenizer"
        )
    return int(token_id)


def typical_length(tagged_sources: TaggedSources, tokenizers: Tokenizers) -> int:
    """The tokens that 99 of 100 texts do not exceed, special tokens included, in a sample of the records."""
    dtype = np.dtype(np.uint32)
    max_tokens = 0
    for source, _ in tagged_sources:
        records = list(islice(source, LENGTH_SAMPLE_RECORDS))
        is_paired = "tgt" in source.fields
        columns = (tokenizers.source, tokenizers.target) if is_paired else (tokenizers.target,)
        for n, tokenizer in enumerate(columns):
            rows = encoder(tokenizer, dtype)([record[n] for record in records])  # bytes of each text
            lengths = [len(row) // dtype.itemsize for row in rows]
            # 3: the special tokens around a text, of which there are two at most, and one to spare
            max_tokens = max(max_tokens, int(np.quantile(lengths, 0.99)) + 3)
    return max_tokens


def label_names(job: TrainJob, tagged_sources: TaggedSources) -> list[str]:
    """The labels of the training data, sorted; empty if the task has none.

    Raises ValueError if there are fewer than two, or so many that they cannot be labels.
    """
    if "label" not in TASKS[job.task].fields:
        return []
    label_counts = Counter(record[1] for source, _ in tagged_sources for record in source)
    if len(label_counts) < 2:
        only_label = next(iter(label_counts), None)
        raise ValueError(f"all texts have the label {only_label!r}: to tell labels apart there must be two")
    if len(label_counts) > MAX_LABELS:
        examples = ", ".join(map(repr, list(label_counts)[:3]))
        raise ValueError(
            f"there are {len(label_counts)} different labels, {examples} and so on: is the label in another "
            "column? Name the columns with train.columns"
        )
    return sorted(label_counts)
