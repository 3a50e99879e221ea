"""Our own models and our own training are audited like anyone's: caches, labels, packing, accumulation."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.data.batch import collate
from keepleft.data.ragged import Ragged, pack_layout, pad_layout
from keepleft.models.design import StackDesign
from keepleft.models.heads import model_loss
from thinned import thinned

FAMILIES = (
    "vaswani",
    "gpt",
    "gpt2",
    "gpt_neo",
    "llama3_1",
    "llama",
    "t5",
    "mt5",
    "bart",
    "marian",
    "bert",
    "mistral",
)


def built(name, **changes):
    design = kl.presets.small(getattr(kl.presets, name))
    return kl.build(
        design.but(**changes) if changes else design, generator=torch.Generator().manual_seed(0)
    ).eval()


@pytest.mark.parametrize("name", thinned(FAMILIES, 2))
def test_every_family_keeps_to_its_claim(name):
    report = kl.audit(built(name), claim=kl.full if name == "bert" else kl.causal, budget="quick")
    assert report.ok, report.text()
    wanted = {"batch", "nan", "padding", "packing"} | (set() if name == "bert" else {"future", "cache"})
    assert set(report.checked) == wanted


def test_a_window_is_kept_to_and_its_ring_too():
    model = built("llama", decoder=StackDesign(2, (kl.causal & kl.window(4),)))
    report = kl.audit(model, claim=kl.causal & kl.window(4), budget="quick")
    assert report.ok, report.text()
    assert any("ring" in path or "cache" in report.checked for path in report.paths)
    wider = kl.audit(model, claim=kl.causal & kl.window(3), budget="quick", checks=["future"])
    assert {finding.kind for finding in wider.findings} == {"future"}


@pytest.mark.parametrize("size", [3, 8, 40])
def test_a_window_that_is_not_there_is_missed_whatever_its_size(size):
    report = kl.audit(built("llama"), claim=kl.causal & kl.window(size), budget="quick", checks=["future"])
    found = report.findings[0]
    assert found.reader - found.source >= size
    assert "narrow the window" in found.message


def test_a_model_without_its_mask_is_named():
    model = built("gpt2")
    model.decoder.masks = (kl.full,)
    found, *_ = kl.audit(model, budget="quick", checks=["future"]).findings
    assert found.module == "decoder.layers.0.self"


def test_a_packed_model_is_as_clean_as_the_one_it_was_packed_from():
    report = kl.audit(kl.prepack(built("gpt2")), budget="quick")
    assert report.ok, report.text()


@pytest.mark.parametrize("head", [kl.ClassificationHead(3, pool="last"), kl.PoolingHead("mean")])
def test_a_decoder_that_gives_one_vector_for_a_sequence_has_no_cache_to_check(head):
    report = kl.audit(built("gpt2", head=head), budget="quick")
    assert report.ok, report.text()
    assert "cache" not in report.checked
    assert any(line.startswith("cache: the head of Decoder gives no logits") for line in report.skipped)


def test_int8_by_one_scale_for_the_batch_is_a_leak_and_is_called_one():
    report = kl.audit(kl.prepack(built("gpt2"), "int8"), budget="quick", checks=["batch"])
    assert {finding.kind for finding in report.findings} == {"batch"}
    assert report.findings[0].size < 0.05


class Taught(nn.Module):
    """Teacher forcing as the training loop does it: texts in, the objective's inputs and targets, its loss.

    A word is asked for where the words before it are shown, so the scores at t are those of the word at t +
    1.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.objective = kl.NextToken(start=1)

    def forward(self, input_ids, labels=None, num_items_in_batch=None):
        rows, length = input_ids.shape
        texts = Ragged.from_lists([[*row, 0] for row in input_ids.tolist()])
        lesson = self.objective.examples((texts,), np.random.default_rng(0))
        batch = collate(lesson, pad_layout(lesson.tokens), None, "")
        logits = self.model(**batch.inputs)[:, 1:]
        if labels is None:
            return {"logits": logits}
        asked = torch.full((rows, length + 1), -100)
        asked[:, 1:length] = labels[:, 1:]
        assert torch.equal(batch.targets[:, :-1], input_ids)  # what is asked is the text itself
        sums = model_loss(self.model, batch.inputs, asked)
        return {
            "loss": sums.loss / ((asked != -100).sum() if num_items_in_batch is None else num_items_in_batch),
            "logits": logits,
        }


def test_the_labels_of_training_are_shifted_once_and_accumulation_is_the_full_batch():
    report = kl.audit(Taught(built("gpt2")), torch.randint(5, 90, (2, 13)), vocab=90, budget="quick")
    assert report.ok, report.text()
    assert {"future", "labels"} <= set(report.checked)


class TaughtPacked(nn.Module):
    """Packing as the training loop does it: each text of a row is a record of its own, laid out with the
    others.
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, segment_ids=None):
        segments = torch.ones_like(tokens) if segment_ids is None else segment_ids
        out = []
        for row, marks in zip(tokens, segments, strict=True):
            cuts = [0, *(1 + (marks[1:] != marks[:-1]).nonzero().flatten()).tolist(), len(row)]
            texts = Ragged.from_lists([row[a:b].tolist() for a, b in pairwise(cuts)])
            layout = pack_layout([np.arange(len(cuts) - 1)], texts, width=len(row), height=1)
            inputs = {
                "tokens": torch.from_numpy(layout.scatter(texts, 0)),
                "segments": torch.from_numpy(layout.segments(texts)),
            }
            out.append(self.model(**inputs))
        return torch.cat(out)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_packed_texts_are_strangers_to_each_other(name):
    report = kl.audit(TaughtPacked(built(name)), torch.randint(5, 90, (2, 13)), vocab=90, budget="quick")
    assert report.ok, report.text()
    assert "packing" in report.checked


def test_texts_that_are_not_told_apart_are_found():
    class Blurred(TaughtPacked):
        def forward(self, tokens, segment_ids=None):
            return self.model(tokens)

    report = kl.audit(
        Blurred(built("gpt2")), torch.randint(5, 90, (2, 13)), vocab=90, budget="quick", checks=["packing"]
    )
    assert {finding.kind for finding in report.findings} == {"packing"}


def test_a_finding_changes_nothing_of_the_model():
    model = built("gpt2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [part.training for part in model.modules()]
    kl.audit(model, budget="quick")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [part.training for part in model.modules()] == modes
    assert all(p.grad is None for p in model.parameters())
