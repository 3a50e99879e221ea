"""Which form each mask takes on PyTorch's fused kernels: the cheapest that says the same."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft import causal, full, prefix, window
from keepleft.attention.backends.sdpa import Runs, Table, Whole


def form(mask: kl.Mask, grid: kl.Grid, batch: int = 1):
    return kl.see(mask, grid, batch=batch, backend="sdpa").form


def test_what_the_kernel_knows_by_itself_needs_no_table():
    assert form(full, kl.Grid(2, 7)) is Whole.EVERYTHING
    assert form(causal, kl.Grid(7, 7)) is Whole.TRIANGLE
    assert form(causal & full, kl.Grid(7, 7)) is Whole.TRIANGLE
    assert form(causal & window(9), kl.Grid(7, 7)) is Whole.TRIANGLE  # the window is wider than the text
    assert form(causal, kl.Grid(1, 7, start=6)) is Whole.EVERYTHING   # the newest token sees all
    assert form(causal & window(9), kl.Grid(1, 7, start=6)) is Whole.EVERYTHING


def test_what_only_looks_like_it_gets_a_table():
    for grid, seen in ((kl.Grid(1, 7, start=5), 6), (kl.Grid(1, 7), 1), (kl.Grid(2, 7, start=5), 13), (kl.Grid(7, 9), 28)):
        made = form(causal, grid)
        assert isinstance(made, Table)
        assert made.seen.sum() == seen
    assert form(causal & window(3), kl.Grid(7, 7)).seen.sum() == 18
    assert form(causal & window(3), kl.Grid(1, 7, start=6)).seen.tolist() == [[[[False] * 4 + [True] * 3]]]
    assert form(causal | prefix(2), kl.Grid(7, 7)).seen.sum() == 29


def test_a_table_of_padded_keys_is_not_spelt_out_for_every_query():
    words = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    table = form(full, kl.Grid(1000, 9, k_seg=words), batch=2).seen
    assert table.shape == (2, 1, 1000, 9)
    assert table.untyped_storage().nbytes() < 1000


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_padded_rows_are_attended_text_by_text(side):
    real = torch.arange(300)[None] < torch.tensor([300, 171, 171, 7])[:, None]
    texts = (real if side == "right" else real.flip(1)).long()
    places = kl.positions_of(texts)
    made = form(causal, kl.Grid(300, 300, 0, places, places, texts, texts), batch=4)
    assert isinstance(made, Runs)
    assert [(len(run.rows), run.end - run.begin, inner) for run, inner in made.runs] == [
        (1, 300, Whole.TRIANGLE), (2, 171, Whole.TRIANGLE), (1, 7, Whole.TRIANGLE)]


def test_a_kernel_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="'fast'"):
        kl.see(causal, kl.Grid(3, 3), backend="fast")
