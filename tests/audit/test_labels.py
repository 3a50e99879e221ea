"""Label alignment: the cases that a few labels in two rows do not show."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from audit.planted.case import seeded
from audit.planted.labels import GPT, LabelsModel, ModelOutput
from audit.planted.parts import VOCAB, Attention, LanguageModel


class Chunked(LabelsModel):
    """The loss in chunks of eight, over logits and labels that were shifted before."""

    chunk = 8

    def loss(self, logits, labels):
        pairs = zip(logits[:, :-1].split(self.chunk, 1), labels[:, 1:].split(self.chunk, 1), strict=True)
        total = sum(F.cross_entropy(a.flatten(0, 1), b.flatten(), reduction="sum") for a, b in pairs)
        return total / (labels[:, 1:] != -100).sum()


class EdgesLost(Chunked):
    """Shifted inside each chunk: the first label of a chunk is compared with nothing."""

    def loss(self, logits, labels):
        total = count = 0
        for a, b in zip(logits.split(self.chunk, 1), labels.split(self.chunk, 1), strict=True):
            total = total + F.cross_entropy(a[:, :-1].flatten(0, 1), b[:, 1:].flatten(), reduction="sum")
            count = count + (b[:, 1:] != -100).sum()
        return total / count.clamp(min=1)


class FarEdgesLost(EdgesLost):
    """Chunks longer than a short sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk = 24


class OneRow(LabelsModel):
    """squeeze() removes the axis of a batch of one, and then nothing is shifted."""

    def loss(self, logits, labels):
        if len(logits) == 1:
            return F.cross_entropy(logits.squeeze(0), labels.squeeze(0))
        return super().loss(logits, labels)


class Reading(LabelsModel):
    """Labels are added to the input."""

    def forward(self, input_ids, labels=None):
        given = input_ids if labels is None else (input_ids + labels.clamp(min=0).roll(-1, 1)) % VOCAB
        logits = self.model(given)
        return ModelOutput(None if labels is None else self.loss(logits, labels), logits)


class Each(LabelsModel):
    """A loss for each label."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


class EachNotShifted(LabelsModel):
    def loss(self, logits, labels):
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class EachFirst(Each):
    """The same in a tuple, before the logits."""

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        return (out.logits,) if labels is None else (out.loss, out.logits)


class EachFirstNotShifted(EachFirst):
    def loss(self, logits, labels):
        return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


class WithRouter(LabelsModel):
    """With label smoothing, and a z-loss that depends on no label."""

    def loss(self, logits, labels):
        plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
        return plain + 1e-2 * logits.logsumexp(-1).pow(2).mean()


class Named(LabelsModel):
    def forward(self, input_ids, lm_labels=None):
        return super().forward(input_ids, lm_labels)


class NamedNotShifted(Named):
    def loss(self, logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Y(nn.Module):
    """(x, y) as a loader gives them: y is shifted by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(Attention())

    def loss(self, logits, y):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def forward(self, x, y=None):
        logits = self.model(x)
        return logits, None if y is None else self.loss(logits, y)


class YBackwards(Y):
    def loss(self, logits, y):
        return F.cross_entropy(logits[:, 1:].flatten(0, 1), y[:, :-1].flatten())


class Translator(nn.Module):
    """An encoder-decoder that makes the decoder's input from the labels where none is given."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCAB, VOCAB)
        self.decoder = LanguageModel(Attention())

    def made(self, labels):
        return F.pad(labels, (1, 0), value=0)[:, :-1].clamp(min=0)

    def forward(self, input_ids, decoder_input_ids=None, labels=None):
        given = self.made(labels) if decoder_input_ids is None else decoder_input_ids
        logits = self.decoder(given) + self.source(input_ids).mean(1, keepdim=True)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class Copier(Translator):
    """Not shifted: the decoder reads the label that it must predict."""

    def made(self, labels):
        return labels.clamp(min=0)


class Broken(LabelsModel):
    """A loss that no logits explain."""

    def loss(self, logits, labels):
        return (logits[:, :-1].sum(-1) * labels[:, 1:]).sin().mean()


def pair():
    return {name: torch.randint(VOCAB, (2, 11)) for name in ("input_ids", "decoder_input_ids")}


def report(model, example=None):
    return kl.audit(*seeded(model, example)(), budget="quick", checks=["labels"])


LEAKS = [
    EdgesLost,
    FarEdgesLost,
    OneRow,
    Reading,
    EachNotShifted,
    EachFirstNotShifted,
    NamedNotShifted,
    YBackwards,
    GPT,
]
HONEST = [LabelsModel, Chunked, Each, EachFirst, WithRouter, Named, Y]


@pytest.mark.parametrize("model", LEAKS)
def test_labels_judged_in_the_wrong_place_are_told(model):
    assert {finding.kind for finding in report(model).findings} == {"labels"}


@pytest.mark.parametrize("model", HONEST)
def test_labels_judged_once_by_the_scores_before_them_are_clean(model):
    found = report(model)
    assert found.ok, found.text()
    assert found.checked == ("labels",)


def test_a_decoder_must_not_be_fed_its_answers():
    assert "reads its answers" in report(Copier, pair).findings[0].message
    honest = report(Translator, pair)
    assert honest.ok, honest.text()
    assert honest.checked == ("labels",)


def test_a_loss_that_nothing_explains_is_not_checked():
    found = report(Broken)
    assert not found.findings
    assert "labels" not in found.checked
