"""Attention rollout (Abnar and Zuidema 2020): how much of each token reaches each other through all layers.

The heads of a layer are averaged, the residual stream adds the token itself, rows are normalized to sum to 1
again, and the matrices of the layers are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from keepleft.attention.masks import causal, full
from keepleft.serving.explorer.attention_store import STRIP_HEIGHT, StoredAttention, visible_columns


class Rollout(NamedTuple):
    """The product of all layers up to one."""

    name: str
    layer: int
    weights: Tensor  # (T, T), rows sum to 1
    claim: Tensor  # (T, T) what can reach each token by the masks of these layers; each reaches itself

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.weights, self.claim))


def attention_rollout(
    name: str, layers: Sequence[StoredAttention], last: int, rollout: Rollout | None = None
) -> Rollout:
    """The rollout up to layer `last`, continued from an earlier `rollout` where that is of use."""
    if rollout is None or rollout.name != name or rollout.layer > last:
        q = layers[0].q
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        eye = torch.eye(layers[0].rows, dtype=dtype, device=q.device)
        rollout = Rollout(name, -1, eye, eye > 0)
    for n in range(rollout.layer + 1, last + 1):
        rollout = Rollout(
            name, n, _multiply_weights(layers[n], rollout.weights), _multiply_claim(layers[n], rollout.claim)
        )
    return rollout


def _multiply_weights(layer: StoredAttention, previous: Tensor) -> Tensor:
    """(A + I) · previous, rows normalized; strip by strip, and zeros above the diagonal are skipped."""
    out = torch.zeros_like(previous)
    is_lower_triangular = not bool(previous.triu(1).any())
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
    """What can reach each token: all that reaches the tokens which the mask lets it attend to."""
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
