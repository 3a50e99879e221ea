"""Tiny models that write."""

from __future__ import annotations

import torch

import keepleft as kl

V = 11
START = 1
END = 2


def decoder(seed: int = 0, vocab: int = V, **said):
    design = kl.presets.small(kl.presets.llama3).but(vocab=vocab, initial=kl.NormalInit(0.4), **said)
    return kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()


def pair(seed: int = 0, vocab: int = V, **said):
    design = kl.presets.small(kl.presets.pegasus).but(
        vocab=vocab, dim=16, heads=2, dropout=0.0, initial=kl.NormalInit(0.4), **said
    )
    out = kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()
    out.notes = {"decoder_start_token_id": START}
    return out
