"""The demo translator: English to French and Hindi, trained from scratch on the toy corpus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.masks import causal, full
from keepleft.data.batches import Batches, BucketedLayout
from keepleft.data.fast_encode import encoder
from keepleft.data.objectives import Translation
from keepleft.data.prefetch import PrefetchedBatches
from keepleft.data.token_store import TokenStore
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN, special_tokens, train_tokenizer
from keepleft.demo.phrases.corpus import LANGUAGES, SentencePair, split
from keepleft.demo.phrases.patterns import SEEDS
from keepleft.evaluation.exact_match import exact_match
from keepleft.models.build import build
from keepleft.models.design import Design, StackDesign
from keepleft.models.presets import vaswani
from keepleft.models.transformer import EncoderDecoder
from keepleft.nn.feedforward import FeedForward
from keepleft.pipelines.text_generation import generate_targets
from keepleft.plots import cross_attention
from keepleft.training.loop import TrainReport, train
from keepleft.training.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LANGUAGE_TAGS = {"fr": "<2fr>", "hi": "<2hi>"}  # put before a source: the target language
FIXED_PHRASE_REPEATS = 20  # extra copies of fixed phrases in training, because no rule explains them
LANGUAGE_NAMES = {"fr": "French", "hi": "Hindi"}


@dataclass(frozen=True)
class DemoTask:
    """Training batches, held-out pairs by language, and a model of the right size."""

    tokenizer: Tokenizer
    batches: Batches
    heldout: dict[str, list[SentencePair]]
    model: EncoderDecoder


def prepare_demo(
    *,
    test_size: int = 500,
    seed: int = 0,
    dim: int = 128,
    layers: int = 2,
    width: int = 256,
    batch_tokens: int = 1536,
) -> DemoTask:
    """Prepare one model for both languages: a tag before the source names the target language."""
    splits = {language: split(language, test=test_size) for language in LANGUAGE_TAGS}
    texts = [text for train_pairs, _ in splits.values() for pair in train_pairs for text in pair]
    tokenizer = train_tokenizer(
        "word", texts, 8000, extra_special_tokens=tuple(LANGUAGE_TAGS.values()), min_frequency=1
    )
    start, end = special_tokens(tokenizer).require("start", "end")
    dtype = np.dtype(np.int64)
    to_lists = lambda rows: [np.frombuffer(row, dtype).tolist() for row in rows]
    encode_target = encoder(tokenizer, dtype, suffix=[end])
    source, target = [], []
    for language, (train_pairs, _) in splits.items():
        fixed_pairs = [(phrase[0], phrase[LANGUAGES[language]]) for phrase in SEEDS]
        train_pairs = train_pairs + FIXED_PHRASE_REPEATS * fixed_pairs
        tag_id = _token_id(tokenizer, LANGUAGE_TAGS[language])
        encode_source = encoder(tokenizer, dtype, prefix=[tag_id], suffix=[end])
        source += to_lists(encode_source([english for english, _ in train_pairs]))
        target += to_lists(encode_target([translation for _, translation in train_pairs]))
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
    model = cast(EncoderDecoder, build(design, generator=torch.Generator().manual_seed(seed)))
    heldout = {language: heldout_pairs for language, (_, heldout_pairs) in splits.items()}
    return DemoTask(tokenizer, batches, heldout, model)


def train_translator(task: DemoTask, steps: int, lr: float = 3e-3) -> Iterator[TrainReport]:
    """Train the model of the task; a generator of reports."""
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


def heldout_exact_match(task: DemoTask, language: str) -> float:
    """The share of held-out sentences that are translated exactly."""
    heldout = task.heldout[language]
    translations = translate(task, language, [english for english, _ in heldout])
    return exact_match(translations, [reference for _, reference in heldout])


def alignment(task: DemoTask, language: str, english: str) -> tuple[list[str], list[str], Tensor]:
    """Source words, target words, and (target, source) cross-attention weights, averaged over all layers."""
    source_words = english.split()
    target_words = translate(task, language, [english])[0].split()
    (unknown,) = special_tokens(task.tokenizer).require("unknown")
    word_id = lambda word: unknown if (n := task.tokenizer.token_to_id(word)) is None else n
    tag, start, end = (
        _token_id(task.tokenizer, token) for token in (LANGUAGE_TAGS[language], BOS_TOKEN, EOS_TOKEN)
    )
    weights = cross_attention.alignment_weights(
        task.model,
        [tag, *map(word_id, source_words), end],
        [start, *map(word_id, target_words)],
        layers=range(len(task.model.decoder.layers)),
        source_slice=slice(1, -1),
    )
    return source_words, target_words, weights


def alignment_text(source: list[str], target: list[str], weights: Tensor) -> str:
    """The alignment as text: a line for each target word, the darker, the larger its weight."""
    shades = " ░▒▓█"
    label_width = max(map(len, target))
    lines = [" " * (label_width + 2) + "  ".join(source)]
    for word, row in zip(target, weights.tolist(), strict=True):
        cells = [
            (shades[min(4, round(4 * weight))] * 2).center(len(name))
            for weight, name in zip(row, source, strict=True)
        ]
        lines.append(f"{word:>{label_width}}  " + "  ".join(cells))
    return "\n".join(lines)


def plot_alignment(source: list[str], target: list[str], weights: Tensor, folder: str) -> Path:
    """Draw the alignment into alignment.svg in a folder, which is made if need be."""
    path = Path(folder) / "alignment.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    return cross_attention.plot_alignment(
        path, source, target, weights, title=f"{' '.join(source)} → {' '.join(target)}"
    )


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that the demo's tokenizer was trained with."""
    return cast(int, tokenizer.token_to_id(token))
