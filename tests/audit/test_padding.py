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


class WithCodes(Decoder):
    """Adds codes (B, K, T) of three codebooks to the tokens."""

    def forward(self, input_ids, codes, attention_mask=None):
        hidden = super().forward(input_ids, attention_mask)
        return hidden + self.head(self.embed(codes).sum(1))


def test_codes_of_several_codebooks_are_padded_beside_the_tokens() -> None:
    codes = torch.randint(1, VOCAB, (2, 3, 11), generator=torch.Generator().manual_seed(1))
    report = kl.audit(WithCodes(), {"input_ids": some(), "codes": codes}, checks=["padding"], budget="quick")
    assert report.ok, report.text()
    assert "padding" in report.checked


class WithAudio(Decoder):
    """Text beside audio, whose mask it takes."""

    def forward(self, input_ids, input_values=None, padding_mask=None):
        hidden = super().forward(input_ids)
        if input_values is None:
            return hidden
        return hidden + (input_values * padding_mask).mean()


def test_the_mask_of_audio_is_not_that_of_the_text_beside_it() -> None:
    report = kl.audit(WithAudio(), some(), checks=["padding", "nan"], budget="quick")
    assert not report.findings, report.text()
    assert "padding" not in report.checked


class Shrinking(Decoder):
    """Gives as many outputs at each position as the batch has real tokens in its longest row."""

    def forward(self, input_ids, attention_mask=None):
        count = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
        return super().forward(input_ids, attention_mask)[..., :count]


def test_outputs_of_other_shapes_are_not_compared() -> None:
    report = kl.audit(Shrinking(), some(), checks=["padding"], budget="quick")
    assert not report.findings, report.text()
    assert any("follows the inputs" in line for line in report.blocked), report.text()


class Codec(Decoder):
    """Reads three codes at each position, and takes labels for them."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = super().forward(input_ids[..., 0], attention_mask)
        logits = logits + self.head(self.embed(input_ids[..., 1:]).sum(2))
        if labels is None:
            return logits
        wanted = labels[:, 1:, 0]
        return nn.functional.cross_entropy(logits[:, :-1].mT, wanted), logits


def test_a_loss_over_several_tokens_at_a_position_does_not_stop_the_audit() -> None:
    tokens = torch.randint(1, VOCAB, (2, 11, 3), generator=torch.Generator().manual_seed(2))
    report = kl.audit(Codec(), {"input_ids": tokens}, checks=["padding", "labels"], budget="quick")
    assert "padding" in report.checked, report.text()
    assert not report.findings, report.text()


class Translator(nn.Module):
    """A decoder that counts positions from the first column and sums up its source."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder = Decoder()

    def forward(self, input_ids, decoder_input_ids, decoder_attention_mask=None, labels=None):
        ones = torch.ones_like(decoder_input_ids)
        may = ones if decoder_attention_mask is None else decoder_attention_mask
        x = self.decoder.embed(decoder_input_ids) + self.decoder.place(ones.cumsum(1) - 1)
        x = x + self.decoder.embed(input_ids).mean(1, keepdim=True)
        summed = (x * may[..., None]).cumsum(1) / may.cumsum(1).clamp(min=1)[..., None]
        logits = self.decoder.head(x + summed)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.mT, labels), logits


def test_the_loss_of_a_target_is_not_held_to_padding_on_the_left_that_counts_as_positions() -> None:
    example = {"input_ids": some(), "decoder_input_ids": some()[:, :9]}
    report = kl.audit(Translator(), example, checks=["padding"], budget="quick")
    assert not report.findings, report.text()
    assert "padding" in report.checked
