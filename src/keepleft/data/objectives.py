"""Training objectives: each turns records into model inputs and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from keepleft.data.ragged import IntArray, Ragged
from keepleft.data.teacher_forcing import shift_right
from keepleft.nn.loss import IGNORE_INDEX


class Examples(NamedTuple):
    """Records ready to be laid out as a batch."""

    tokens: Ragged  # inputs
    targets: Ragged | IntArray  # one for each input token, or a label for each sequence
    source: Ragged | None = None  # of the encoder


class Objective(Protocol):
    @property
    def fields(self) -> tuple[str, ...]: ...

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        """The most tokens that each record takes, as input and, where there is one, as source."""
        ...

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples: ...


@dataclass(frozen=True)
class NextToken:
    """Next-token prediction: GPT, LLaMA."""

    start: int
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(*shift_right(self.start, records[0]))


@dataclass(frozen=True)
class Translation:
    """Sequence to sequence: translation, summarisation, anything with a source and a target."""

    start: int
    fields: tuple[str, ...] = ("src", "tgt")

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths[1], lengths[0]

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(*shift_right(self.start, records[1]), records[0])


@dataclass(frozen=True)
class Classification:
    """Predict the label of a text."""

    fields: tuple[str, ...] = ("text", "label")

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths[:1]

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(records[0], records[1].flat)


@dataclass(frozen=True)
class MaskedToken:
    """Masked language modelling: BERT.

    Of the positions to predict, 80 % show the mask token, 10 % a random token, 10 % their own.
    """

    mask: int
    vocab: int
    special: frozenset[int] = frozenset()  # never masked, never drawn as a random token
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
    """Span corruption: predict the removed spans, each after the sentinel that replaced it: T5."""

    start: int
    end: int
    sentinels: tuple[int, ...]
    rate: float = 0.15
    mean: float = 3.0  # length of a span
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
        """Source, with sentinels in place of spans, and target, the spans."""
        n = len(sequence)
        if n < 2:
            return [*sequence, self.end], [self.end]
        noise = min(max(round(n * self.rate), 1), n - 1)
        spans = max(1, min(round(noise / self.mean), noise, n - noise, len(self.sentinels)))
        kept_lengths = _random_partition(n - noise, spans, rng)
        span_lengths = _random_partition(noise, spans, rng)
        source = []
        target = []
        position = 0
        for sentinel, kept_length, span_length in zip(
            self.sentinels, kept_lengths, span_lengths, strict=False
        ):
            span_start = position + kept_length
            source += [*sequence[position:span_start], sentinel]
            position = span_start + span_length
            target += [sentinel, *sequence[span_start:position]]
        return [*source, self.end], [*target, self.end]


@dataclass(frozen=True)
class Denoising:
    """Denoising: restore a text whose sentences were shuffled and whose spans became single masks: BART."""

    start: int
    mask: int
    stops: frozenset[int] = frozenset()  # tokens that end a sentence
    special: frozenset[int] = frozenset()
    rate: float = 0.3
    mean: float = 3.0  # length of a span
    fields: tuple[str, ...] = ("text",)

    def sizes(self, lengths: tuple[IntArray, ...]) -> tuple[IntArray, ...]:
        return lengths[0], lengths[0]

    def examples(self, records: tuple[Ragged, ...], rng: np.random.Generator) -> Examples:
        return Examples(
            *shift_right(self.start, records[0]),
            Ragged.from_lists([self._add_noise(sequence, rng) for sequence in records[0].to_lists()]),
        )

    def _add_noise(self, sequence: list[int], rng: np.random.Generator) -> list[int]:
        body, tail = sequence, []
        if sequence and sequence[-1] in self.special:
            body, tail = sequence[:-1], sequence[-1:]
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
                if not span_length and len(out) >= position:
                    span_length = 1  # an inserted mask may not make the text longer than it was
                out.append(self.mask)
                budget -= max(span_length, 1)
                position += span_length
                if span_length:
                    continue
            out.append(body[position])
            position += 1
        return out + tail


def _random_partition(total: int, parts: int, rng: np.random.Generator) -> list[int]:
    """Split a length into `parts` lengths of at least 1, uniformly at random."""
    cuts = (
        np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1 if parts > 1 else np.empty(0, np.int64)
    )
    return np.diff(np.concatenate([[0], cuts, [total]])).astype(int).tolist()
