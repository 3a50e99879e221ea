"""A model directory, opened for use: the model, its tokenizer, and that of the source where it has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from keepleft.data.tokenizer import read as read_tokenizer
from keepleft.training.parallel import found_device
from keepleft.weights.files import load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Opened(NamedTuple):
    model: Any
    tokenizer: Any
    source_tokenizer: Any = None


def opened(place: str, *, dtype: str = "float32", device: str | None = None) -> Opened:
    """Ready to run, on a GPU where there is one and nothing else is said; int8 packs the weights for a CPU."""
    home = str(found_device(device))
    if dtype == "int8" and home != "cpu":
        raise ValueError(f"int8 is for CPUs, not for {home}: give --device cpu, or --dtype bfloat16")
    model, tokenizer = load(place, dtype=DTYPES.get(dtype), device=home)
    if tokenizer is None:
        raise ValueError(f"{place} has no tokenizer.json: copy the one that it was trained with into it")
    if dtype == "int8":
        from keepleft.models.pack import pack
        model = pack(model.eval(), "int8")
    own = Path(place) / "source_tokenizer.json"
    return Opened(model.eval(), tokenizer, read_tokenizer(own) if own.exists() else None)
