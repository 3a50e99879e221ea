"""Attention through all layers: what a token knows in the end of each token at the beginning.

Attention rollout (Abnar and Zuidema 2020): the heads of a layer are averaged, the residual stream adds the
token itself, rows are brought to a sum of 1 again, and layers are multiplied through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.attention.masks import causal, full
from keepleft.serving.explorer.attention_store import STRIP_HEIGHT, StoredAttention, visible_columns


class Rollout(NamedTuple):
    """Up to a layer."""

    name: str
    layer: int
    weights: Tensor  # (T, T), rows sum to 1
    claim: Tensor  # (T, T) whom each may know of, by the masks of all these layers; everyone knows of oneself

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weights, self.claim))


def attention_rollout(
    name: str, layers: Sequence[StoredAttention], last: int, rollout: Rollout | None = None
) -> Rollout:
    """Up to layer `last`, going on from what is known where that is of use."""
    if rollout is None or rollout.name != name or rollout.layer > last:
        size = layers[0].rows
        device = layers[0].q.device
        is_float64 = layers[0].q.dtype == torch.float64
        eye = torch.eye(size, dtype=torch.float64 if is_float64 else torch.float32, device=device)
        rollout = Rollout(name, -1, eye, eye > 0)
    for n in range(rollout.layer + 1, last + 1):
        rollout = Rollout(
            name, n, _multiply_weights(layers[n], rollout.weights), _multiply_claim(layers[n], rollout.claim)
        )
    return rollout


def _multiply_weights(layer: StoredAttention, previous: Tensor) -> Tensor:
    """(A + 1) / the sums of its rows · before; strip by strip, and of what is zero above the diagonal nothing
    is multiplied.
    """
    out, is_lower_triangular = torch.zeros_like(previous), not bool(previous.triu(1).any())
    for strip in layer.strips(range(layer.heads)):
        weights = strip.weights.mean(0)
        # columns beyond are zero in all these rows
        num_columns = max(strip.right, strip.end) if is_lower_triangular else len(previous)
        mixed = (
            weights @ previous[strip.left : strip.right, :num_columns]
            + previous[strip.begin : strip.end, :num_columns]
        )
        out[strip.begin : strip.end, :num_columns] = mixed / (weights.sum(-1, keepdim=True) + 1)
    return out


def _multiply_claim(layer: StoredAttention, previous: Tensor) -> Tensor:
    """What the mask lets a token read, and what that token knew."""
    mask, size = layer.claim.simplify(len(previous)), len(previous)
    if mask == full or bool(previous.all()):
        return torch.ones_like(previous)
    if mask == causal and not bool(previous.triu(1).any()):
        return torch.ones_like(previous).tril()
    out, previous_float = previous.clone(), previous.float()
    for begin in range(0, size, STRIP_HEIGHT):
        row_slice = slice(begin, min(begin + STRIP_HEIGHT, size))
        visible = layer.claimed_table(range(layer.heads), torch.arange(row_slice.start, row_slice.stop))
        left, right = visible_columns(visible.any(0))
        out[row_slice] |= (visible[:, left:right].float() @ previous_float[left:right]) > 0
    return out
