"""The demonstration: a translator from English to French and Hindi, trained from nothing on the embedded phrases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepleft.attention.masks import causal, full
from keepleft.data.ahead import Ahead
from keepleft.data.batches import Batches, Bucketed
from keepleft.data.encoding import encoder
from keepleft.data.objectives import Translation
from keepleft.data.phrases.corpus import LANGUAGES, Pair, split
from keepleft.data.phrases.patterns import SEEDS
from keepleft.data.store import Store
from keepleft.data.tokenizer import END, START, learn, marks
from keepleft.models.build import build
from keepleft.models.design import Design, Stack
from keepleft.models.presets import vaswani
from keepleft.nn.feedforward import FeedForward
from keepleft.runs import alignment as alignments
from keepleft.runs.writing import write
from keepleft.training.loop import Report, train
from keepleft.training.recipe import Recipe

TAGS = {"fr": "<2fr>", "hi": "<2hi>"}  # put before a source: which language to write
OFTEN = 20  # times that fixed phrases, which no rule explains, are shown more
NAMES = {"fr": "French", "hi": "Hindi"}


@dataclass(frozen=True)
class Lesson:
    """The phrases as integers, what is held out, and a model of the right size."""

    tokenizer: Any
    batches: Batches
    held: dict[str, list[Pair]]
    model: Any


def prepared(*, test: int = 500, seed: int = 0, dim: int = 128, layers: int = 2, width: int = 256,
             budget: int = 1536) -> Lesson:
    """Both languages together: the tag before the source says which one is asked for."""
    parts = {language: split(language, test=test) for language in TAGS}
    texts = [text for training, _ in parts.values() for pair in training for text in pair]
    tokenizer = learn("word", texts, 8000, more=tuple(TAGS.values()), least=1)
    start, end = marks(tokenizer).need("start", "end")
    kind = np.dtype(np.int64)
    plain = encoder(tokenizer, kind, after=[end])
    source, target = [], []
    for language, (training, _) in parts.items():
        fixed = [(said[0], said[LANGUAGES[language]]) for said in SEEDS]
        training = training + OFTEN * fixed
        tagged = encoder(tokenizer, kind, before=[tokenizer.token_to_id(TAGS[language]) or 0], after=[end])
        source += [np.frombuffer(row, kind).tolist() for row in tagged([english for english, _ in training])]
        target += [np.frombuffer(row, kind).tolist() for row in plain([other for _, other in training])]
    store = Store.of(src=source, tgt=target)
    batches = Batches(store, Translation(start), Bucketed(), budget, seed=seed)
    design: Design = vaswani.but(vocab=tokenizer.get_vocab_size(), dim=dim, heads=4, feedforward=FeedForward(width, "relu"),
                                 norm_first=True, encoder=Stack(layers, (full,)), decoder=Stack(layers, (causal,)), dropout=0.0)
    model = build(design, generator=torch.Generator().manual_seed(seed))
    return Lesson(tokenizer, batches, {language: held for language, (_, held) in parts.items()}, model)


def taught(lesson: Lesson, steps: int, peak: float = 3e-3) -> Iterator[Report]:
    recipe = Recipe(steps=steps, peak=peak, warmup=max(1, steps // 20), schedule="linear", floor=0.02, report=10,
                    betas=(0.9, 0.98), average=0.0)
    return train(lesson.model, Ahead(lesson.batches), recipe)


def translated(lesson: Lesson, language: str, texts: list[str]) -> list[str]:
    return write(lesson.model, lesson.tokenizer, texts, tag=TAGS[language])


def exact(lesson: Lesson, language: str) -> float:
    """The share of held-out sentences that come out to the letter."""
    held = lesson.held[language]
    found = translated(lesson, language, [english for english, _ in held])
    return sum(written == reference for written, (_, reference) in zip(found, held, strict=True)) / len(held)


def alignment(lesson: Lesson, language: str, english: str) -> tuple[list[str], list[str], torch.Tensor]:
    """What each written word looked at: source words, written words, and (written, source) weights of all layers."""
    words = english.split()
    written = translated(lesson, language, [english])[0].split()
    number = lesson.tokenizer.token_to_id
    end, (unknown,) = number(END), marks(lesson.tokenizer).need("unknown")
    known = lambda word: unknown if (n := number(word)) is None else n
    source = [number(TAGS[language]), *map(known, words), end]
    weights = alignments.aligned(lesson.model, source, [number(START), *map(known, written)],
                                 layers=range(len(lesson.model.decoder.layers)), among=slice(1, -1))
    return words, written, weights


def drawn(source: list[str], written: list[str], weights: torch.Tensor) -> str:
    """The alignment as text: a line for each written word, darker where it looked more."""
    shades, left = " ░▒▓█", max(map(len, written))
    lines = [" " * (left + 2) + "  ".join(source)]
    for word, row in zip(written, weights.tolist(), strict=True):
        cells = [(shades[min(4, round(4 * share))] * 2).center(len(name)) for share, name in zip(row, source, strict=True)]
        lines.append(f"{word:>{left}}  " + "  ".join(cells))
    return "\n".join(lines)


def picture(source: list[str], written: list[str], weights: torch.Tensor, folder: str) -> Path:
    """The alignment as an .svg file."""
    path = Path(folder) / "alignment.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    return alignments.alignment(path, source, written, weights, title=f"{' '.join(source)} → {' '.join(written)}")
