"""What a source holds: a look at all of it before training."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from operator import eq
from typing import Any

import numpy as np

from keepleft.data.records import Record, Source
from keepleft.data.scripts import mix

HASHED = 20_000_000  # records compared with one another, at 8 bytes each; beyond these repeats are not counted
CLOSELY = 1 << 21    # characters of a field whose every letter is looked at for its script; after these one record in STRIDE
STRIDE = 16
KINDS = 100_000      # different labels counted, at most
SHOWN = 50           # of them, kept in the report
RARE = 5             # a label with fewer examples is hardly learnt
RATIO, FROM = 3, 10  # a pair is odd if one side has more than RATIO times the words of the other, and more than FROM
BATCH = 1 << 18      # characters looked at together
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Lengths:
    """Of one field's texts, in characters or in words."""

    median: int
    most: int     # 95 of 100 are no longer
    longest: int
    total: int

    @classmethod
    def of(cls, counts: Counter[int]) -> Lengths:
        """From how many texts have each length."""
        number, seen, median, most = counts.total(), 0, None, None
        for length in sorted(counts):
            seen += counts[length]
            if median is None and 2 * seen >= number:
                median = length
            if most is None and 100 * seen >= 95 * number:
                most = length
        return cls(median or 0, most or 0, max(counts, default=0), sum(length * n for length, n in counts.items()))


@dataclass(frozen=True)
class Field:
    """One of the strings of every record."""

    name: str
    count: int
    empty: int                 # nothing but white space
    characters: Lengths
    words: Lengths             # words are what white space separates
    scripts: dict[str, float]  # share of the letters, largest first
    strange: int               # replacement characters, U+FFFD, which a wrong encoding leaves behind


@dataclass(frozen=True)
class Report:
    """The numbers; lines() says them, record() gives them to a program."""

    name: str
    size: int | None            # bytes on disk
    count: int                  # records looked at
    complete: bool              # whether these are all there are
    fields: tuple[Field, ...]
    duplicates: int             # records that repeat an earlier one, letter by letter
    compared: int               # records that were looked at for that
    half: int | None            # pairs with one side empty; None where records are not pairs of texts
    same: int | None            # pairs with both sides the same
    odd: int | None             # pairs of very different length
    longest: int | None         # the limit, in words, that was given
    overlong: int | None        # records with more
    labels: dict[str, int]      # the commonest, with how often each occurs
    kinds: int                  # how many different labels there are
    sampled: bool               # whether scripts were estimated from a part of the records
    warnings: tuple[str, ...]
    running: int | None = None  # lines of a running text, of which a record is just the next piece; None: records stand alone

    def lines(self) -> list[str]:
        """For people."""
        size = "" if self.size is None else f", {_bytes(self.size)} on disk"
        what = _number(self.count, "record") if self.running is None else f"a running text of {_number(self.running, 'line')}"
        out = [f"{self.name}: {'' if self.complete else 'the first '}{what}{size}"]
        for field in self.fields:
            chars, words = field.characters, field.words
            each = "" if self.running is not None else (
                f"; median, 95 % and longest record {words.median:,}, {words.most:,} and {words.longest:,} words, "
                f"{chars.median:,}, {chars.most:,} and {chars.longest:,} characters")
            out.append(f"  {field.name}: {_number(words.total, 'word')}, {_number(chars.total, 'character')}{each}")
            if field.empty:
                out.append(f"    {_number(field.empty, 'record')} empty, {_share(field.empty, field.count)}")
            if field.scripts:
                shown = ", ".join(f"{name} {_percent(share)}" for name, share in list(field.scripts.items())[:5])
                out.append(f"    letters: {shown}{' (from one record in ' + str(STRIDE) + ')' if self.sampled else ''}")
        beyond = "" if self.compared == self.count else f" among the first {self.compared:,}; later ones were not compared"
        if self.running is None:
            out.append(f"  repeated records: {self.duplicates:,} ({_share(self.duplicates, self.compared)}){beyond}")
        if self.same is not None and self.odd is not None:
            out.append(f"  pairs the same on both sides: {self.same:,}; {RATIO} times longer on one side: {self.odd:,}")
        if self.overlong is not None:
            out.append(f"  longer than {self.longest:,} words: {self.overlong:,} ({_share(self.overlong, self.count)})")
        if self.labels:
            more = f", and {self.kinds - SHOWN:,} more" if self.kinds > SHOWN else ""
            out.append("  labels: " + ", ".join(f"{label} {count:,}" for label, count in self.labels.items()) + more)
        return out + [f"  warning: {warning}" for warning in self.warnings]

    def record(self) -> dict[str, Any]:
        """For JSON."""
        out = asdict(self)
        out["fields"] = {field.pop("name"): field for field in out["fields"]}
        out["warnings"] = list(self.warnings)
        return out


class _Tally:
    """What is counted of one field while it passes by."""

    def __init__(self) -> None:
        self.characters: Counter[int] = Counter()  # how many texts have each length
        self.words: Counter[int] = Counter()
        self.letters: Counter[str] = Counter()     # how often each character occurs, in all of the first texts
        self.sampled: Counter[str] = Counter()     # and in one in STRIDE of the later ones
        self.close = 0

    def add(self, texts: tuple[str, ...], seen: int) -> list[int]:
        """Count more texts, after `seen` others; the words of each are given back."""
        self.characters.update(map(len, texts))
        words = [len(text.split()) for text in texts]
        self.words.update(words)
        if self.close < CLOSELY:
            near = "".join(texts)
            self.close += len(near)
            self.letters.update(near)
        else:
            self.sampled.update("".join(texts[-seen % STRIDE::STRIDE]))
        return words

    def field(self, name: str) -> Field:
        letters = self.letters.copy()
        for character, count in self.sampled.items():
            letters[character] += STRIDE * count
        return Field(name, self.words.total(), self.words[0], Lengths.of(self.characters), Lengths.of(self.words),
                     mix(letters), letters[REPLACEMENT])


def look(source: Source, *, longest: int | None = None, sample: int | None = None) -> Report:
    """Go through a source once. `longest` is a limit in words to count against; `sample` looks at the first records only.

    Memory: 8 bytes a record for repeats, of at most 20 million records, and a little for each different length, character
    and label. Scripts are exact for the first 2 million characters of a field, then estimated from every 16th record.
    """
    fields = source.fields
    texts = [at for at, name in enumerate(fields) if name != "label"]
    pair = texts if len(texts) == 2 else None
    label = fields.index("label") if "label" in fields else None
    tallies, labels, hashes = [_Tally() for _ in fields], Counter[str](), array("q")
    count = half = same = odd = overlong = breaks = 0
    end = "\n"
    records, whole = iter(source), True
    for batch in _batches(records if sample is None else islice(records, sample)):
        columns = list(zip(*batch, strict=True))
        words = [tally.add(column, count) for tally, column in zip(tallies, columns, strict=True)]
        if len(hashes) < HASHED:
            hashes.extend(map(hash, batch))  # 64 bits: among 20 million a false repeat has a chance of one in 100,000
        if pair:
            (src, tgt), (left, right) = ((of[pair[0]], of[pair[1]]) for of in (columns, words))
            same += sum(1 for equal, n in zip(map(eq, src, tgt), left, strict=True) if equal and n)
            half += sum(1 for a, b in zip(left, right, strict=True) if bool(a) != bool(b))
            odd += sum(1 for a, b in zip(left, right, strict=True)
                       if (a > FROM or b > FROM) and a and b and (a > RATIO * b or b > RATIO * a))
        if source.running:
            breaks, end = breaks + sum(piece.count("\n") for piece, in batch), batch[-1][0][-1:]
        if longest is not None:
            overlong += sum(1 for each in zip(*(words[at] for at in texts), strict=True) if max(each) > longest)
        if label is not None and len(labels) < KINDS:
            labels.update(columns[label])
        count += len(batch)
    if sample is not None and count == sample:
        whole = next(records, None) is None
    found = tuple(tally.field(name) for tally, name in zip(tallies, fields, strict=True))
    report = Report(
        name=source.name, size=source.size, count=count, complete=whole, fields=found,
        duplicates=_repeats(hashes), compared=len(hashes), half=half if pair else None, same=same if pair else None,
        odd=odd if pair else None, longest=longest, overlong=None if longest is None else overlong,
        labels=dict(labels.most_common(SHOWN)), kinds=len(labels), sampled=any(tally.sampled for tally in tallies), warnings=(),
        running=breaks + (end != "\n") if source.running else None)
    return replace(report, warnings=tuple(_warnings(report, labels)))


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Many short records or few long ones at a time."""
    number = 16
    while batch := list(islice(records, number)):
        yield batch
        characters = sum(map(len, [text for record in batch for text in record]))
        number = min(4096, max(1, BATCH * len(batch) // (characters + 1)), 4 * number)


def _repeats(hashes: array[int]) -> int:
    """How many equal an earlier one; sorted where they lie."""
    if not hashes:
        return 0
    values = np.frombuffer(hashes, dtype=np.int64)
    values.sort()
    return int(np.count_nonzero(values[1:] == values[:-1]))


def _warnings(report: Report, labels: Counter[str]) -> Iterator[str]:
    if report.half:
        yield f"{_share(report.half, report.count)} of the pairs are empty on one side ({report.half:,})"
    for field in report.fields:
        if report.half is None and field.empty:
            yield f"{_share(field.empty, field.count)} of the records have an empty {field.name} ({field.empty:,})"
        if field.strange:
            yield (f"{field.name} holds {'about ' if report.sampled else ''}{_number(field.strange, 'replacement character')} "
                   "(U+FFFD): it was once read in a wrong encoding")
    if report.running is None and 100 * report.duplicates > report.compared:
        yield f"{_share(report.duplicates, report.compared)} of the records repeat an earlier one ({report.duplicates:,})"
    if report.same and 100 * report.same > report.count:
        yield f"{_share(report.same, report.count)} of the pairs are the same on both sides ({report.same:,})"
    if report.overlong:
        share = _share(report.overlong, report.count)
        yield f"{share} of the records are longer than {_number(report.longest or 0, 'word')} ({report.overlong:,})"
    if report.compared < report.count:
        yield f"repeated records were counted among the first {report.compared:,} only, to bound the memory"
    if labels:
        yield from _about_labels(report, labels)


def _about_labels(report: Report, labels: Counter[str]) -> Iterator[str]:
    if len(labels) == 1:
        yield f"labels: all are {next(iter(labels))!r}, so there is nothing to learn"
    if (len(labels) > 100 and 2 * len(labels) > report.count) or len(labels) >= KINDS:
        yield f"labels: {_number(len(labels), 'different one')}: is this the column of labels?"
        return
    rare = [(count, label) for label, count in labels.items() if count < RARE]
    if len(rare) == 1:
        yield f"labels: {rare[0][1]!r} has only {_number(rare[0][0], 'example')}"
    elif rare:
        yield f"labels: {len(rare):,} have fewer than {RARE} examples, {min(rare)[1]!r} only {min(rare)[0]}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _share(part: int, of: int) -> str:
    return _percent(part / of if of else 0.0)


def _percent(share: float) -> str:
    """Never 0 % of something, nor 100 % of less than all."""
    percent = 100 * share
    if percent in (0, 100) or 1 <= percent <= 99:
        return f"{percent:.0f} %"
    if percent > 99:
        return f"{min(percent, 99.9):.1f} %"
    return f"{percent:.1f} %" if percent >= 0.1 else "less than 0.1 %"


def _bytes(size: int) -> str:
    for unit, bound in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= bound:
            return f"{size / bound:.1f} {unit}"
    return _number(size, "byte")
