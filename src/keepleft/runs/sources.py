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
from keepleft.data.encoding import encoder
from keepleft.data.prepare import Column, Counts, labels, prepare
from keepleft.data.report import Report, look
from keepleft.data.sources import Source
from keepleft.data.store import Store, kind_of
from keepleft.data.tokenizer import learn, marks, read, span
from keepleft.runs.job import Job, Texts
from keepleft.runs.tasks import TASKS
from keepleft.weights.files import load

SAMPLE = 100 << 20  # characters that a tokenizer is learned from, at most
EVERY = 1 << 20     # characters between two words about progress

Given = Texts | str | list[Texts]
Watch = Callable[[str, int, int | None], None]  # what is being done, characters done, and of how many, if that is known


def unwatched(what: str, done: int, total: int | None) -> None:
    """No one asked."""


def told(source: Source, what: str, watch: Watch) -> Iterator[tuple[str, ...]]:
    """The records of a source; now and then `watch` hears how far it has come."""
    total = None if source.size is None or ".gz" in source.name or ".parquet" in source.name else source.size
    done, said = 0, 0
    for record in source:
        yield record
        done += sum(map(len, record)) + len(record)
        if done - said >= EVERY:
            said = done
            watch(what, done, total)
    watch(what, done, done)


class Told(Source):
    """A source whose reading can be watched."""

    def __init__(self, source: Source, what: str, watch: Watch) -> None:
        self.source, self.what, self.watch = source, what, watch
        self.fields, self.name, self.size = source.fields, source.name, source.size

    @property
    def running(self) -> bool:
        return self.source.running

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return told(self.source, self.what, self.watch)

    def where(self, n: int) -> str:
        return self.source.where(n)


@dataclass(frozen=True)
class Tokenizers:
    target: Any
    source: Any  # the same one, where the vocabulary is joint

    @property
    def joint(self) -> bool:
        return self.source is self.target


def opened(job: Job, given: Given) -> list[tuple[Source, str | None]]:
    """The sources, each with the language tag that goes before its texts."""
    parts = given if isinstance(given, list) else [given]
    return [(_open(job, Texts(path=part) if isinstance(part, str) else part), None if isinstance(part, str) else part.tag)
            for part in parts]


def _open(job: Job, texts: Texts) -> Source:
    wanted = TASKS[job.task].fields
    if texts.src is not None or texts.tgt is not None:
        if texts.src is None or texts.tgt is None:
            one = "src" if texts.tgt is None else "tgt"
            raise ValueError(f"only {one} was given: line-aligned texts need both src and tgt")
        if wanted != ("src", "tgt"):
            raise ValueError(f"src and tgt were given, but the task {job.task} reads {' and '.join(wanted)}: give one file")
        return sources.aligned(texts.src, texts.tgt)
    if texts.path is None:
        raise ValueError("no text was given: name a file with --train, or two with --train.src and --train.tgt")
    if wanted == ("text",) and texts.columns is None and _plain(texts.path):
        return sources.documents(texts.path) if job.words.documents or job.task != "lm" else sources.whole(texts.path)
    return sources.open_source(texts.path, wanted, texts.columns)


def _plain(path: str) -> bool:
    suffixes = [suffix for suffix in Path(path).suffixes if suffix != ".gz"]
    return not path.startswith("hf:") and not Path(path).is_dir() and (
        not suffixes or suffixes[-1] not in (".tsv", ".csv", ".jsonl", ".ndjson", ".json", ".parquet"))


def looked(found: list[tuple[Source, str | None]], watch: Watch) -> list[Report]:
    return [look(Told(source, "looking at the texts", watch)) for source, _ in found]


def tokenizers(job: Job, found: list[tuple[Source, str | None]], size: int, watch: Watch = unwatched) -> Tokenizers:
    """Read them, or learn them from the training texts."""
    task, words = TASKS[job.task], job.words
    if words.path is not None or job.start is not None:
        target = read(words.path) if words.path is not None else _of(str(job.start))
        other = words.source_path or str(Path(words.path or str(job.start)) / "source_tokenizer.json")
        return Tokenizers(target, read(other) if words.source_path or Path(other).exists() else target)
    tags = [tag for _, tag in found if tag is not None]
    running = task.fields == ("text",) and job.task == "lm"
    more = [*task.more, *dict.fromkeys(tags)]

    def texts(fields: tuple[int, ...]) -> Iterator[str]:
        for source, _ in found:
            done = 0
            for record in Told(source, "learning the tokenizer", watch):
                for n in fields:
                    yield record[n]
                    done += len(record[n])
                if done > SAMPLE // len(found):
                    break

    if task.fields == ("src", "tgt") and not words.joint:
        source, target = (learn(words.kind, texts((n,)), size, running=running, more=more if n == 0 else (), least=words.least)
                          for n in (0, 1))
        return Tokenizers(target, source)
    fields = (0, 1) if task.fields == ("src", "tgt") else (0,)
    both = learn(words.kind, texts(fields), size, running=running, more=more, least=words.least)
    return Tokenizers(both, both)


def _of(place: str) -> Any:
    """The tokenizer that belongs to a model."""
    _, found = load(place, device="meta")
    if found is None:
        raise ValueError(f"{place} has no tokenizer: name one with --words.path")
    found.encode_special_tokens = True
    return found


def store(job: Job, found: list[tuple[Source, str | None]], words: Tokenizers, known: list[str], longest: int,
          folder: Path, watch: Watch = unwatched) -> tuple[Store, Counts]:
    """The texts as integers, on disk."""
    task = TASKS[job.task]
    vocab = max(span(words.target), span(words.source), len(known))
    kind, ends = kind_of(vocab), marks(words.target)
    before, after = (np.array([n for name in part if (n := getattr(ends, name)) is not None], kind).tobytes()
                     for part in task.around)
    encode = encoder(words.target, kind)
    parts = []
    for source, tag in found:
        if task.fields == ("src", "tgt"):
            end, = marks(words.source).need("end")
            lead = np.array([] if tag is None else [_tagged(words.source, tag)], kind).tobytes()
            columns = [Column("src", encoder(words.source, kind), longest, lead, np.array([end], kind).tobytes(), task.long),
                       Column("tgt", encode, longest, after=after, long=task.long)]
        elif job.task == "lm" and not job.words.documents:  # one running text; what comes in records ends with each
            columns = [Column("text", encode, after=b"" if source.running else after)]
        else:
            columns = [Column("text", encode, longest, before, after, task.long)]
        if "label" in task.fields:
            columns.append(Column("label", labels(known, source.name, vocab)))
        parts.append((Told(source, "turning texts into integers", watch), columns))
    return prepare(parts, folder, vocab=vocab)


def _tagged(tokenizer: Any, tag: str) -> int:
    number = tokenizer.token_to_id(tag)
    if number is None:
        raise ValueError(f"the tokenizer does not know the tag {tag!r}: add it as a special token, or learn a new tokenizer")
    return int(number)


def usual_length(job: Job, found: list[tuple[Source, str | None]], words: Tokenizers) -> int:
    """The tokens that 99 of 100 texts keep to, marks included, in a sample of the records."""
    most = 0
    for source, _ in found:
        some = list(islice(source, 2000))
        for n, tokenizer in enumerate((words.source, words.target) if "tgt" in source.fields else (words.target,)):
            rows = encoder(tokenizer, np.dtype(np.uint32))([record[n] for record in some])
            most = max(most, int(np.quantile([len(row) // 4 for row in rows], 0.99)) + 3)
    return most


def labels_of(job: Job, found: list[tuple[Source, str | None]]) -> list[str]:
    """All labels of the training texts, sorted; none where the task has none."""
    if "label" not in TASKS[job.task].fields:
        return []
    seen = Counter(record[1] for source, _ in found for record in source)
    if len(seen) < 2:
        raise ValueError(f"all texts have the label {next(iter(seen), None)!r}: to tell labels apart there must be two")
    if len(seen) > 10_000:
        raise ValueError(f"there are {len(seen)} different labels, {', '.join(map(repr, list(seen)[:3]))} and so on: is the "
                         "label in another column? Name the columns with train.columns")
    return sorted(seen)
