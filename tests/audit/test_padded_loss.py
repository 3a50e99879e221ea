"""The loss of a text must not depend on how it is padded, where labels at padding are ignored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import keepleft as kl

VOCAB, WIDTH = 37, 16


class Labelled(nn.Module):
    """A running mean over real tokens; the loss is the mean over judged labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def reduced(self, losses: Tensor, judged: Tensor, mask: Tensor) -> Tensor:
        """losses: (B, T - 1), zero where a label is ignored."""
        return losses.sum() / judged.sum().clamp(min=1)

    def forward(self, input_ids, attention_mask=None, labels=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embed(input_ids) * mask[..., None]
        x = x + x.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return {"loss": self.reduced(losses, labels[:, 1:] != -100, mask), "logits": logits}


class Summed(Labelled):
    def reduced(self, losses, judged, mask):
        return losses.sum()


class ByRow(Labelled):
    """The mean over rows of the mean of a row."""

    def reduced(self, losses, judged, mask):
        return (losses.sum(1) / judged.sum(1).clamp(min=1)).mean()


class OverAll(Labelled):
    """Divided by all positions, padding or not."""

    def reduced(self, losses, judged, mask):
        return losses.mean()


class ByLength(Labelled):
    """The sum, divided by the root of the length."""

    def reduced(self, losses, judged, mask):
        return losses.sum() / losses.shape[1] ** 0.5


class WithPadding(Labelled):
    """A small term for each padded position."""

    def reduced(self, losses, judged, mask):
        return super().reduced(losses, judged, mask) + 0.1 * (mask == 0).sum()


class IgnoredLearned(Labelled):
    """Ignored labels are asked for as token 0."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        return super().forward(input_ids, attention_mask, None if labels is None else labels.clamp(min=0))


class InTraining(OverAll):
    """Divided by all positions in training only."""

    def reduced(self, losses, judged, mask):
        return losses.mean() if self.training else losses.sum() / judged.sum().clamp(min=1)


LEAKS = [OverAll, ByLength, WithPadding, IgnoredLearned, InTraining]


@pytest.mark.parametrize("model", LEAKS)
def test_a_loss_that_padding_changes_is_found(model):
    report = kl.audit(model(), budget="quick", checks=["padding"])
    assert {finding.kind for finding in report.findings} == {"padding"}, report.text()
    found = report.findings[0]
    assert "changes the loss of a text" in found.message
    assert "of padding on the" in found.path


@pytest.mark.parametrize("model", [Labelled, Summed, ByRow])
def test_a_loss_of_what_is_judged_alone_is_clean(model):
    report = kl.audit(model(), budget="quick", checks=["padding"])
    assert report.ok, report.text()


@pytest.mark.parametrize("model", [OverAll, ByLength])
def test_where_outputs_depend_on_padding_the_loss_is_not_reported_as_well(model):
    class Leaking(model):
        def forward(self, input_ids, attention_mask=None, labels=None):
            return super().forward(input_ids, None, labels)

    report = kl.audit(Leaking(), budget="quick", checks=["padding"])
    assert not any("changes the loss" in finding.message for finding in report.findings), report.text()
    assert report.findings


def test_the_line_of_the_loss_and_a_script_are_given():
    found = kl.audit(OverAll(), budget="quick", checks=["padding"]).findings[0]
    assert "forward" in found.line or "test_padded_loss" in found.line
    assert "loss" in found.reproduce
