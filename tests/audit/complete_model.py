"""A small model that every kind of leak applies to, with one fault or none."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH = 23, 16
FAULTS = ("future", "padding", "packing", "cache", "batch", "nan", "labels")


class Mixer(nn.Module):
    """Attention over a past and itself."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.fault = fault

    def forward(self, x: Tensor, seen: Tensor, past: Any) -> tuple[Tensor, Any]:
        q, k, v = self.qkv(x).chunk(3, -1)
        if past is not None:
            past_k, past_v = past
            k, v = torch.cat([past_k, k], 1), torch.cat([past_v * (self.fault != "cache"), v], 1)
        scores = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~seen, float("-inf"))
        if self.fault == "batch":
            v = v + 0.1 * v.mean(0, keepdim=True)
        return scores.softmax(-1) @ v, (k, v)


class CompleteModel(nn.Module):
    """Takes a padding mask, segment ids, a KV cache and labels. seconds: what each call takes at least."""

    def __init__(self, fault: str = "", seconds: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mixer = Mixer(fault)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.fault = fault
        self.seconds = seconds

    def seen(self, keys: int, length: int, attention_mask: Any, segment_ids: Any) -> Tensor:
        """(B or 1, T, keys)"""
        start = keys - length
        itself = torch.eye(keys, dtype=torch.bool)[None, start:]
        seen = torch.ones(1, length, keys, dtype=torch.bool)
        if self.fault != "future":
            seen = seen.tril(start)
        if attention_mask is not None and self.fault != "padding":
            seen = seen & attention_mask.bool()[:, None]
        if segment_ids is not None and self.fault != "packing":
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
        return seen if self.fault == "nan" else seen | itself

    def forward(
        self, input_ids, attention_mask=None, segment_ids=None, past_key_values=None, labels=None
    ) -> dict[str, Any]:
        time.sleep(self.seconds)
        length = input_ids.shape[1]
        keys = length + (0 if past_key_values is None else past_key_values[0].shape[1])
        x = self.embed(input_ids)
        mixed, past = self.mixer(x, self.seen(keys, length, attention_mask, segment_ids), past_key_values)
        logits = self.head(x + mixed)
        out = {"logits": logits, "past_key_values": past}
        if labels is not None:
            shift = int(self.fault != "labels")
            if segment_ids is not None:
                is_first = F.pad(segment_ids[:, 1:] != segment_ids[:, :-1], (1, 0))
                labels = labels.masked_fill(is_first, -100)
            scores = logits[:, : length - shift].flatten(0, 1)
            out["loss"] = F.cross_entropy(scores, labels[:, shift:].flatten())
        return out
