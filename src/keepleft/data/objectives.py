"""What is asked of a model, as a table: each objective turns records into what is shown and what is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from keepleft.data.ragged import Ragged, Whole
from keepleft.data.teaching import forced

NOTHING = -100  # a target that is not asked for


class Lesson(NamedTuple):
    """Some records, ready to be laid out: tokens shown, the source beside them, and a target for each token or text."""

    tokens: Ragged
    targets: Ragged | Whole
    source: Ragged | None = None


class Objective(Protocol):
    @property
    def fields(self) -> tuple[str, ...]: ...

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        """The most tokens that each record takes, as tokens shown and, where there is one, as source."""
        ...

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson: ...


@dataclass(frozen=True)
class NextToken:
    """Go on with the text: GPT, LLaMA."""

    start: int
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        return lengths

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson:
        return Lesson(*forced(self.start, records[0]))


@dataclass(frozen=True)
class Translation:
    """Write the target, looking back at the source: translation, summarisation, anything with two texts."""

    start: int
    fields: tuple[str, ...] = ("src", "tgt")

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        return lengths[1], lengths[0]

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson:
        return Lesson(*forced(self.start, records[1]), records[0])


@dataclass(frozen=True)
class Classification:
    """Say which label a text has."""

    fields: tuple[str, ...] = ("text", "label")

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        return lengths[:1]

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson:
        return Lesson(records[0], records[1].flat)


@dataclass(frozen=True)
class MaskedToken:
    """Say what stood in the covered places: BERT. Of those, 80 % show the mask, 10 % a random token, 10 % their own."""

    mask: int
    vocab: int
    special: frozenset[int] = frozenset()  # never covered, never shown at random
    rate: float = 0.15
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        return lengths

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson:
        flat, lengths = records[0]
        hidden = (chance.random(len(flat)) < self.rate) & ~np.isin(flat, list(self.special))
        fate = chance.random(len(flat))
        plain = np.setdiff1d(np.arange(self.vocab), list(self.special))
        shown = np.where(hidden & (fate < 0.8), self.mask, flat)
        shown = np.where(hidden & (fate >= 0.8) & (fate < 0.9), chance.choice(plain, len(flat)), shown)
        return Lesson(Ragged(shown, lengths), Ragged(np.where(hidden, flat, NOTHING), lengths))


@dataclass(frozen=True)
class SpanCorruption:
    """Write the spans that were taken out, each behind the sentinel that stands in its place: T5."""

    start: int
    end: int
    sentinels: tuple[int, ...]
    rate: float = 0.15
    mean: float = 3.0
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        noise = np.maximum(1, np.ceil(lengths[0] * self.rate)).astype(np.int64)
        return 2 * noise + 2, lengths[0] + 2

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson:
        pairs = [self._apart([t for t in text if t != self.end], chance) for text in records[0].texts()]
        return Lesson(*forced(self.start, Ragged.of([taken for _, taken in pairs])), Ragged.of([left for left, _ in pairs]))

    def _apart(self, text: list[int], chance: np.random.Generator) -> tuple[list[int], list[int]]:
        """What is left of a text, and what was taken from it."""
        n = len(text)
        if n < 2:
            return [*text, self.end], [self.end]
        noise = min(max(round(n * self.rate), 1), n - 1)
        spans = max(1, min(round(noise / self.mean), noise, n - noise, len(self.sentinels)))
        left, taken, at = [], [], 0
        for number, (keep, take) in enumerate(zip(_cut(n - noise, spans, chance), _cut(noise, spans, chance), strict=True)):
            mark = self.sentinels[number]
            left += [*text[at:at + keep], mark]
            taken += [mark, *text[at + keep:at + keep + take]]
            at += keep + take
        return [*left, self.end], [*taken, self.end]


@dataclass(frozen=True)
class Denoising:
    """Write the text whole again, from one whose sentences were shuffled and whose spans became single masks: BART."""

    start: int
    mask: int
    stops: frozenset[int] = frozenset()    # tokens that end a sentence
    special: frozenset[int] = frozenset()
    rate: float = 0.3
    mean: float = 3.0
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[Whole, ...]) -> tuple[Whole, ...]:
        return lengths[0], lengths[0]

    def lesson(self, records: tuple[Ragged, ...], chance: np.random.Generator) -> Lesson:
        return Lesson(*forced(self.start, records[0]), Ragged.of([self._spoilt(text, chance) for text in records[0].texts()]))

    def _spoilt(self, text: list[int], chance: np.random.Generator) -> list[int]:
        body, tail = (text[:-1], text[-1:]) if text and text[-1] in self.special else (text, [])
        sentences: list[list[int]] = [[]]
        for token in body:
            sentences[-1].append(token)
            if token in self.stops:
                sentences.append([])
        body = [token for n in chance.permutation(len(sentences)) for token in sentences[n]]
        out: list[int] = []
        at, owed = 0, round(len(body) * self.rate)
        while at < len(body):
            if owed > 0 and chance.random() < self.rate / self.mean:
                span = min(int(chance.poisson(self.mean)), owed, len(body) - at)
                if not span and len(out) >= at:  # an empty span may not make the text longer than it was
                    span = 1
                out.append(self.mask)
                owed -= max(span, 1)
                at += span
                if span:
                    continue
            out.append(body[at])
            at += 1
        return out + tail


def _cut(total: int, parts: int, chance: np.random.Generator) -> list[int]:
    """Cut a length into so many parts of at least 1, each way as likely."""
    cuts = np.sort(chance.choice(total - 1, parts - 1, replace=False)) + 1 if parts > 1 else np.empty(0, np.int64)
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(int).tolist()
