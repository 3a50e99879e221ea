"""The demonstration: a translator from English to French and Hindi, trained from nothing on the embedded
phrases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from keepleft.attention.masks import causal, full
from keepleft.data.batches import Batches, BucketedLayout
from keepleft.data.fast_encode import encoder
from keepleft.data.objectives import Translation
from keepleft.data.prefetch import PrefetchedBatches
from keepleft.data.token_store import TokenStore
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN, special_tokens, train_tokenizer
from keepleft.demo.phrases.corpus import LANGUAGES, SentencePair, split
from keepleft.demo.phrases.patterns import SEEDS
from keepleft.models.build import build
from keepleft.models.design import Design, StackDesign
from keepleft.models.presets import vaswani
from keepleft.nn.feedforward import FeedForward
from keepleft.pipelines.text_generation import generate_targets
from keepleft.plots import cross_attention
from keepleft.training.loop import TrainReport, train
from keepleft.training.recipe import Recipe

LANGUAGE_TAGS = {"fr": "<2fr>", "hi": "<2hi>"}  # put before a source: which language to write
FIXED_PHRASE_REPEATS = 20  # times that fixed phrases, which no rule explains, are shown more
LANGUAGE_NAMES = {"fr": "French", "hi": "Hindi"}


@dataclass(frozen=True)
class DemoTask:
    """The phrases as integers, what is held out, and a model of the right size."""

    tokenizer: Any
    batches: Batches
    heldout: dict[str, list[SentencePair]]
    model: Any


def prepare_demo(
    *,
    test_size: int = 500,
    seed: int = 0,
    dim: int = 128,
    layers: int = 2,
    width: int = 256,
    batch_tokens: int = 1536,
) -> DemoTask:
    """Both languages together: the tag before the source says which one is asked for."""
    splits = {language: split(language, test=test_size) for language in LANGUAGE_TAGS}
    texts = [text for train_pairs, _ in splits.values() for pair in train_pairs for text in pair]
    tokenizer = train_tokenizer(
        "word", texts, 8000, extra_special_tokens=tuple(LANGUAGE_TAGS.values()), min_frequency=1
    )
    start, end = special_tokens(tokenizer).require("start", "end")
    dtype = np.dtype(np.int64)
    encode_target = encoder(tokenizer, dtype, suffix=[end])
    source, target = [], []
    for language, (train_pairs, _) in splits.items():
        fixed_pairs = [(phrase[0], phrase[LANGUAGES[language]]) for phrase in SEEDS]
        train_pairs = train_pairs + FIXED_PHRASE_REPEATS * fixed_pairs
        encode_source = encoder(
            tokenizer, dtype, prefix=[tokenizer.token_to_id(LANGUAGE_TAGS[language]) or 0], suffix=[end]
        )
        source += [
            np.frombuffer(row, dtype).tolist()
            for row in encode_source([english for english, _ in train_pairs])
        ]
        target += [
            np.frombuffer(row, dtype).tolist()
            for row in encode_target([translation for _, translation in train_pairs])
        ]
    store = TokenStore.from_lists(src=source, tgt=target)
    batches = Batches(store, Translation(start), BucketedLayout(), batch_tokens, seed=seed)
    design: Design = vaswani.but(
        vocab=tokenizer.get_vocab_size(),
        dim=dim,
        heads=4,
        feedforward=FeedForward(width, "relu"),
        norm_first=True,
        encoder=StackDesign(layers, (full,)),
        decoder=StackDesign(layers, (causal,)),
        dropout=0.0,
    )
    model = build(design, generator=torch.Generator().manual_seed(seed))
    return DemoTask(
        tokenizer, batches, {language: heldout for language, (_, heldout) in splits.items()}, model
    )


def train_translator(task: DemoTask, steps: int, lr: float = 3e-3) -> Iterator[TrainReport]:
    recipe = Recipe(
        steps=steps,
        lr=lr,
        warmup=max(1, steps // 20),
        schedule="linear",
        min_lr_ratio=0.02,
        log_every=10,
        betas=(0.9, 0.98),
        ema_decay=0.0,
    )
    return train(task.model, PrefetchedBatches(task.batches), recipe)


def translate(task: DemoTask, language: str, texts: list[str]) -> list[str]:
    return generate_targets(task.model, task.tokenizer, texts, tag=LANGUAGE_TAGS[language])


def exact(task: DemoTask, language: str) -> float:
    """The share of held-out sentences that come out to the letter."""
    heldout = task.heldout[language]
    translations = translate(task, language, [english for english, _ in heldout])
    return sum(
        translation == reference for translation, (_, reference) in zip(translations, heldout, strict=True)
    ) / len(heldout)


def alignment(task: DemoTask, language: str, english: str) -> tuple[list[str], list[str], torch.Tensor]:
    """What each written word looked at: source words, written words, and (written, source) weights of all
    layers.
    """
    source_words = english.split()
    target_words = translate(task, language, [english])[0].split()
    token_id = task.tokenizer.token_to_id
    end, (unknown,) = token_id(EOS_TOKEN), special_tokens(task.tokenizer).require("unknown")
    word_id = lambda word: unknown if (n := token_id(word)) is None else n
    source = [token_id(LANGUAGE_TAGS[language]), *map(word_id, source_words), end]
    weights = cross_attention.alignment_weights(
        task.model,
        source,
        [token_id(BOS_TOKEN), *map(word_id, target_words)],
        layers=range(len(task.model.decoder.layers)),
        source_slice=slice(1, -1),
    )
    return source_words, target_words, weights


def draw_alignment(source: list[str], target: list[str], weights: torch.Tensor) -> str:
    """The alignment as text: a line for each written word, darker where it looked more."""
    shades, label_width = " ░▒▓█", max(map(len, target))
    lines = [" " * (label_width + 2) + "  ".join(source)]
    for word, row in zip(target, weights.tolist(), strict=True):
        cells = [
            (shades[min(4, round(4 * weight))] * 2).center(len(name))
            for weight, name in zip(row, source, strict=True)
        ]
        lines.append(f"{word:>{label_width}}  " + "  ".join(cells))
    return "\n".join(lines)


def picture(source: list[str], target: list[str], weights: torch.Tensor, folder: str) -> Path:
    """The alignment as an .svg file."""
    path = Path(folder) / "alignment.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    return cross_attention.plot_alignment(
        path, source, target, weights, title=f"{' '.join(source)} → {' '.join(target)}"
    )
