"""What is changed, where a reader may not look: all of it at once, for each reader, or one source at a
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepleft.auditing.session import AuditSession


@dataclass(frozen=True)
class Perturbation:
    """Which positions are changed, and to what."""

    mask: Tensor  # (T,)
    kind: str  # random, or the name of a kind of its own
    seed: int


def perturbations(allowed: Tensor, seeds: int, change_names: Sequence[str] = ()) -> list[Perturbation]:
    """For each reader, everything that it may not see is changed at once: that is complete.

    Readers with the same sight share a variant; where time allows, single sources are changed too.
    """
    hidden_masks = list(dict.fromkeys(tuple(row) for row in (~allowed).tolist() if any(row)))
    out = [Perturbation(torch.tensor(mask), "random", seed) for seed in range(seeds) for mask in hidden_masks]
    return out + [Perturbation(torch.tensor(mask), kind, 0) for kind in change_names for mask in hidden_masks]


def single_source_perturbations(allowed: Tensor) -> list[Perturbation]:
    """One source at a time."""
    length = len(allowed)
    return [
        Perturbation(torch.arange(length) == k, "random", 3) for k in range(length) if not allowed[:, k].all()
    ]


def perturb(session: AuditSession, tokens: Tensor, perturbation: Perturbation) -> Tensor:
    """(1, T, …) one row with the variant's change."""
    adapter = session.adapter
    new = (
        adapter.sampler.resample(tokens, 101 + 31 * perturbation.seed)
        if perturbation.kind == "random"
        else dict(adapter.sampler.special_changes(tokens))[perturbation.kind]
    )
    mask = perturbation.mask.view(1, -1, *[1] * (tokens.dim() - 2))
    return torch.where(mask, new.to(tokens.dtype), tokens)


def sampled_perturbations(session: AuditSession, allowed: Tensor) -> list[Perturbation]:
    """What is hidden from each reader; from a few of them only, where the model is large."""
    candidates = perturbations(allowed, 1)
    if not session.is_large:
        return candidates
    return [candidates[n] for n in sorted({0, len(candidates) // 2, len(candidates) - 1})]
