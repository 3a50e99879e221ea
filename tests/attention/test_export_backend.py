"""The backend for torch.export and ONNX computes what the definition computes, whatever the grid."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import keepleft as kl
from keepleft import block, causal, full, prefix, window

B = 2
H = 6
D = 5
MASKS = [
    full,
    causal,
    causal & window(3),
    causal & window(2) | prefix(1),
    ~block(2),
    causal | prefix((1, 3)),
    kl.Where("own", lambda b, h, q, k: (k + b + h) % 3 != 0),
]


@st.composite
def grids(draw) -> kl.Grid:
    keys = draw(st.integers(1, 7))
    queries = draw(st.integers(1, keys))
    numbers = lambda size: torch.tensor(
        draw(st.lists(st.lists(st.integers(0, 2), min_size=size, max_size=size), min_size=B, max_size=B))
    )
    tensors = {
        name: numbers(queries if name.startswith("q") else keys)
        for name in ("q_pos", "k_pos", "q_seg", "k_seg")
        if draw(st.booleans())
    }
    return kl.Grid(queries, keys, 0 if "q_pos" in tensors else draw(st.integers(0, 3)), **tensors)


@given(st.sampled_from(MASKS), grids(), st.sampled_from([1, 2, 6]), st.booleans())
def test_it_says_what_the_definition_says(mask, grid, kv_heads, biased):
    q = torch.randn(B, H, grid.queries, D, dtype=torch.float64)
    k, v = torch.randn(2, B, kv_heads, grid.keys, D, dtype=torch.float64).unbind()
    bias = torch.randn(1, H, grid.queries, grid.keys, dtype=torch.float64) if biased else None
    outputs = [
        kl.attend(q, k, v, kl.see(mask, grid, batch=B, heads=H, backend=name), bias=bias)
        for name in ("export", "reference")
    ]
    torch.testing.assert_close(*outputs, atol=1e-12, rtol=1e-10)


def test_it_has_no_dropout():
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="no dropout"):
        kl.attend(q, q, q, kl.see(causal, kl.Grid(3, 3), backend="export"), dropout=0.1)
