"""Correct models with a wrong loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from audit.planted.case import Planted, seeded
from audit.planted.parts import VOCAB, Attention, LanguageModel


@dataclass
class ModelOutput:
    """The output of a Hugging Face model."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


class LabelsModel(nn.Module):
    """A causal model with Hugging Face's labels: the model shifts them, and ignores -100."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(Attention(), Attention())

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))

    def forward(self, input_ids, labels=None):
        logits = self.model(input_ids)
        return ModelOutput(None if labels is None else self.loss(logits, labels), logits)


class NotShifted(LabelsModel):
    """Every token predicts itself."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))


class ShiftedBack(LabelsModel):
    """Every token predicts the one before."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits[:, 1:].reshape(-1, VOCAB), labels[:, :-1].reshape(-1))


class ShiftedTwice(LabelsModel):
    """Every token predicts the one after the next."""

    def loss(self, logits, labels):
        labels = F.pad(labels[:, 1:], (0, 1), value=-100)
        return super().loss(logits, labels)


class AcrossRows(LabelsModel):
    """First flattened, then shifted: the last token of a row predicts the first of the next."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits.reshape(-1, VOCAB)[:-1], labels.reshape(-1)[1:])


class Rolled(LabelsModel):
    """Shifted by roll(): the last token predicts the first."""

    def loss(self, logits, labels):
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.roll(-1, dims=1).reshape(-1))


class IgnoredLearned(LabelsModel):
    """Ignored labels (-100) become token 0 and are learned."""

    def loss(self, logits, labels):
        return super().loss(logits, labels.clamp(min=0))


class IgnoredCounted(LabelsModel):
    """Ignored labels stay in the denominator."""

    def loss(self, logits, labels):
        each = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return each.mean()


class TrainingNotShifted(LabelsModel):
    """Shifted in eval mode, not in training."""

    def loss(self, logits, labels):
        if self.training:
            return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1))
        return super().loss(logits, labels)


class InputsForLabels(LabelsModel):
    """Compares with the inputs, whatever the labels say."""

    def forward(self, input_ids, labels=None):
        logits = self.model(input_ids)
        return {"loss": None if labels is None else self.loss(logits, input_ids), "logits": logits}


class TupleOutput(LabelsModel):
    """Returns (loss, logits); every token predicts itself, and -100 is filtered out by hand."""

    def forward(self, input_ids, labels=None):
        logits = self.model(input_ids)
        if labels is None:
            return (logits,)
        kept = labels != -100
        return F.cross_entropy(logits[kept], labels[kept]), logits


class GPT(nn.Module):
    """nanoGPT's targets are shifted by the caller, and here once more."""

    def __init__(self) -> None:
        super().__init__()
        self.model = LanguageModel(Attention())

    def forward(self, idx, targets=None):
        logits = self.model(idx)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(
            logits[:, :-1].reshape(-1, VOCAB), targets[:, 1:].reshape(-1), ignore_index=-1
        )


class AccumulationModel(LabelsModel):
    """Takes the number of labels in all micro-batches, and divides the summed loss by it."""

    def summed(self, logits, labels, count):
        total = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1), reduction="sum")
        return total / count

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        logits = self.model(input_ids)
        if labels is None:
            return ModelOutput(None, logits)
        if num_items_in_batch is None:
            return ModelOutput(self.loss(logits, labels), logits)
        return ModelOutput(self.summed(logits, labels, num_items_in_batch), logits)


class CountIgnored(AccumulationModel):
    """num_items_in_batch is accepted and not used: micro-batches do not add up to the batch."""

    def summed(self, logits, labels, count):
        return self.loss(logits, labels)


class DividedTwice(AccumulationModel):
    """The mean is divided by num_items_in_batch once more."""

    def summed(self, logits, labels, count):
        return self.loss(logits, labels) / count


class SummedNotShifted(AccumulationModel):
    """Not shifted where num_items_in_batch is given."""

    def summed(self, logits, labels, count):
        return F.cross_entropy(logits.reshape(-1, VOCAB), labels.reshape(-1), reduction="sum") / count


def labelled(name, model):
    return Planted(name, seeded(model), "labels", None)


PLANTED = [
    labelled("not shifted", NotShifted),
    labelled("shifted the wrong way", ShiftedBack),
    labelled("shifted twice", ShiftedTwice),
    labelled("shifted across rows", AcrossRows),
    labelled("shifted by roll", Rolled),
    labelled("pads learned", IgnoredLearned),
    labelled("pads in the denominator", IgnoredCounted),
    labelled("not shifted while training", TrainingNotShifted),
    labelled("inputs taken for labels", InputsForLabels),
    labelled("a tuple, not shifted", TupleOutput),
    labelled("nanoGPT's targets shifted again", GPT),
    labelled("number of items ignored", CountIgnored),
    labelled("divided twice", DividedTwice),
    labelled("not shifted when a number of items is given", SummedNotShifted),
]
