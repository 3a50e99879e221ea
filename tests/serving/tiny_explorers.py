"""Tiny models to explore, and decoders for the arrays in their answers."""

from __future__ import annotations

import json
from base64 import b64decode
from functools import cache

import numpy as np
import torch
from tokenizers import Tokenizer

import keepleft as kl
from keepleft.data.tokenizer import train_tokenizer
from keepleft.serving.explorer.explorer import Explorer

FAMILIES = {"decoder": kl.presets.llama3, "encoder": kl.presets.bert, "encoder-decoder": kl.presets.t5}
TEXT, SOURCE = "the sea is calm", "and the ship sails on"


@cache
def tokenizer() -> Tokenizer:
    corpus = ["the sea is calm, and the ship sails on", "आप कैसे हैं", "</script><b>&"]
    return train_tokenizer("bpe", corpus * 3, 290, running_text=True, min_frequency=2)


def make_model(family: str, seed: int = 0, **options):
    design = kl.presets.small(FAMILIES[family]).but(
        vocab=tokenizer().get_vocab_size(),
        dim=24,
        heads=6,
        dropout=0.0,
        **({"initial": kl.NormalInit(0.3)} | options),
    )
    model = kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()
    model.notes = {"decoder_start_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return model


def make_explorer(family: str, **options) -> Explorer:
    return Explorer(make_model(family), tokenizer(), **options)


def example_texts(family: str) -> dict[str, str]:
    return {"text": TEXT, "source": SOURCE} if family == "encoder-decoder" else {"text": TEXT}


def ask(explorer: Explorer, question: str, **params):
    """The answer as it arrives: through JSON that any browser reads."""
    return json.loads(json.dumps(explorer.ask(question, json.loads(json.dumps(params))), allow_nan=False))


def u8(text: str, rows: int, columns: int) -> np.ndarray:
    return np.frombuffer(b64decode(text), np.uint8).reshape(rows, columns)


def f32(text: str) -> np.ndarray:
    return np.frombuffer(b64decode(text), "<f4")


def bits(text: str, rows: int, columns: int) -> np.ndarray:
    packed = np.frombuffer(b64decode(text), np.uint8).reshape(rows, -(-columns // 8))
    return np.unpackbits(packed, axis=1)[:, :columns].astype(bool)


def quantize(weights: torch.Tensor, max_weight: float = 1.0) -> np.ndarray:
    """The bytes that `wire.sqrt_u8` sends, as floats."""
    return (weights.double() / max_weight).sqrt().mul(255).round().numpy()
