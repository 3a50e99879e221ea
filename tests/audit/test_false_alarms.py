"""Honest models that round, in every way that looks like a leak; and leaks that are as small."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import keepleft as kl
from keepleft.auditing import isolation, rounding
from keepleft.auditing.code_paths import BUDGETS, CodePath
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.session import AuditSession

VOCAB, WIDTH = 31, 16


class Mixing(nn.Module):
    """Something that mixes positions, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.kernel = nn.Parameter(torch.randn(WIDTH, 4096) * 0.2)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def mix(self, x: Tensor) -> Tensor:
        return x.cumsum(1)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)))


# -- FFTs: every output rounds with every input ------------------------------------------------


class LongConvolution(Mixing):
    """A convolution by FFT, padded so that nothing wraps around."""

    def mix(self, x):
        length = x.shape[1]
        spectra = [torch.fft.rfft(y, n=2 * length) for y in (x.mT, self.kernel[:, :length].to(x.dtype))]
        return torch.fft.irfft(spectra[0] * spectra[1], n=2 * length)[..., :length].mT


class ScaledConvolution(LongConvolution):
    """Large values round more."""

    def mix(self, x):
        return super().mix(1000 * x) / 50


class PowerOfTwoConvolution(Mixing):
    """Padded to a power of two."""

    def mix(self, x):
        length = x.shape[1]
        size = 1 << (2 * length - 1).bit_length()
        spectra = [torch.fft.rfft(y, n=size) for y in (x.mT, self.kernel[:, :length].to(x.dtype))]
        return torch.fft.irfft(spectra[0] * spectra[1], n=size)[..., :length].mT


class Circular(Mixing):
    """Not padded: the end wraps around to the beginning."""

    def mix(self, x):
        length = x.shape[1]
        spectra = [torch.fft.rfft(y, n=length) for y in (x.mT, self.kernel[:, :length].to(x.dtype))]
        return torch.fft.irfft(spectra[0] * spectra[1], n=length).mT


class HalfPadded(Mixing):
    """Padded by half of what it needs."""

    def mix(self, x):
        length = x.shape[1]
        size = length + length // 2
        spectra = [torch.fft.rfft(y, n=size) for y in (x.mT, self.kernel[:, :length].to(x.dtype))]
        return torch.fft.irfft(spectra[0] * spectra[1], n=size)[..., :length].mT


# -- scans: the order of sums depends on the length --------------------------------------------


class TreeScan(Mixing):
    """A parallel scan in log T steps."""

    def mix(self, x):
        step = 1
        while step < x.shape[1]:
            x = x + 0.7**step * F.pad(x[:, :-step], (0, 0, step, 0))
            step *= 2
        return x


class ChunkedScan(Mixing):
    """Sums within chunks of five, and the sums of the chunks before."""

    def mix(self, x):
        out, carried = [], torch.zeros_like(x[:, :1])
        for chunk in x.split(5, 1):
            out.append(chunk.cumsum(1) + carried)
            carried = out[-1][:, -1:]
        return torch.cat(out, 1)


class BlellochScan(Mixing):
    """Sums of pairs first, then what lies between them."""

    def mix(self, x):
        if x.shape[1] == 1:
            return x
        pairs = F.pad(x, (0, 0, 0, x.shape[1] % 2)).unflatten(1, (-1, 2))
        sums = self.mix(pairs.sum(2))
        before = F.pad(sums[:, :-1], (0, 0, 1, 0))
        return torch.stack([before + pairs[:, :, 0], sums], 2).flatten(1, 2)[:, : x.shape[1]]


class ChunkSum(Mixing):
    """The whole chunk is added to each of its positions."""

    def mix(self, x):
        out, carried = [], torch.zeros_like(x[:, :1])
        for chunk in x.split(5, 1):
            carried = carried + chunk.sum(1, keepdim=True)
            out.append(chunk + carried)
        return torch.cat(out, 1)


class BackwardScan(Mixing):
    def mix(self, x):
        return x + 1e-3 * x.flip(1).cumsum(1).flip(1)


# -- masks of one precision under queries of another -------------------------------------------


class AdditiveMask(Mixing):
    """A float32 mask, whatever the queries are."""

    fill = float("-inf")
    diagonal = 1

    def mix(self, x):
        length = x.shape[1]
        mask = torch.full((length, length), self.fill).triu(self.diagonal)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]


class MaskByName(AdditiveMask):
    """Of the smallest float32, over scores of ten."""

    fill = torch.finfo(torch.float32).min


class MaskOfRows(AdditiveMask):
    """The mask has an axis of rows and one of heads."""

    def mix(self, x):
        length = x.shape[1]
        mask = torch.full((length, length), self.fill).triu(1).expand(len(x), 1, length, length)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, mask)[:, 0]


class MaskOneOff(AdditiveMask):
    diagonal = 2


HONEST = [
    LongConvolution,
    ScaledConvolution,
    PowerOfTwoConvolution,
    TreeScan,
    ChunkedScan,
    BlellochScan,
    AdditiveMask,
    MaskByName,
    MaskOfRows,
]
LEAKS = [Circular, HalfPadded, ChunkSum, BackwardScan, MaskOneOff]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", HONEST)
def test_an_honest_model_that_rounds_is_clean(model, dtype):
    if "Convolution" in model.__name__ and dtype == torch.bfloat16:
        pytest.skip("there is no FFT in bfloat16")
    report = kl.audit(model().to(dtype), budget="quick", checks=["future", "batch"])
    assert report.ok, report.text()


@pytest.mark.parametrize("model", [LongConvolution, ChunkedScan, BlellochScan])
def test_an_honest_model_that_rounds_is_clean_in_float64(model):
    report = kl.audit(model().double(), budget="quick", checks=["future", "batch"])
    assert report.ok, report.text()


@pytest.mark.parametrize("model", LEAKS)
def test_a_leak_of_the_same_shape_is_found(model):
    report = kl.audit(model(), budget="quick", checks=["future"])
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()


def test_masks_get_the_dtype_of_the_queries_however_they_are_given():
    q = torch.randn(1, 1, 5, 4, dtype=torch.float64)
    mask = torch.full((5, 5), float("-inf")).triu(1)
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=mask.double())
    with isolation.MasksOfOneDtype():
        for out in (
            F.scaled_dot_product_attention(q, q, q, mask),
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask),
            F.scaled_dot_product_attention(query=q, key=q, value=q, attn_mask=mask),
        ):
            assert torch.equal(out, expected)
        is_visible = torch.ones(5, 5, dtype=torch.bool).tril()
        assert torch.allclose(F.scaled_dot_product_attention(q, q, q, is_visible), expected)


# -- what is taken for rounding ----------------------------------------------------------------


def session_of(model):
    adapter = ModelAdapter(model.eval(), None, claim=kl.causal)
    adapter.run(adapter.make_inputs(2), CodePath())
    return AuditSession(adapter, kl.causal, 1, BUDGETS["quick"], ("future",))


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        (CodePath(), 3e-4),
        (CodePath(dtype=torch.bfloat16), 0.12),
        (CodePath(autocast=True), 0.12),
        (CodePath(dtype=torch.float64), 1e-9),
    ],
)
def test_how_far_apart_outputs_of_other_shapes_may_lie(path, limit):
    assert rounding.tolerance(session_of(Mixing()), path) == limit


def test_quantised_models_round_more():
    session = session_of(Mixing())
    session.quantized = True
    assert rounding.tolerance(session, CodePath()) == 0.2


@pytest.mark.parametrize("size", [1e-3, 1e-2, float("inf")])
def test_a_large_change_is_no_rounding(size):
    session = session_of(Mixing())
    inputs = session.adapter.make_inputs(1)
    assert rounding.is_real_change(session, CodePath(), inputs, inputs, 0, 0, size)


@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-5])
def test_a_small_change_that_float64_does_not_show_is_rounding(size):
    session = session_of(Mixing())
    inputs = session.adapter.make_inputs(1)
    assert not rounding.is_real_change(session, CodePath(), inputs, inputs, 0, 0, size)


def test_a_small_change_that_float64_shows_as_well_is_real():
    session = session_of(BackwardScan())
    inputs = session.adapter.make_inputs(1)
    changed = inputs.blend(session.adapter.resample(inputs, 3), inputs.mask_at(0, 9))
    assert rounding.is_real_change(session, CodePath(), inputs, changed, 0, 2, 1e-5)
