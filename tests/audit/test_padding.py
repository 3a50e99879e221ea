"""Padding: every code path that takes a mask must apply it, in every row and at every position."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing.checks import padding
from keepleft.auditing.code_paths import BUDGETS, CodePath
from keepleft.auditing.model_adapter import ModelAdapter
from keepleft.auditing.session import AuditSession

VOCAB, WIDTH = 37, 12


class Decoder(nn.Module):
    """One layer of causal attention that hides padding and counts positions from the first real token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(300, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.use_sdpa = False

    def seen(self, mask):
        """The mask as this model applies it."""
        return mask

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        keys = torch.ones_like(mask) if (kept := self.seen(mask)) is None else kept
        length = input_ids.shape[1]
        may = torch.ones(length, length, dtype=torch.bool).tril() & keys.bool()[:, None] | torch.eye(
            length, dtype=torch.bool
        )
        x = self.embed(input_ids) + self.place((mask.long().cumsum(1) - 1).clamp(min=0))
        q, k, v = self.qkv(x).chunk(3, -1)
        weights = (q @ k.transpose(1, 2) / WIDTH**0.5).masked_fill(~may, torch.finfo(x.dtype).min).softmax(-1)
        return self.head(x + weights @ v)


class BooleanForgotten(Decoder):
    def seen(self, mask):
        return None if mask.dtype == torch.bool else mask


class HalfForgotten(Decoder):
    def seen(self, mask):
        return None if self.head.weight.dtype == torch.bfloat16 else mask


class FlagForgotten(Decoder):
    def seen(self, mask):
        return None if self.use_sdpa else mask


class FourthRow(Decoder):
    def seen(self, mask):
        return torch.cat([mask[:3], torch.ones_like(mask[3:])])


class EndsOnly(Decoder):
    """Keeps everything from the first real token to the last, including what is hidden between them."""

    def seen(self, mask):
        real = mask.long()
        return (real.cumsum(1) > 0) & (real.flip(1).cumsum(1).flip(1) > 0)


def some():
    return torch.randint(1, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model", [BooleanForgotten, FourthRow, EndsOnly])
def test_padding_is_found_in_any_row_form_and_place(model) -> None:
    report = kl.audit(model(), some(), checks=["padding"], budget="quick")
    assert {finding.kind for finding in report.findings} == {"padding"}


def test_a_mask_that_is_heeded_is_clean() -> None:
    report = kl.audit(Decoder(), some(), checks=["padding", "batch", "nan"], budget="quick")
    assert report.ok, report.text()
    assert {"padding", "batch", "nan"} <= set(report.checked)


@pytest.mark.parametrize(
    "way",
    [CodePath(dtype=torch.bfloat16), CodePath(flag=("use_sdpa", True)), CodePath(mask="boolean")],
    ids=str,
)
def test_each_path_that_is_offered_is_looked_at(way) -> None:
    planted = {torch.bfloat16: HalfForgotten, None: FlagForgotten if way.flag else BooleanForgotten}[
        way.dtype
    ]
    for model, found in ((planted, True), (Decoder, False)):
        subject = ModelAdapter(model().eval(), some(), claim=kl.causal)
        inquiry = AuditSession(subject, kl.causal, 1, BUDGETS["quick"], ("padding",), float64_support=False)
        with subject.on_path(CodePath()):
            subject.run(subject.make_inputs(2), CodePath())
        padding.padding(inquiry, [], [way])
        assert inquiry.has_finding("padding") == found


class Luong(nn.Module):
    """Reads its source as a packed sequence, so that padding must be on the right."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(2 * WIDTH, VOCAB)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, src, tgt, src_padding_mask=None):
        pads = torch.zeros_like(src, dtype=torch.bool) if src_padding_mask is None else src_padding_mask
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(src), (~pads).sum(1).clamp(min=1), batch_first=True, enforce_sorted=False
        )
        memory, last = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(memory, batch_first=True, total_length=src.shape[1])
        x, _ = self.decoder(self.embed(tgt), last)
        scores = (x @ memory.transpose(1, 2)).masked_fill(self.hidden(pads)[:, None], -1e4)
        return self.head(torch.cat([x, scores.softmax(-1) @ memory], -1))

    def hidden(self, pads):
        return pads


class LuongOpen(Luong):
    """Its attention reads the zeros at padded positions."""

    def hidden(self, pads):
        return torch.zeros_like(pads)


@pytest.mark.parametrize(("model", "kinds"), [(Luong, set()), (LuongOpen, {"padding"})])
def test_a_source_is_padded_on_the_right(model, kinds) -> None:
    report = kl.audit(model(), {"src": some(), "tgt": some()}, checks=["padding", "batch"], budget="quick")
    assert {finding.kind for finding in report.findings} == kinds, report.text()
