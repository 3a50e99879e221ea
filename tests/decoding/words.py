"""A byte-level tokenizer and a tiny model that writes with it."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

import keepleft as kl
from keepleft.data.tokenizer import BOS_TOKEN, EOS_TOKEN, train_tokenizer


def byte_tokens() -> Tokenizer:
    texts = ["the sea is calm, and the ship sails on", "आप कैसे हैं", '12 345 {"a": 1}']
    return train_tokenizer("bpe", texts * 3, 300, running_text=True, min_frequency=2)


def writer(tokenizer: Tokenizer, seed: int = 0):
    design = kl.presets.small(kl.presets.llama3).but(
        vocab=tokenizer.get_vocab_size(), initial=kl.NormalInit(0.3)
    )
    out = kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()
    out.notes = {
        "eos_token_id": tokenizer.token_to_id(EOS_TOKEN),
        "bos_token_id": tokenizer.token_to_id(BOS_TOKEN),
    }
    return out
