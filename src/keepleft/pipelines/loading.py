"""Load a model directory for inference: the model, its tokenizer, and the source's where it has its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from keepleft.data.tokenizer import SOURCE_TOKENIZER_FILE, load_tokenizer
from keepleft.devices import pick_device
from keepleft.disk.regular_file import exists_in
from keepleft.disk.tokenizer_json import TOKENIZER_FILE
from keepleft.weights.model_directory import AnyModel, is_stored_as_int8, load, resolve_model
from keepleft.weights.sentencepiece_files import read_sentencepiece_files

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class LoadedModel(NamedTuple):
    model: AnyModel
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None = None


def split_ensemble(model_path: str) -> list[str]:
    """The models that MODEL1,MODEL2 names; a path that exists is one model, whatever is in its name."""
    return [model_path] if Path(model_path).exists() else model_path.split(",")


def load_for_inference(
    model_path: str, *, dtype: str | None = None, device: str | None = None
) -> LoadedModel:
    """Load a model directory in eval mode, by default on a GPU where there is one.

    `model_path` may also be a name on the hub, as NAME@REVISION to pin a branch, tag or commit. int8 prepacks
    the weights for a CPU; without a dtype, that is done for weights that are stored as int8, and others are
    float32. Raises ValueError if there is no tokenizer, or for int8 on another device.
    """
    device_name = str(pick_device(device))
    if dtype == "int8" and device_name != "cpu":
        raise ValueError(f"int8 is for CPUs, not for {device_name}: give --device cpu, or --dtype bfloat16")
    path = resolve_model(model_path)
    if dtype is None and device_name == "cpu" and is_stored_as_int8(path):
        dtype = "int8"
    model, tokenizer = load(path, dtype=DTYPES.get(dtype or "float32"), device=device_name)
    if tokenizer is None:
        raise ValueError(
            f"{model_path} has no tokenizer.json, and no SentencePiece files that are read for its kind: "
            "copy the tokenizer.json that it was trained with into it"
        )
    if dtype == "int8":
        from keepleft.inference.prepack import prepack

        model = prepack(model.eval(), "int8")
    source_tokenizer = None
    if exists_in(path, SOURCE_TOKENIZER_FILE):
        source_tokenizer = load_tokenizer(path, SOURCE_TOKENIZER_FILE)
    elif not exists_in(path, TOKENIZER_FILE) and path.is_dir():
        pair = read_sentencepiece_files(path, model.notes.get("model_type"))
        if pair is not None:
            tokenizer, source_tokenizer = pair
    return LoadedModel(model.eval(), tokenizer, source_tokenizer)
