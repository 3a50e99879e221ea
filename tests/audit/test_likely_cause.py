"""The pattern of who reads whom names the likely cause, in models that make that mistake."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from keepleft.auditing.likely_cause import likely_cause

T = 13


def mask(rule) -> torch.Tensor:
    rows = torch.arange(64)
    return rule(rows[:, None], rows[None, :])


MISTAKES = {
    "inverted": (lambda q, k: k >= q, 1, "the mask is inverted"),
    "missing": (lambda q, k: k >= 0, 1, "there is no mask"),
    "one off": (lambda q, k: k <= q + 1, 1, "one position ahead: the diagonal of a mask is one off"),
    "one off in two layers": (lambda q, k: k <= q + 1, 2, "2 positions ahead, one for each layer"),
    "three ahead": (lambda q, k: k <= q + 3, 1, "reads 3 ahead"),
    "blocks": (lambda q, k: k < (q // 4 + 1) * 4, 1, "their block of 4"),
}


class Attention(nn.Module):
    """Scaled dot-product attention under any mask."""

    def __init__(self, rule, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(30, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(layers))
        self.visible = mask(rule)

    def forward(self, tokens):
        x = self.embed(tokens)
        length = tokens.shape[1]
        for layer in self.layers:
            q, k, v = layer(x).chunk(3, -1)
            x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible[:length, :length])
        return x


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_likely_cause_is_said(mistake):
    rule, layers, words = MISTAKES[mistake]
    report = kl.audit(Attention(rule, layers), vocab=30, budget="quick", checks=["future"])
    assert words in report.findings[0].message, report.text()


def test_where_nothing_is_read_or_no_pattern_is_known_nothing_is_said():
    claimed = [[k <= q for k in range(T)] for q in range(T)]
    honest = [[float(k <= q) for k in range(T)] for q in range(T)]
    assert likely_cause(claimed, honest, 1) == ""
    odd = [[float(k <= q or (q, k) in ((2, 9), (5, 7))) for k in range(T)] for q in range(T)]
    assert likely_cause(claimed, odd, 1) == ""
    assert likely_cause((), (), None) == ""
