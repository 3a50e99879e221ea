"""What is changed, where a reader may not look: all of it at once, for each reader, or one source at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepleft.auditing.inquiry import Inquiry


@dataclass(frozen=True)
class Variant:
    """Which positions are changed, and to what."""

    changed: Tensor  # (T,)
    kind: str        # random, or the name of a kind of its own
    seed: int


def variants(allowed: Tensor, seeds: int, kinds: Sequence[str] = ()) -> list[Variant]:
    """For each reader, everything that it may not see is changed at once: that is complete. Readers with the same sight
    share a variant; where time allows, single sources are changed too."""
    hidden = list(dict.fromkeys(tuple(row) for row in (~allowed).tolist() if any(row)))
    out = [Variant(torch.tensor(cut), "random", seed) for seed in range(seeds) for cut in hidden]
    return out + [Variant(torch.tensor(cut), kind, 0) for kind in kinds for cut in hidden]


def singles(allowed: Tensor) -> list[Variant]:
    """One source at a time."""
    length = len(allowed)
    return [Variant(torch.arange(length) == k, "random", 3) for k in range(length) if not allowed[:, k].all()]


def changed(inquiry: Inquiry, tokens: Tensor, variant: Variant) -> Tensor:
    """(1, T, …) one row with the variant's change."""
    subject = inquiry.subject
    new = (subject.words.others(tokens, 101 + 31 * variant.seed) if variant.kind == "random"
           else dict(subject.words.kinds(tokens))[variant.kind])
    where = variant.changed.view(1, -1, *[1] * (tokens.dim() - 2))
    return torch.where(where, new.to(tokens.dtype), tokens)


def cuts(inquiry: Inquiry, allowed: Tensor) -> list[Variant]:
    """What is hidden from each reader; from a few of them only, where the model is large."""
    every = variants(allowed, 1)
    if not inquiry.large:
        return every
    return [every[n] for n in sorted({0, len(every) // 2, len(every) - 1})]
