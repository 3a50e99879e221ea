"""What each mask is lowered to for PyTorch's fused kernels: the cheapest that says the same."""

from __future__ import annotations

import pytest
import torch

import keepleft as kl
from keepleft import causal, full, prefix, window
from keepleft.attention.backends.sdpa import BuiltinMask, ChunkedWindow, DenseMask, RaggedRows


def lower(mask: kl.Mask, grid: kl.Grid, batch: int = 1):
    return kl.see(mask, grid, batch=batch, backend="sdpa").lowered_mask


def test_what_the_kernel_knows_by_itself_needs_no_table():
    assert lower(full, kl.Grid(2, 7)) is BuiltinMask.FULL
    assert lower(causal, kl.Grid(7, 7)) is BuiltinMask.CAUSAL
    assert lower(causal & full, kl.Grid(7, 7)) is BuiltinMask.CAUSAL
    assert (
        lower(causal & window(9), kl.Grid(7, 7)) is BuiltinMask.CAUSAL
    )  # the window is wider than the sequence
    assert lower(causal, kl.Grid(1, 7, start=6)) is BuiltinMask.FULL  # the newest token sees all
    assert lower(causal & window(9), kl.Grid(1, 7, start=6)) is BuiltinMask.FULL


def test_what_only_looks_like_it_gets_a_table():
    for grid, seen in (
        (kl.Grid(1, 7, start=5), 6),
        (kl.Grid(1, 7), 1),
        (kl.Grid(2, 7, start=5), 13),
        (kl.Grid(7, 9), 28),
    ):
        lowered = lower(causal, grid)
        assert isinstance(lowered, DenseMask)
        assert lowered.attn_mask.sum() == seen
    assert lower(causal & window(3), kl.Grid(7, 7)).attn_mask.sum() == 18
    assert lower(causal & window(3), kl.Grid(1, 7, start=6)).attn_mask.tolist() == [
        [[[False] * 4 + [True] * 3]]
    ]
    assert lower(causal | prefix(2), kl.Grid(7, 7)).attn_mask.sum() == 29


def test_a_table_of_padded_keys_is_not_spelt_out_for_every_query():
    segments = torch.tensor([[1] * 9, [1] * 5 + [0] * 4])
    table = lower(full, kl.Grid(1000, 9, k_seg=segments), batch=2).attn_mask
    assert table.shape == (2, 1, 1000, 9)
    assert table.untyped_storage().nbytes() < 1000


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_padded_rows_are_attended_text_by_text(side):
    real = torch.arange(300)[None] < torch.tensor([300, 171, 171, 7])[:, None]
    segments = (real if side == "right" else real.flip(1)).long()
    positions = kl.positions_from_segments(segments)
    lowered = lower(causal, kl.Grid(300, 300, 0, positions, positions, segments, segments), batch=4)
    assert isinstance(lowered, RaggedRows)
    order = slice(None, None, 1 if side == "right" else -1)
    assert [row[order] for row in lowered.rows] == [
        ((300, BuiltinMask.CAUSAL),),
        *[((171, BuiltinMask.CAUSAL), (129, None))] * 2,
        ((7, BuiltinMask.CAUSAL), (293, None)),
    ]


def test_a_long_window_is_attended_band_by_band():
    lowered = lower(causal & window(5), kl.Grid(600, 600))
    assert isinstance(lowered, ChunkedWindow)
    assert lowered.first_chunk.numel() + lowered.later_chunks.numel() < 600 * 600
    assert isinstance(lower(causal & window(5) | prefix(1), kl.Grid(600, 600)), DenseMask)


def test_a_kernel_that_is_none_is_refused_by_name():
    with pytest.raises(ValueError, match="'fast'"):
        kl.see(causal, kl.Grid(3, 3), backend="fast")


def test_what_does_not_fit_is_refused_in_words():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    sight = kl.see(full, kl.Grid(5, 7))
    for wrong in (
        (q[0], k[0], k[0]),
        (q, k[:1], k[:1]),
        (q, k[..., :6], k),
        (q, k, k[:, :, :6]),
        (q[:, :, :4], k, k),
    ):
        with pytest.raises(ValueError, match="keys"):
            kl.attend(*wrong, sight)
    for not_a_sight in (causal, torch.ones(5, 7, dtype=torch.bool), None):
        with pytest.raises(TypeError, match=r"see\(causal, Grid\(5, 7\)\)"):
            kl.attend(q, k, k, not_a_sight)
    for mask, grid in (("causal", kl.Grid(3, 3)), (torch.ones(3, 3), kl.Grid(3, 3)), (causal, 3)):
        with pytest.raises(TypeError, match="a mask and a grid"):
            kl.see(mask, grid)
    with pytest.raises(ValueError, match="2 rows, the batch has 1"):
        kl.see(prefix((1, 2)), kl.Grid(3, 3))
    with pytest.raises(ValueError, match=r"batch=2, heads=4"):
        kl.attend(q, k, k, kl.see(kl.Where("own", lambda b, h, i, j: (h + j) % 2 == 0), kl.Grid(5, 7)))
    with pytest.raises(ValueError, match=r"torch.bool.*\.long\(\)"):
        kl.Grid(3, 3, k_seg=torch.ones(1, 3, dtype=torch.bool))


def test_misspelt_and_misplaced_names_get_a_hint():
    with pytest.raises(AttributeError, match=r"'gtp2': did you mean .*gpt2"):
        kl.presets.gtp2  # noqa: B018
    with pytest.raises(TypeError, match=r"presets\.gpt2"):
        kl.build("gpt2")
    with pytest.raises(TypeError, match="no mask"):
        kl.draw("causal", 3)
    with pytest.raises(TypeError, match="a name, then a function"):
        kl.Where(lambda b, h, q, k: k == q, "even")
