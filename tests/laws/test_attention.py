"""Every backend says what the reference says, forward and backward; a query that sees nothing gets zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.attention.backends import sdpa
from strategies import MASKS, segments

B = 2
H = 6
KV = 3
D = 5


@st.composite
def cases(draw):
    """A mask, a grid of any shape the models make, and whether there is a bias."""
    # often those that a kernel has built in
    mask = draw(st.sampled_from([kl.causal, kl.full, kl.causal & kl.window(3)]) | MASKS)
    keys = draw(st.sampled_from([1, 7, 11]))
    kind = draw(st.sampled_from(["square", "tail", "packed", "placed", "cross", "slots"]))
    if kind == "square":
        grid = kl.Grid(keys, keys)
    elif kind == "tail":
        queries = draw(st.integers(1, keys))
        grid = kl.Grid(queries, keys, start=draw(st.sampled_from([keys - queries, 0, 3])))
    elif kind == "packed":
        seg = draw(segments(B, keys))
        pos = kl.positions_from_segments(seg)
        grid = kl.Grid(keys, keys, 0, pos, pos, seg, seg)
    elif kind == "placed":
        pos = torch.tensor(draw(st.lists(st.permutations(range(keys)), min_size=B, max_size=B)))
        grid = kl.Grid(keys, keys, 0, pos, pos)
    elif kind == "cross":
        grid = kl.Grid(4, keys, k_seg=draw(segments(B, keys)))
    else:
        seg = draw(segments(B, keys))
        grid = kl.Grid(
            2,
            keys,
            0,
            torch.tensor([[3, 4], [5, 6]]),
            kl.positions_from_segments(seg),
            torch.tensor([[1, 1], [0, 2]]),
            seg,
        )
    return mask, grid, draw(st.sampled_from([None, (1, H), (B, 1), (1, 1), (B, H)]))


def inputs(grid: kl.Grid, bias, dtype: torch.dtype):
    g = torch.Generator().manual_seed(grid.queries * 31 + grid.keys)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)
    q = rand(B, H, grid.queries, D)
    k = rand(B, KV, grid.keys, D)
    v = rand(B, KV, grid.keys, D)
    return q, k, v, None if bias is None else rand(*bias, grid.queries, grid.keys)


def attend_with(backend: str, mask, grid, q, k, v, bias, **more):
    sight = kl.see(mask, grid, batch=B, heads=H, backend=backend)
    return kl.attend(q, k, v, sight, bias=bias, **more)


@given(cases())
@settings(max_examples=150)
def test_forward_and_backward_of_the_fused_kernels_are_those_of_the_definition(case):
    mask, grid, bias = case
    outs, grads = [], []
    for backend in ("reference", "sdpa"):
        tensors = [t if t is None else t.requires_grad_() for t in inputs(grid, bias, torch.float64)]
        out = attend_with(backend, mask, grid, *tensors)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))
        outs.append(out.detach())
        grads.append([t.grad for t in tensors if t is not None])
    torch.testing.assert_close(outs[1], outs[0], atol=1e-12, rtol=1e-10)
    for actual, expected in zip(grads[1], grads[0], strict=True):
        assert expected.isfinite().all()
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-9)


@given(cases())
@settings(max_examples=30)
def test_flex_says_what_the_definition_says(case):
    mask, grid, bias = case
    tensors = inputs(grid, bias, torch.float32)
    torch.testing.assert_close(
        attend_with("flex", mask, grid, *tensors),
        attend_with("reference", mask, grid, *tensors),
        atol=2e-5,
        rtol=1e-4,
    )


@given(
    cases(),
    st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(["reference", "sdpa"]),
)
@settings(max_examples=60)
def test_a_query_that_sees_nothing_gets_zeros_and_passes_no_gradient(case, dtype, backend):
    mask, grid, bias = case
    empty_queries = ~grid.table(mask, batch=B, heads=H, device=torch.device("cpu")).any(-1).expand(
        B, H, grid.queries
    )
    q, k, v, bias = inputs(grid, bias, dtype)
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out = attend_with(backend, mask, grid, q, k, v, bias)
    assert out.isfinite().all()
    assert (out[empty_queries] == 0).all()
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))
    assert (q.grad[empty_queries] == 0).all()


@pytest.mark.slow
@given(MASKS, st.sampled_from([1, 7, 11]))
@settings(max_examples=40)
def test_a_mask_that_reads_rows_and_heads_is_honoured(mask, keys):
    own = kl.Where("own", lambda b, h, q, k: (k + b + h) % 3 != 0)
    mask = mask & own | kl.prefix((1, 3))
    tensors = inputs(kl.Grid(keys, keys), None, torch.float32)
    want = attend_with("reference", mask, kl.Grid(keys, keys), *tensors)
    for backend in ("sdpa", "flex"):
        torch.testing.assert_close(
            attend_with(backend, mask, kl.Grid(keys, keys), *tensors), want, atol=2e-5, rtol=1e-4
        )
    table = kl.Grid(keys, keys).table(mask, batch=B, heads=H, device=torch.device("cpu"))
    for b in range(B):
        for h in range(H):
            assert torch.equal(table[b, h], kl.mask_table(mask, keys, row=b, head=h))


@given(
    st.data(),
    st.sampled_from([kl.causal, kl.full, kl.causal & kl.window(37), kl.prefix(5) | kl.causal]),
    st.sampled_from([None, (1, H), (B, H)]),
)
@settings(max_examples=20)
def test_long_padded_and_packed_rows_need_no_table_and_say_the_same(data, mask, biased):
    length = 293
    borders = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=5)))
    seg = torch.zeros(B, length, dtype=torch.long)
    for n, (a, b) in enumerate(zip([0, *borders], [*borders, length], strict=True)):
        seg[0, a:b] = n * data.draw(st.integers(0, 1))
        seg[1, a:b] = n + 1
    pos = kl.positions_from_segments(seg)
    grid = kl.Grid(length, length, 0, pos, pos, seg, seg)
    check_sdpa_is_the_definition(mask, grid, biased)
    lowered = kl.see(mask, grid, batch=B, heads=H, backend="sdpa").lowered_mask
    if mask != kl.prefix(5) | kl.causal:
        assert isinstance(lowered, sdpa.RaggedRows), "a table was built where none is needed"


def check_sdpa_is_the_definition(mask, grid, biased) -> None:
    """PyTorch's kernel against the definition, forward and backward."""
    outs = []
    for backend in ("reference", "sdpa"):
        q, k, v, bias = (t if t is None else t.requires_grad_() for t in inputs(grid, biased, torch.float64))
        out = attend_with(backend, mask, grid, q, k, v, bias)
        out.square().sum().backward()
        outs.append((out.detach(), q.grad, k.grad, v.grad))
    for actual, expected in zip(outs[1], outs[0], strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-9)


@pytest.mark.slow
@given(
    st.sampled_from([1, 5, 256, 300]),
    st.sampled_from([513, 601, 769, 1024]),
    st.sampled_from([None, (1, H), (B, H)]),
)
@settings(max_examples=12)
def test_long_windows_need_no_table_and_say_the_same(size, length, biased):
    mask, grid = kl.causal & kl.window(size), kl.Grid(length, length)
    check_sdpa_is_the_definition(mask, grid, biased)


def test_sequences_in_pieces_or_out_of_order_are_not_taken_for_spans():
    length = 300
    torn = torch.ones(1, length, dtype=torch.long)
    torn[:, 100:200] = 2
    pos = torch.arange(length)[None]
    backwards = torch.arange(length - 1, -1, -1)[None]
    q, k, v = (torch.randn(1, 3, length, D, dtype=torch.float64) for _ in range(3))
    for seg, positions in ((torn, pos), (torch.ones(1, length, dtype=torch.long), backwards)):
        grid = kl.Grid(length, length, 0, positions, positions, seg, seg)
        want, got = (
            kl.attend(q, k, v, kl.see(kl.causal, grid, backend=backend)) for backend in ("reference", "sdpa")
        )
        torch.testing.assert_close(got, want)


def test_dropout_leaves_the_mean_alone_and_no_weight_where_there_was_none():
    q, k = torch.randn(2, 1, 1, 7, D).unbind()
    v = torch.eye(7).expand(1, 1, 7, 7)
    for backend in ("reference", "sdpa"):
        sight = kl.see(kl.causal, kl.Grid(7, 7), backend=backend)
        want = kl.attend(q, k, v, sight)
        draws = torch.stack([kl.attend(q, k, v, sight, dropout=0.3) for _ in range(600)])
        assert (draws * (want == 0)).abs().max() == 0
        torch.testing.assert_close(draws.mean(0), want, atol=0.12, rtol=0.0)
    with pytest.raises(ValueError, match="dropout"):
        kl.attend(q, k, v, kl.see(kl.causal, kl.Grid(7, 7), backend="flex"), dropout=0.3)


@given(cases())
@settings(max_examples=60)
def test_what_gpus_are_given_instead_of_blind_rows_says_the_same(case):
    """The mask that a GPU gets, tried on the CPU: no row is empty, and the output is the definition's."""
    mask, grid, bias = case
    q, k, v, bias = inputs(grid, bias, torch.float64)
    lowered = sdpa.unmask_empty_queries(grid.table(mask, batch=B, heads=H, device=torch.device("cpu")))
    assert lowered.attn_mask.any(-1).all()
    if bias is not None:
        lowered = sdpa.add_bias(lowered, bias)
    out = sdpa.attend(q, k, v, lowered, D**-0.5, 0.0)
    torch.testing.assert_close(
        out, attend_with("reference", mask, grid, q, k, v, bias), atol=1e-12, rtol=1e-10
    )


def test_a_gradient_comes_back_to_the_kernel_in_the_layout_of_what_went_out():
    """The guard against cuDNN, which plans by shape alone; the layouts are a model's and another caller's."""
    q = torch.randn(2, 7, 3, D, dtype=torch.float64).transpose(1, 2).requires_grad_()
    for back in (
        torch.randn(2, 7, 3, D, dtype=torch.float64).transpose(1, 2),
        torch.randn(2, 3, 7, D, dtype=torch.float64),
    ):
        seen = []
        inner = q * 2
        inner.register_hook(lambda gradient, seen=seen: seen.append(gradient.stride()))
        out = sdpa._MatchGradLayout.apply(inner)
        (gradient_in,) = torch.autograd.grad(out, q, back)
        assert torch.equal(gradient_in, back * 2)
        assert seen == [inner.stride()]
