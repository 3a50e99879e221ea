"""Sequence packing: the cases that one row of three sequences does not show."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from audit.planted.case import seeded
from audit.planted.packing import Packed
from audit.planted.parts import VOCAB, WIDTH, causal_mask, sinusoidal_positions


class FirstRow(Packed):
    """The segments of the first row are used for all rows."""

    def forward(self, tokens, segment_ids=None):
        segments = torch.ones_like(tokens) if segment_ids is None else segment_ids
        return super().forward(tokens, segments[:1].expand_as(segments))


class Wild(Packed):
    """Every sequence attends to segment 0."""

    def seen(self, layer, segments):
        return (
            super().seen(layer, segments)
            | (causal_mask(segments.shape[1]) & (segments == 0)[:, None])[:, None]
        )


class Four(Packed):
    """A table of four segments; the fifth counts as the fourth."""

    def seen(self, layer, segments):
        return super().seen(layer, segments.clamp(max=4))


class Near(Packed):
    """Two boundaries in a row count as one: sequences of one token merge."""

    def seen(self, layer, segments):
        border = F.pad((segments[:, 1:] != segments[:, :-1]).long(), (1, 0))
        return super().seen(layer, (border * (1 - F.pad(border[:, :-1], (1, 0)))).cumsum(1))


class Cumulative(Packed):
    """Takes cu_seqlens, for a batch of one."""

    def segments(self, tokens, ends):
        return torch.bucketize(torch.arange(tokens.shape[1]), ends[1:-1].long(), right=True).expand(
            tokens.shape
        )

    def forward(self, tokens, cu_seqlens=None):
        return super().forward(tokens, None if cu_seqlens is None else self.segments(tokens, cu_seqlens))


class FirstBorder(Cumulative):
    """Only the first boundary is used."""

    def segments(self, tokens, ends):
        return (torch.arange(tokens.shape[1]) >= ends[1]).long().expand(tokens.shape)


class Numbered(Packed):
    """attention_mask holds 1 1 1 2 2; 0 is padding."""

    def forward(self, input_ids, attention_mask=None):
        return super().forward(input_ids, attention_mask)


class NumberedAsBits(Numbered):
    """Everything that is not 0 is one sequence."""

    def seen(self, layer, segments):
        return super().seen(layer, segments.bool())


class ZeroIsPadding(Packed):
    """0 is padding, which attends to itself alone: its output is finite and means nothing."""

    def seen(self, layer, segments):
        itself = torch.eye(segments.shape[1], dtype=torch.bool)
        return super().seen(layer, segments) & (segments != 0)[:, None, None, :] | itself


class ZeroIsNothing(nn.Module):
    """0 is padding, which attends to nothing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, segment_ids=None):
        segments = torch.ones_like(tokens) if segment_ids is None else segment_ids
        x = self.embed(tokens)
        seen = (
            (segments[:, :, None] == segments[:, None])
            & causal_mask(tokens.shape[1])
            & (segments != 0)[:, None]
        )
        scores = (self.mix(x) @ x.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return self.head(x + scores.softmax(-1) @ x)


class Placed(Packed):
    """Takes positions as well, which do not restart where they are not given."""

    def forward(self, input_ids, segment_ids=None, position_ids=None):
        segments = torch.ones_like(input_ids) if segment_ids is None else segment_ids
        places = (
            torch.arange(input_ids.shape[1]).expand_as(input_ids) if position_ids is None else position_ids
        )
        x = self.embed(input_ids)
        x = x + sinusoidal_positions(places, WIDTH).to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = x + layer(x, self.seen(number, segments))
        return self.head(x)


def report(model, example=None):
    return kl.audit(seeded(model)()[0], example, budget="quick", checks=["packing", "nan"])


def numbered():
    return {
        "input_ids": torch.randint(VOCAB, (1, 9)),
        "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2, 3, 3, 3]]),
    }


@pytest.mark.parametrize("model", [FirstRow, Wild, Four, Near, FirstBorder])
def test_texts_that_see_each_other_are_told(model):
    assert {finding.kind for finding in report(model).findings} == {"packing"}


@pytest.mark.parametrize("model", [Packed, Cumulative, ZeroIsPadding])
def test_texts_that_are_kept_apart_are_clean(model):
    found = report(model)
    assert found.ok, found.text()
    assert "packing" in found.checked


def test_a_mask_of_numbers_names_texts():
    assert {finding.kind for finding in report(NumberedAsBits, numbered()).findings} == {"packing"}
    assert "packing" in report(Numbered, numbered()).checked
    assert not report(Numbered, numbered()).findings


def test_a_text_that_sees_nothing_is_nan():
    assert {finding.kind for finding in report(ZeroIsNothing).findings} == {"nan"}


def test_positions_left_to_the_caller_are_a_note():
    found = report(Placed)
    assert found.ok, found.text()
    assert any("give position_ids" in note for note in found.notes)
