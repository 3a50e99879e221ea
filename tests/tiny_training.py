"""Tiny datasets, models and recipes to train on: what the tests of training share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import keepleft as kl
from keepleft.data.batches import Batches, BucketedLayout
from keepleft.data.objectives import NextToken, Translation
from keepleft.data.packing import PackedLayout
from keepleft.data.token_store import TokenStore
from keepleft.models.transformer import Model
from keepleft.training.loop import TrainReport, train
from keepleft.training.recipe import Recipe

VOCAB = 37
END = 2


def store(num_records: int = 60, seed: int = 0) -> TokenStore:
    """Sequences of 1 to 9 tokens and an end token; the targets are the same tokens reversed."""
    rng = np.random.default_rng(seed)
    sequences = [[*rng.integers(3, VOCAB, rng.integers(1, 10)).tolist(), END] for _ in range(num_records)]
    reversed_sequences = [[*sequence[-2::-1], END] for sequence in sequences]
    return TokenStore.from_lists(text=sequences, src=sequences, tgt=reversed_sequences)


def batches(
    design: kl.Design,
    layout: BucketedLayout | PackedLayout = BucketedLayout(),  # noqa: B008
    **options: Any,
) -> Batches:
    """Micro-batches of 48 tokens and uneven numbers of targets, three to a step."""
    objective = Translation(1) if design.is_encoder_decoder else NextToken(1)
    return Batches(store(), objective, layout, **{"budget": 48, "accumulate": 3, **options})


def design(kind: str = "decoder", **changes: Any) -> kl.Design:
    """A decoder, or an encoder-decoder ("both"), with one layer in each stack and, by default, dropout."""
    preset = kl.presets.small({"decoder": kl.presets.llama, "both": kl.presets.marian}[kind])
    stacks = {
        name: kl.StackDesign(1, stack.mask)
        for name in ("encoder", "decoder")
        if (stack := getattr(preset, name))
    }
    feedforward = kl.FeedForward(14, "silu", gated=True)
    sizes = dict(vocab=VOCAB, dim=20, heads=2, feedforward=feedforward, dropout=0.1, **stacks)
    return preset.but(**{**sizes, **changes})


def model(design: kl.Design, seed: int = 1, dtype: torch.dtype = torch.float64) -> Model:
    return kl.build(design, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def recipe(**changes: Any) -> Recipe:
    defaults = {"steps": 12, "lr": 1e-2, "warmup": 3, "log_every": 100, "label_smoothing": 0.1}
    return Recipe(**{**defaults, **changes})


def run(
    folder: str | Path | None, kind: str = "both", *, recipe: Recipe, **options: Any
) -> list[TrainReport]:
    """Train a tiny model, resuming from the checkpoints in the folder if it has any."""
    chosen_design = design(kind)
    return list(train(model(chosen_design), batches(chosen_design), recipe, folder=folder, **options))


def checkpoint_tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of an unsharded checkpoint."""
    return load_file(folder / f"step-{step:08d}" / "tensors.safetensors")


def equal_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether both have the same names and, bit for bit, the same tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def one_thread() -> Iterator[None]:
    """Tiny models train fastest on one thread."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
