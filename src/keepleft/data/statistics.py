"""Statistics of a dataset before training: lengths, scripts, labels, duplicates, warnings."""

from __future__ import annotations

import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from operator import eq
from typing import Any

import numpy as np

from keepleft.data.records import Record, RecordSource

MAX_HASHED_RECORDS = 20_000_000  # records compared for duplicates, at 8 bytes each
EXACT_SCRIPT_CHARACTERS = 1 << 21  # of a field; after these, scripts are those of one record in STRIDE
SCRIPT_SAMPLE_STRIDE = 16
MAX_LABELS = 100_000  # distinct labels counted
MAX_REPORTED_LABELS = 50
MIN_LABEL_EXAMPLES = 5  # a label with fewer is hardly learned
# a pair is mismatched if one side has more than MAX_LENGTH_RATIO times the words of the other, and more than
# MIN_RATIO_WORDS
MAX_LENGTH_RATIO = 3
MIN_RATIO_WORDS = 10
BATCH_CHARACTERS = 1 << 18  # characters counted together
REPLACEMENT_CHARACTER = "\ufffd"


@dataclass(frozen=True)
class LengthStats:
    """Lengths of one field's texts, in characters or in words."""

    median: int
    p95: int  # 95th percentile
    max: int
    total: int

    @classmethod
    def from_counts(cls, counts: Counter[int]) -> LengthStats:
        """From the number of texts of each length."""
        num_texts = counts.total()
        cumulative = 0
        median = None
        p95 = None
        for length in sorted(counts):
            cumulative += counts[length]
            if median is None and 2 * cumulative >= num_texts:
                median = length
            if p95 is None and 100 * cumulative >= 95 * num_texts:
                p95 = length
        return cls(
            median or 0, p95 or 0, max(counts, default=0), sum(length * n for length, n in counts.items())
        )


@dataclass(frozen=True)
class FieldStats:
    """One of the strings of every record."""

    name: str
    count: int
    empty: int  # nothing but white space
    characters: LengthStats
    words: LengthStats  # separated by white space
    scripts: dict[str, float]  # share of the letters, largest first
    replacement_characters: int  # U+FFFD, which a wrong encoding leaves behind


@dataclass(frozen=True)
class DataReport:
    """The statistics of a source; lines() formats them for people, record() for JSON."""

    name: str
    size: int | None  # bytes on disk
    count: int  # records read
    complete: bool  # whether these are all records of the source
    fields: tuple[FieldStats, ...]
    duplicates: int  # records equal to an earlier one
    compared: int  # records among which duplicates were counted
    half_empty: int | None  # pairs with one side empty; None where records are not pairs of texts
    identical: int | None  # pairs with both sides the same
    length_mismatches: int | None  # pairs of very different length
    max_words: int | None  # the limit that was given
    overlong: int | None  # records beyond it
    labels: dict[str, int]  # the most common, with how often each occurs
    num_labels: int  # distinct labels
    sampled: bool  # whether scripts were estimated from a part of the records
    warnings: tuple[str, ...]
    running_lines: int | None = None  # lines of a running text; None where records are independent

    def lines(self) -> list[str]:
        """The report as lines of text."""
        size = "" if self.size is None else f", {_format_bytes(self.size)} on disk"
        contents = (
            _format_count(self.count, "record")
            if self.running_lines is None
            else f"a running text of {_format_count(self.running_lines, 'line')}"
        )
        out = [f"{self.name}: {'' if self.complete else 'the first '}{contents}{size}"]
        for field in self.fields:
            out += self._field_lines(field)
        if self.running_lines is None:
            note = f" among the first {self.compared:,}; later ones were not compared"
            note = "" if self.compared == self.count else note
            share = _format_share(self.duplicates, self.compared)
            out.append(f"  repeated records: {self.duplicates:,} ({share}){note}")
        if self.identical is not None and self.length_mismatches is not None:
            out.append(
                f"  pairs the same on both sides: {self.identical:,}; {MAX_LENGTH_RATIO} times longer on one "
                f"side: {self.length_mismatches:,}"
            )
        if self.overlong is not None:
            share = _format_share(self.overlong, self.count)
            out.append(f"  longer than {self.max_words:,} words: {self.overlong:,} ({share})")
        if self.labels:
            label_counts = ", ".join(f"{label} {count:,}" for label, count in self.labels.items())
            hidden = self.num_labels - MAX_REPORTED_LABELS
            out.append(f"  labels: {label_counts}{f', and {hidden:,} more' if hidden > 0 else ''}")
        return out + [f"  warning: {warning}" for warning in self.warnings]

    def _field_lines(self, field: FieldStats) -> Iterator[str]:
        chars, words = field.characters, field.words
        totals = (
            f"  {field.name}: {_format_count(words.total, 'word')}, {_format_count(chars.total, 'character')}"
        )
        if self.running_lines is None:
            totals += (
                f"; median, 95 % and longest record {words.median:,}, {words.p95:,} and {words.max:,} words, "
                f"{chars.median:,}, {chars.p95:,} and {chars.max:,} characters"
            )
        yield totals
        if field.empty:
            share = _format_share(field.empty, field.count)
            yield f"    {_format_count(field.empty, 'record')} empty, {share}"
        if field.scripts:
            largest = list(field.scripts.items())[:5]
            shares = ", ".join(f"{name} {_format_percent(share)}" for name, share in largest)
            note = f" (from one record in {SCRIPT_SAMPLE_STRIDE})" if self.sampled else ""
            yield f"    letters: {shares}{note}"

    def record(self) -> dict[str, Any]:
        """The report as data for JSON."""
        out = asdict(self)
        out["fields"] = {field.pop("name"): field for field in out["fields"]}
        out["warnings"] = list(self.warnings)
        return out


class _FieldTally:
    """Running counts of one field."""

    def __init__(self) -> None:
        self.characters: Counter[int] = Counter()  # number of texts of each length
        self.words: Counter[int] = Counter()
        self.character_counts: Counter[str] = Counter()  # in all of the first texts
        self.sampled_counts: Counter[str] = Counter()  # in one of SCRIPT_SAMPLE_STRIDE later ones
        self.exact_characters = 0

    def add(self, texts: tuple[str, ...], num_seen: int) -> list[int]:
        """Count more texts, after `num_seen` others; returns the number of words of each."""
        self.characters.update(map(len, texts))
        words = [len(text.split()) for text in texts]
        self.words.update(words)
        if self.exact_characters < EXACT_SCRIPT_CHARACTERS:
            joined = "".join(texts)
            self.exact_characters += len(joined)
            self.character_counts.update(joined)
        else:
            self.sampled_counts.update(
                "".join(texts[-num_seen % SCRIPT_SAMPLE_STRIDE :: SCRIPT_SAMPLE_STRIDE])
            )
        return words

    def field(self, name: str) -> FieldStats:
        character_counts = self.character_counts.copy()
        for character, count in self.sampled_counts.items():
            character_counts[character] += SCRIPT_SAMPLE_STRIDE * count
        return FieldStats(
            name,
            self.words.total(),
            self.words[0],
            LengthStats.from_counts(self.characters),
            LengthStats.from_counts(self.words),
            script_shares(character_counts),
            character_counts[REPLACEMENT_CHARACTER],
        )


def profile(source: RecordSource, *, max_words: int | None = None, sample: int | None = None) -> DataReport:
    """Read a source once and report on it.

    Records with more than `max_words` words are counted; `sample` limits the report to the first records.

    Memory: 8 bytes a record for duplicates, for at most 20 million records, and a little for each distinct
    length, character and label. Scripts are exact for the first 2 million characters of a field, then
    estimated from every 16th record.
    """
    fields = source.fields
    text_fields = [index for index, name in enumerate(fields) if name != "label"]
    pair_fields = text_fields if len(text_fields) == 2 else None
    label_field = fields.index("label") if "label" in fields else None
    tallies = [_FieldTally() for _ in fields]
    labels = Counter[str]()
    hashes = array("q")
    count = half_empty = identical = length_mismatches = overlong = line_breaks = 0
    last_character = "\n"
    records, complete = iter(source), True
    for batch in _batches(records if sample is None else islice(records, sample)):
        columns = list(zip(*batch, strict=True))
        word_counts = [tally.add(column, count) for tally, column in zip(tallies, columns, strict=True)]
        if len(hashes) < MAX_HASHED_RECORDS:
            # 64 bits: among 20 million a false duplicate has a chance of one in 100,000
            hashes.extend(map(hash, batch))
        if pair_fields:
            (src, tgt), (src_words, tgt_words) = (
                (values[pair_fields[0]], values[pair_fields[1]]) for values in (columns, word_counts)
            )
            identical += sum(1 for equal, n in zip(map(eq, src, tgt), src_words, strict=True) if equal and n)
            half_empty += sum(1 for a, b in zip(src_words, tgt_words, strict=True) if bool(a) != bool(b))
            length_mismatches += sum(
                1
                for a, b in zip(src_words, tgt_words, strict=True)
                if (a > MIN_RATIO_WORDS or b > MIN_RATIO_WORDS)
                and a
                and b
                and (a > MAX_LENGTH_RATIO * b or b > MAX_LENGTH_RATIO * a)
            )
        if source.is_running_text:
            line_breaks += sum(piece.count("\n") for (piece,) in batch)
            last_character = batch[-1][0][-1:]
        if max_words is not None:
            overlong += sum(
                1
                for record_words in zip(*(word_counts[index] for index in text_fields), strict=True)
                if max(record_words) > max_words
            )
        if label_field is not None and len(labels) < MAX_LABELS:
            labels.update(columns[label_field])
        count += len(batch)
    if sample is not None and count == sample:
        complete = next(records, None) is None
    field_stats = tuple(tally.field(name) for tally, name in zip(tallies, fields, strict=True))
    report = DataReport(
        name=source.name,
        size=source.size,
        count=count,
        complete=complete,
        fields=field_stats,
        duplicates=_count_duplicates(hashes),
        compared=len(hashes),
        half_empty=half_empty if pair_fields else None,
        identical=identical if pair_fields else None,
        length_mismatches=length_mismatches if pair_fields else None,
        max_words=max_words,
        overlong=None if max_words is None else overlong,
        labels=dict(labels.most_common(MAX_REPORTED_LABELS)),
        num_labels=len(labels),
        sampled=any(tally.sampled_counts for tally in tallies),
        warnings=(),
        running_lines=line_breaks + (last_character != "\n") if source.is_running_text else None,
    )
    return replace(report, warnings=tuple(_warnings(report, labels)))


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Batches of many short records or few long ones."""
    batch_size = 16
    while batch := list(islice(records, batch_size)):
        yield batch
        characters = sum(map(len, [text for record in batch for text in record]))
        batch_size = min(4096, max(1, BATCH_CHARACTERS * len(batch) // (characters + 1)), 4 * batch_size)


def _count_duplicates(hashes: array[int]) -> int:
    """How many hashes equal an earlier one; sorts them in place."""
    if not hashes:
        return 0
    values = np.frombuffer(hashes, dtype=np.int64)
    values.sort()
    return int(np.count_nonzero(values[1:] == values[:-1]))


def _warnings(report: DataReport, labels: Counter[str]) -> Iterator[str]:
    if report.half_empty:
        share = _format_share(report.half_empty, report.count)
        yield f"{share} of the pairs are empty on one side ({report.half_empty:,})"
    for field in report.fields:
        if report.half_empty is None and field.empty:
            share = _format_share(field.empty, field.count)
            yield f"{share} of the records have an empty {field.name} ({field.empty:,})"
        if field.replacement_characters:
            count = _format_count(field.replacement_characters, "replacement character")
            about = "about " if report.sampled else ""
            yield f"{field.name} holds {about}{count} (U+FFFD): it was once read in a wrong encoding"
    if report.running_lines is None and 100 * report.duplicates > report.compared:
        share = _format_share(report.duplicates, report.compared)
        yield f"{share} of the records repeat an earlier one ({report.duplicates:,})"
    if report.identical and 100 * report.identical > report.count:
        share = _format_share(report.identical, report.count)
        yield f"{share} of the pairs are the same on both sides ({report.identical:,})"
    if report.overlong:
        share = _format_share(report.overlong, report.count)
        limit = _format_count(report.max_words or 0, "word")
        yield f"{share} of the records are longer than {limit} ({report.overlong:,})"
    if report.compared < report.count:
        yield f"repeated records were counted among the first {report.compared:,} only, to bound the memory"
    if labels:
        yield from _label_warnings(report, labels)


def _label_warnings(report: DataReport, labels: Counter[str]) -> Iterator[str]:
    if len(labels) == 1:
        yield f"labels: all are {next(iter(labels))!r}, so there is nothing to learn"
    if (len(labels) > 100 and 2 * len(labels) > report.count) or len(labels) >= MAX_LABELS:
        yield f"labels: {_format_count(len(labels), 'different one')}: is this the column of labels?"
        return
    rare = [(count, label) for label, count in labels.items() if count < MIN_LABEL_EXAMPLES]
    if len(rare) == 1:
        yield f"labels: {rare[0][1]!r} has only {_format_count(rare[0][0], 'example')}"
    elif rare:
        count, label = min(rare)
        yield f"labels: {len(rare):,} have fewer than {MIN_LABEL_EXAMPLES} examples, {label!r} only {count}"


# scripts --------------------------------------------------------------------------------------

# first words of Unicode names that are not those of a script
SCRIPT_ALIASES = {
    "CJK": "Han",
    "IDEOGRAPHIC": "Han",
    "FEMININE": "Latin",
    "MASCULINE": "Latin",
    "MICRO": "Greek",
    "MODIFIER": "Other",
    "ANGSTROM": "Latin",
    "KELVIN": "Latin",
}


def script(letter: str) -> str:
    """The script of one letter, by the first word of its Unicode name."""
    first, *rest = unicodedata.name(letter, "OTHER").split()
    prefix = rest[0] if first in ("FULLWIDTH", "HALFWIDTH") and rest else first
    return SCRIPT_ALIASES.get(prefix.split("-")[0], prefix.capitalize())


def script_shares(characters: Mapping[str, int]) -> dict[str, float]:
    """The share of each script among the letters, largest first, from how often each character occurs."""
    counts: Counter[str] = Counter()
    for character, count in characters.items():
        if character.isalpha():
            counts[script(character)] += count
    num_letters = counts.total()
    return {name: count / num_letters for name, count in counts.most_common()}


# numbers as text ------------------------------------------------------------------------------


def _format_count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _format_share(part: int, total: int) -> str:
    return _format_percent(part / total if total else 0.0)


def _format_percent(fraction: float) -> str:
    """Never "0 %" of something, nor "100 %" of less than all."""
    percent = 100 * fraction
    if percent in (0, 100) or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    if percent > 99:
        return f"{min(percent, 99.9):.1f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"


def _format_bytes(size: int) -> str:
    for unit, bound in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bound:
            return f"{size / bound:.1f} {unit}"
    return _format_count(size, "byte")
