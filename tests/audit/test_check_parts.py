"""No part of a check is redundant: for each there is a leak that it finds and no other part does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import keepleft as kl
from audit.complete_model import VOCAB, WIDTH, CompleteModel
from audit.planted.labels import AccumulationModel, CountIgnored, DividedTwice, IgnoredCounted, LabelsModel
from audit.planted.parts import sinusoidal_positions


def audited(model, *checks, **options):
    return kl.audit(model, budget="quick", checks=checks, **options)


# -- stress ------------------------------------------------------------------------------------


class Stressed(nn.Module):
    """Causal attention over normalised vectors, whose mask is a finite number."""

    lowest: float | None = None  # of the scores
    highest: float | None = None

    def __init__(self, fill: float = -1e4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fill = fill

    def vectors(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q.exp() @ k.exp().transpose(1, 2)).clamp(self.lowest, self.highest)

    def forward(self, tokens):
        x = self.vectors(self.embed(tokens))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = self.scores(3 * self.q(x), 3 * self.k(x))
        scores = torch.where(hidden, scores + self.fill, scores)
        return (x + scores.softmax(-1) @ x) @ self.embed.weight.T


class PositiveScores(Stressed):
    lowest = 0.0


class NegativeScores(Stressed):
    highest = 0.0


class LargeInputs(Stressed):
    """Scores that no matrix product makes, and inputs that keep their size."""

    def vectors(self, x):
        return x

    def scores(self, q, k):
        return (q[:, :, None] * k[:, None]).sum(-1)


STRESSED = [(PositiveScores, "large scores"), (NegativeScores, "large scores"), (LargeInputs, "large inputs")]


@pytest.mark.parametrize(("model", "stress"), STRESSED)
def test_a_finite_mask_is_found_by_the_stress_that_shows_it(model, stress):
    found, *others = audited(model(), "future").findings
    assert found.probe == "magnitude"
    assert stress in found.path
    assert not others


@pytest.mark.parametrize(("model", "stress"), STRESSED)
def test_an_infinite_mask_stands_every_stress(model, stress):
    report = audited(model(float("-inf")), "future")
    assert report.ok, report.text()


class Alarmed(CompleteModel):
    """Repairs everything as soon as something is not a number, or too large for one."""

    def __init__(self, is_alarming) -> None:
        super().__init__()
        self.is_alarming = is_alarming

    def forward(self, tokens):
        x = self.embed(tokens)
        alarm = self.is_alarming(x).flatten(1).any(1)[:, None, None]
        return self.head(torch.where(alarm, 0.5 * torch.nan_to_num(x, posinf=0.0, neginf=0.0), x))


@pytest.mark.parametrize(("is_alarming", "value"), [(torch.isnan, "nan"), (torch.isinf, "inf")])
def test_code_that_repairs_what_it_is_given_is_found(is_alarming, value):
    report = audited(Alarmed(is_alarming), "future")
    assert [finding.probe for finding in report.findings] == ["poison"], report.text()
    assert f"{value} as input" in report.findings[0].path


def test_code_that_repairs_nothing_is_clean():
    assert audited(Alarmed(lambda x: torch.zeros_like(x, dtype=torch.bool)), "future").ok


class ValueHead(CompleteModel):
    """A second output beside the logits."""

    def __init__(self, leak) -> None:
        super().__init__()
        self.leak = leak

    def forward(self, tokens):
        x = self.embed(tokens)
        return {"logits": self.head(x + x.cumsum(1)), "values": self.leak(x).sum(-1, keepdim=True)}


@pytest.mark.parametrize(
    ("leak", "verdict"),
    [
        (lambda x: x.flip(1), "leak"),
        (lambda x: x + x.mean(1, keepdim=True), "leak"),
        (lambda x: x.cumsum(1), "clean"),
    ],
)
def test_other_outputs_are_held_to_the_claim_too(leak, verdict):
    report = audited(ValueHead(leak), "future")
    assert report.verdict == verdict, report.text()
    assert all("values" in finding.path for finding in report.findings)


class Gated(CompleteModel):
    """What lies behind a gate that is closed before training."""

    def __init__(self, leak) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(WIDTH))
        self.leak = leak

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.gate * self.leak(x))


@pytest.mark.parametrize(
    ("leak", "verdict"),
    [(lambda x: x.mean(1, keepdim=True), "leak"), (lambda x: x.flip(1), "leak"), (torch.tanh, "clean")],
)
def test_a_gate_of_zero_hides_nothing(leak, verdict):
    model = Gated(leak)
    report = audited(model, "future")
    assert report.verdict == verdict, report.text()
    assert not model.gate.any()


# -- labels ------------------------------------------------------------------------------------


class FedDecoder(nn.Module):
    """A decoder that reads something in front of all labels but the last."""

    def __init__(self, shifted) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.shifted = shifted

    def forward(self, input_ids, labels):
        hidden = self.rnn(self.embed(self.shifted(labels).clamp(min=0)))[0] + self.embed(input_ids).mean(
            1, True
        )
        logits = hidden @ self.embed.weight.T
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


@pytest.mark.parametrize(
    ("shifted", "words"),
    [
        (lambda labels: torch.cat([labels[:, :1], labels[:, :-1]], 1), "labels from position 0 on"),
        (lambda labels: labels.roll(1, 1), "labels from position"),
        (
            lambda labels: torch.cat([0 * labels[:, :1], labels[:, -1:], labels[:, 1:-1]], 1),
            "scores at position 1 move",
        ),
    ],
)
def test_no_position_of_a_decoder_may_read_the_last_label_and_the_first_none(shifted, words):
    example = {name: torch.randint(VOCAB, (2, 9)) for name in ("input_ids", "labels")}
    report = audited(FedDecoder(shifted), "labels", example=example)
    assert words in report.findings[0].message, report.text()


def test_a_decoder_that_reads_a_start_token_and_the_labels_before_is_clean():
    example = {name: torch.randint(VOCAB, (2, 9)) for name in ("input_ids", "labels")}
    assert audited(FedDecoder(lambda labels: F.pad(labels[:, :-1], (1, 0))), "labels", example=example).ok


class Smoothed(LabelsModel):
    """Smoothing that is summed over ignored labels too, and divided by the number of the others."""

    ignores = False

    def loss(self, logits, labels):
        logprobs = logits[:, :-1].log_softmax(-1)
        judged = labels[:, 1:] != -100
        nll = -logprobs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0] * judged
        smooth = -logprobs.mean(-1) * (judged if self.ignores else 1)
        return (0.9 * nll.sum() + 0.1 * smooth.sum()) / judged.sum().clamp(min=1)


class SmoothedRight(Smoothed):
    ignores = True


class LastDropped(LabelsModel):
    """The last label is judged by nothing."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 1:-1].flatten())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Smoothed, "labels of -100 are counted: the loss moves"),
        (IgnoredCounted, "labels of -100 are counted: one real label weighs"),
        (LastDropped, "judged by nothing"),
        (CountIgnored, "accumulation is not the full batch"),
        (DividedTwice, "accumulation is not the full batch"),
    ],
)
def test_what_is_wrong_with_a_loss_is_said(model, words):
    torch.manual_seed(0)
    report = audited(model(), "labels")
    assert any(words in finding.message for finding in report.findings), report.text()


@pytest.mark.parametrize("model", [LabelsModel, SmoothedRight, AccumulationModel])
def test_a_right_loss_is_clean(model):
    torch.manual_seed(0)
    report = audited(model(), "labels")
    assert report.ok, report.text()


# -- the cache, packing ------------------------------------------------------------------------


class Forgetful(CompleteModel):
    """The cache forgets in some steps. forgets: (rows, keys, new tokens) → whether it does"""

    def __init__(self, forgets, max_length: int = 1000) -> None:
        super().__init__()
        self.forgets = forgets
        self.max_positions = max_length

    def forward(self, input_ids, past_key_values=None):
        rows, length = input_ids.shape
        keys = length
        if past_key_values is not None:
            keys += past_key_values[0].shape[1]
            if self.forgets(rows, keys, length):
                past_key_values = tuple(0 * part for part in past_key_values)
        if keys > self.max_positions:
            raise IndexError("there are no positions beyond")
        return super().forward(input_ids, past_key_values=past_key_values)


@pytest.mark.parametrize(
    ("forgets", "max_length", "words"),
    [
        (lambda rows, keys, length: rows == 1, 1000, "batch 1"),
        (lambda rows, keys, length: rows == 2 and keys > 5, 13, "length 13"),
        (lambda rows, keys, length: keys > 13, 1000, "batch 2, length"),
        (lambda rows, keys, length: (keys, length) == (3, 1), 1000, "in pieces of 2, 1"),
    ],
)
def test_a_cache_is_checked_in_every_kind_of_step(forgets, max_length, words):
    report = audited(Forgetful(forgets, max_length), "cache")
    assert {finding.kind for finding in report.findings} == {"cache"}, report.text()
    assert words in report.findings[0].path


@pytest.mark.parametrize("max_length", [13, 1000])
def test_a_cache_that_forgets_nothing_is_clean(max_length):
    report = audited(Forgetful(lambda *_: False, max_length), "cache")
    assert report.ok, report.text()


class Placed(CompleteModel):
    """Positions are not counted anew with each text."""

    def forward(self, input_ids, segment_ids=None):
        x = self.embed(input_ids)
        x = x + sinusoidal_positions(torch.arange(input_ids.shape[1]), WIDTH).to(x.dtype)
        length = input_ids.shape[1]
        return self.head(x + self.mixer(x, self.seen(length, length, None, segment_ids), None)[0])


class Crossing(CompleteModel):
    """The last token of a text is asked for the first of the next."""

    def forward(self, input_ids, segment_ids=None, labels=None):
        logits = super().forward(input_ids, segment_ids=segment_ids)["logits"]
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: CompleteModel("packing"), "a neighbour in the same row moves a text"),
        (Placed, "of a packed row is another than alone"),
        (Crossing, "the loss crosses the border"),
    ],
)
def test_what_is_wrong_with_packed_texts_is_said(model, words):
    report = audited(model(), "packing")
    assert [words in finding.message for finding in report.findings] == [True], report.text()


def test_texts_that_are_packed_right_are_clean():
    assert audited(CompleteModel(), "packing").ok


# -- NaN ---------------------------------------------------------------------------------------


class Rooted(CompleteModel):
    """The square root is taken before it is known to be needed, or after."""

    def __init__(self, is_safe: bool) -> None:
        super().__init__()
        self.is_safe = is_safe

    def forward(self, tokens):
        x = self.embed(tokens)
        safe = x.clamp(min=1e-3) if self.is_safe else x
        return self.head(torch.where(x > 1e-3, safe.sqrt(), torch.zeros_like(x)))


def test_nan_in_gradients_alone_is_found():
    report = audited(Rooted(False), "nan")
    assert [finding.probe for finding in report.findings] == ["gradient"], report.text()
    assert audited(Rooted(True), "nan").ok


class Averaging(CompleteModel):
    """Divides by something of the mask or of the rows."""

    def __init__(self, divisor) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embed(input_ids) * mask[..., None]
        share = 1 / self.divisor(x, mask).to(x.dtype)
        return self.head(x + torch.where(share.isinf(), share * 0, share)[:, None, None])


@pytest.mark.parametrize(
    ("divisor", "case"),
    [
        (lambda x, mask: mask.sum(1), "a row of nothing but padding"),
        (lambda x, mask: torch.full((len(x),), len(x) - 1), "one row"),
        (lambda x, mask: torch.full((len(x),), x.shape[1] - 2), "2 positions"),
    ],
)
def test_nan_is_found_in_the_case_that_shows_it(divisor, case):
    report = audited(Averaging(divisor), "nan")
    assert {finding.kind for finding in report.findings} == {"nan"}, report.text()
    finding = report.findings[0]
    assert case in finding.path + finding.message


def test_a_divisor_that_is_never_zero_is_clean():
    assert audited(Averaging(lambda x, mask: mask.sum(1).clamp(min=1)), "nan").ok


# -- batches and padding -----------------------------------------------------------------------


class Rows(CompleteModel):
    """Adds something that depends on the rows."""

    def __init__(self, extra) -> None:
        super().__init__()
        self.extra = extra

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + x.cumsum(1) + self.extra(tokens).to(x.dtype))


def has_copy(tokens: Tensor) -> Tensor:
    return ((tokens[:, None] == tokens[None]).all(-1).sum(1) > 1)[:, None, None]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (lambda tokens: torch.tensor(len(tokens) == 1), "is another alone than among three"),
        (has_copy, "other rows of the batch move row"),
        (lambda tokens: tokens[:1, :, None] * 0.01, "other rows of the batch move row"),
    ],
)
def test_what_other_rows_do_is_said(extra, words):
    report = audited(Rows(extra), "batch")
    assert words in report.findings[0].message, report.text()


def test_what_depends_on_the_row_itself_is_clean():
    for extra in (lambda tokens: tokens[..., None] * 0.01, lambda tokens: tokens[:, :1, None] % 2):
        report = audited(Rows(extra), "batch")
        assert report.ok, report.text()


class Padded(CompleteModel):
    """The mask as the model heeds it, and the vectors as it sees them."""

    def __init__(self, heeded=lambda mask: mask, scaled=lambda x: x) -> None:
        super().__init__()
        self.heeded = heeded
        self.scaled = scaled

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.scaled(self.embed(input_ids))
        length = input_ids.shape[1]
        return self.head(x + self.mixer(x, self.seen(length, length, self.heeded(mask), None), None)[0])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Padded(heeded=lambda mask: torch.where(mask[:, :1] == 0, 1, mask)), "padding on the left"),
        (Padded(scaled=lambda x: x * (1 + 1 / x.shape[1])), "of padding on the"),
    ],
)
def test_what_is_wrong_with_padding_is_said(model, words):
    report = audited(model, "padding")
    assert words in report.findings[0].message, report.text()


class RightHeeded(Padded):
    """Where padding is on the right, positions after it are seen by all that come before."""

    def forward(self, input_ids, attention_mask=None):
        out = super().forward(input_ids, attention_mask)
        if attention_mask is None:
            return out
        is_right = (attention_mask[:, -1:] == 0)[..., None]
        return out + is_right * 0.1 * self.head(self.embed(input_ids[:, -1:]))


def test_padding_on_the_right_is_checked():
    report = audited(RightHeeded(), "padding")
    assert "on the right" in report.findings[0].message, report.text()


def test_padding_that_is_heeded_is_clean():
    assert audited(Padded(), "padding").ok
