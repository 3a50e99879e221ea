"""Attention through all layers: what a token knows in the end of each token at the beginning.

Attention rollout (Abnar and Zuidema 2020): the heads of a layer are averaged, the residual stream adds the token itself, rows
are brought to a sum of 1 again, and layers are multiplied through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.attention.masks import causal, full
from keepleft.serving.explorer.kept import TALL, Layer, span


class Rollout(NamedTuple):
    """Up to a layer."""

    name: str
    layer: int
    weights: Tensor  # (T, T), rows sum to 1
    claim: Tensor    # (T, T) whom each may know of, by the masks of all these layers; everyone knows of oneself

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weights, self.claim))


def rolled(name: str, layers: Sequence[Layer], last: int, known: Rollout | None = None) -> Rollout:
    """Up to layer `last`, going on from what is known where that is of use."""
    if known is None or known.name != name or known.layer > last:
        size, device, exact = layers[0].rows, layers[0].q.device, layers[0].q.dtype == torch.float64
        eye = torch.eye(size, dtype=torch.float64 if exact else torch.float32, device=device)
        known = Rollout(name, -1, eye, eye > 0)
    for n in range(known.layer + 1, last + 1):
        known = Rollout(name, n, _weights(layers[n], known.weights), _claim(layers[n], known.claim))
    return known


def _weights(layer: Layer, before: Tensor) -> Tensor:
    """(A + 1) / the sums of its rows · before; strip by strip, and of what is zero above the diagonal nothing is multiplied."""
    out, triangle = torch.zeros_like(before), not bool(before.triu(1).any())
    for strip in layer.strips(range(layer.heads)):
        weights = strip.weights.mean(0)
        known = max(strip.right, strip.end) if triangle else len(before)  # columns beyond are zero in all these rows
        mixed = weights @ before[strip.left:strip.right, :known] + before[strip.begin:strip.end, :known]
        out[strip.begin:strip.end, :known] = mixed / (weights.sum(-1, keepdim=True) + 1)
    return out


def _claim(layer: Layer, before: Tensor) -> Tensor:
    """What the mask lets a token read, and what that token knew."""
    mask, size = layer.claim.within(len(before)), len(before)
    if mask == full or bool(before.all()):
        return torch.ones_like(before)
    if mask == causal and not bool(before.triu(1).any()):
        return torch.ones_like(before).tril()
    out, known = before.clone(), before.float()
    for begin in range(0, size, TALL):
        here = slice(begin, min(begin + TALL, size))
        seen = layer.claimed(range(layer.heads), torch.arange(here.start, here.stop))
        left, right = span(seen.any(0))
        out[here] |= (seen[:, left:right].float() @ known[left:right]) > 0
    return out
