"""A model directory, opened for use: the model, its tokenizer, and that of the source where it has its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

from keepleft.data.tokenizer import load_tokenizer as read_tokenizer
from keepleft.devices import pick_device
from keepleft.weights.model_directory import load

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    model: Any
    tokenizer: Any
    source_tokenizer: Any = None


def load_for_inference(model_path: str, *, dtype: str = "float32", device: str | None = None) -> LoadedModel:
    """Ready to run, on a GPU where there is one and nothing else is said; int8 packs the weights for a CPU."""
    device_name = str(pick_device(device))
    if dtype == "int8" and device_name != "cpu":
        raise ValueError(f"int8 is for CPUs, not for {device_name}: give --device cpu, or --dtype bfloat16")
    model, tokenizer = load(model_path, dtype=DTYPES.get(dtype), device=device_name)
    if tokenizer is None:
        raise ValueError(f"{model_path} has no tokenizer.json: copy the one that it was trained with into it")
    if dtype == "int8":
        from keepleft.inference.prepack import prepack

        model = prepack(model.eval(), "int8")
    source_tokenizer_path = Path(model_path) / "source_tokenizer.json"
    return LoadedModel(
        model.eval(),
        tokenizer,
        read_tokenizer(source_tokenizer_path) if source_tokenizer_path.exists() else None,
    )
