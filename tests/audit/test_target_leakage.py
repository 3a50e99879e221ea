"""Is a label judged by what has read it? Losses that no scores explain, and decoders that read labels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import keepleft as kl

VOCAB, WIDTH = 37, 16
TOKENS = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


class Regressor(nn.Module):
    """The loss is the distance between a hidden vector and the vector of the label."""

    shift = 1  # between a label and the hidden vector that is held to it

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.targets = nn.Embedding(VOCAB, WIDTH)

    def loss_of(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """(n,) of n hidden vectors and labels"""
        return (hidden - self.targets(labels)).pow(2).mean(-1)

    def forward(self, input_ids, labels=None):
        hidden = self.rnn(self.embed(input_ids))[0]
        if labels is None:
            return {"hidden": hidden}
        length = labels.shape[1]
        hidden_used, labels_used = hidden[:, : length - self.shift], labels[:, self.shift :]
        judged = labels_used != -100
        losses = self.loss_of(hidden_used[judged], labels_used[judged])
        return {"loss": losses.sum() / judged.sum().clamp(min=1), "hidden": hidden}


class Focal(Regressor):
    """Unlikely labels count more."""

    def loss_of(self, hidden, labels):
        logprobs = (hidden @ self.targets.weight.T).log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return -((1 - logprobs.exp()) ** 2) * logprobs


class Hinge(Regressor):
    """A margin over the mean score."""

    def loss_of(self, hidden, labels):
        scores = hidden @ self.targets.weight.T
        return (3 - scores.gather(-1, labels[:, None])[:, 0] + scores.mean(-1)).clamp(min=0).sqrt()


def not_shifted(honest):
    return type(f"{honest.__name__}NotShifted", (honest,), {"shift": 0})


def shifted_twice(honest):
    return type(f"{honest.__name__}ShiftedTwice", (honest,), {"shift": 2})


LOSSES = [Regressor, Focal, Hinge]


def audited(model, example=TOKENS, **options):
    return kl.audit(model, example, vocab=VOCAB, budget="quick", checks=["future", "labels"], **options)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_label_that_is_judged_by_what_has_read_it_is_found(loss):
    report = audited(not_shifted(loss)())
    assert {finding.kind for finding in report.findings} == {"labels"}, report.text()
    assert "judged by what has read it" in report.findings[0].message


@pytest.mark.parametrize("loss", [Regressor, Focal])
def test_labels_that_are_shifted_twice_are_found(loss):
    report = audited(shifted_twice(loss)())
    assert {finding.kind for finding in report.findings} == {"labels"}, report.text()
    assert "shifted twice" in report.findings[0].message


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_another_kind_with_labels_where_they_belong_has_no_finding(loss):
    report = audited(loss())
    assert not report.findings, report.text()


class Mixed(Regressor):
    """Honest, with a term that depends on all tokens and on no label."""

    def forward(self, input_ids, labels=None):
        out = super().forward(input_ids, labels)
        if labels is not None:
            out["loss"] = out["loss"] + 0.3 * out["hidden"].pow(2).mean()
        return out


def test_what_depends_on_no_label_is_no_target_leakage():
    assert not audited(Mixed()).findings
    assert audited(not_shifted(Mixed)()).findings


# -- decoders that read labels -----------------------------------------------------------------


class Decoder(nn.Module):
    """Makes its decoder's input of the labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def decoder_input(self, labels: Tensor) -> Tensor:
        return F.pad(labels[:, :-1], (1, 0))

    def scores(self, source: Tensor, labels: Tensor) -> Tensor:
        decoder_input = self.decoder_input(labels).clamp(min=0)
        hidden = self.rnn(self.target(decoder_input))[0] + self.source(source).mean(1, True)
        return self.head(hidden)

    def forward(self, input_ids, labels):
        logits = self.scores(input_ids, labels)
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


class LossOnly(Decoder):
    def forward(self, input_ids, labels):
        return super().forward(input_ids, labels)["loss"]


class Step(Decoder):
    """A training step with the pair (source, labels)."""

    def training_step(self, batch, batch_idx):
        source, labels = batch
        return F.cross_entropy(self.scores(source, labels).flatten(0, 1), labels.flatten())


def unshifted(labels):
    return labels


def rolled(labels):
    return labels.roll(1, 1)


def rolled_back(labels):
    return F.pad(labels[:, 1:], (0, 1))


def with_input(model, decoder_input):
    instance = model()
    if decoder_input is not None:
        instance.decoder_input = decoder_input
    return instance


EXAMPLES = {
    Decoder: {"input_ids": TOKENS, "labels": TOKENS.flip(1)},
    LossOnly: {"input_ids": TOKENS, "labels": TOKENS.flip(1)},
    Step: (TOKENS, TOKENS.flip(1)),
}


@pytest.mark.parametrize("decoder_input", [unshifted, rolled, rolled_back])
@pytest.mark.parametrize("model", [Decoder, LossOnly])
def test_a_decoder_that_reads_its_answers_is_found(model, decoder_input):
    report = audited(with_input(model, decoder_input), EXAMPLES[model])
    assert report.verdict == "leak", report.text()
    assert {finding.kind for finding in report.findings} <= {"future", "labels"}


@pytest.mark.parametrize("model", [Decoder, LossOnly])
def test_a_decoder_that_reads_labels_shifted_to_the_right_is_clean(model):
    report = audited(with_input(model, None), EXAMPLES[model])
    assert report.ok, report.text()
    assert any("its decoder reads labels, shifted to the right" in note for note in report.notes)


@pytest.mark.parametrize("decoder_input", [unshifted, rolled_back])
def test_a_training_step_of_source_and_labels_that_reads_its_answers_is_found(decoder_input):
    report = audited(with_input(Step, decoder_input), EXAMPLES[Step])
    assert report.verdict == "leak", report.text()


def test_a_training_step_of_source_and_labels_that_shifts_them_has_no_finding():
    report = audited(with_input(Step, None), EXAMPLES[Step])
    assert not report.findings, report.text()
