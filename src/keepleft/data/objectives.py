"""What is asked of a model, as a table: each objective turns records into what is shown and what is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from keepleft.data.ragged import IntArray, Ragged
from keepleft.data.teacher_forcing import shift_right
from keepleft.nn.loss import IGNORE_INDEX


class Examples(NamedTuple):
    """Some records, ready to be laid out: tokens shown, the source beside them, and a target for each token
    or text.
    """

    tokens: Ragged
    targets: Ragged | IntArray
    source: Ragged | None = None


class Objective(Protocol):
    @property
    def fields(self) -> tuple[str, ...]: ...

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        """The most tokens that each record takes, as tokens shown and, where there is one, as source."""
        ...

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples: ...


@dataclass(frozen=True)
class NextToken:
    """Go on with the text: GPT, LLaMA."""

    start: int
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(*shift_right(self.start, records[0]))


@dataclass(frozen=True)
class Translation:
    """Write the target, looking back at the source: translation, summarisation, anything with two texts."""

    start: int
    fields: tuple[str, ...] = ("src", "tgt")

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths[1], lengths[0]

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(*shift_right(self.start, records[1]), records[0])


@dataclass(frozen=True)
class Classification:
    """Say which label a text has."""

    fields: tuple[str, ...] = ("text", "label")

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths[:1]

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(records[0], records[1].flat)


@dataclass(frozen=True)
class MaskedToken:
    """Say what stood in the covered places: BERT.

    Of those, 80 % show the mask, 10 % a random token, 10 % their own.
    """

    mask: int
    vocab: int
    special: frozenset[int] = frozenset()  # never covered, never shown at random
    rate: float = 0.15
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        flat, lengths = records[0]
        masked = (rng.random(len(flat)) < self.rate) & ~np.isin(flat, list(self.special))
        draws = rng.random(len(flat))
        ordinary_tokens = np.setdiff1d(np.arange(self.vocab), list(self.special))
        inputs = np.where(masked & (draws < 0.8), self.mask, flat)
        inputs = np.where(
            masked & (draws >= 0.8) & (draws < 0.9), rng.choice(ordinary_tokens, len(flat)), inputs
        )
        return Examples(Ragged(inputs, lengths), Ragged(np.where(masked, flat, IGNORE_INDEX), lengths))


@dataclass(frozen=True)
class SpanCorruption:
    """Write the spans that were taken out, each behind the sentinel that stands in its place: T5."""

    start: int
    end: int
    sentinels: tuple[int, ...]
    rate: float = 0.15
    mean: float = 3.0
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        noise = np.maximum(1, np.ceil(lengths[0] * self.rate)).astype(np.int64)
        return 2 * noise + 2, lengths[0] + 2

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        pairs = [
            self._corrupt([t for t in sequence if t != self.end], rng) for sequence in records[0].to_lists()
        ]
        return Examples(
            *shift_right(self.start, Ragged.from_lists([target for _, target in pairs])),
            Ragged.from_lists([source for source, _ in pairs]),
        )

    def _corrupt(self, sequence: list[int], rng: np.random.Generator) -> tuple[list[int], list[int]]:
        """What is left of a text, and what was taken from it."""
        n = len(sequence)
        if n < 2:
            return [*sequence, self.end], [self.end]
        noise = min(max(round(n * self.rate), 1), n - 1)
        spans = max(1, min(round(noise / self.mean), noise, n - noise, len(self.sentinels)))
        source = []
        target = []
        position = 0
        for span_index, (kept_length, span_length) in enumerate(
            zip(_random_partition(n - noise, spans, rng), _random_partition(noise, spans, rng), strict=True)
        ):
            sentinel = self.sentinels[span_index]
            source += [*sequence[position : position + kept_length], sentinel]
            target += [sentinel, *sequence[position + kept_length : position + kept_length + span_length]]
            position += kept_length + span_length
        return [*source, self.end], [*target, self.end]


@dataclass(frozen=True)
class Denoising:
    """Write the text whole again, from one whose sentences were shuffled and whose spans became single masks:
    BART.
    """

    start: int
    mask: int
    stops: frozenset[int] = frozenset()  # tokens that end a sentence
    special: frozenset[int] = frozenset()
    rate: float = 0.3
    mean: float = 3.0
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths[0], lengths[0]

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(
            *shift_right(self.start, records[0]),
            Ragged.from_lists([self._add_noise(sequence, rng) for sequence in records[0].to_lists()]),
        )

    def _add_noise(self, sequence: list[int], rng: np.random.Generator) -> list[int]:
        body, tail = (
            (sequence[:-1], sequence[-1:]) if sequence and sequence[-1] in self.special else (sequence, [])
        )
        sentences: list[list[int]] = [[]]
        for token in body:
            sentences[-1].append(token)
            if token in self.stops:
                sentences.append([])
        body = [token for n in rng.permutation(len(sentences)) for token in sentences[n]]
        out: list[int] = []
        position, budget = 0, round(len(body) * self.rate)
        while position < len(body):
            if budget > 0 and rng.random() < self.rate / self.mean:
                span_length = min(int(rng.poisson(self.mean)), budget, len(body) - position)
                if (
                    not span_length and len(out) >= position
                ):  # an empty span may not make the text longer than it was
                    span_length = 1
                out.append(self.mask)
                budget -= max(span_length, 1)
                position += span_length
                if span_length:
                    continue
            out.append(body[position])
            position += 1
        return out + tail


def _random_partition(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Cut a length into so many parts of at least 1, each way as likely."""
    cuts = (
        np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1 if parts > 1 else np.empty(0, np.int64)
    )
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(int).tolist()
