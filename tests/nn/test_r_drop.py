"""R-Drop: two passes that differ in their dropout, pulled together."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from keepleft import build, presets
from keepleft.models.heads import model_loss
from keepleft.nn.loss import IGNORE_INDEX, linear_cross_entropy, reference_loss
from keepleft.training.recipe import Recipe


def two_passes(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (
        torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()
        for shape in ((3, 7, 2, 5), (11, 5), (11,))
    )
    targets = torch.randint(11, (3, 7), generator=generator)
    targets[1, 2:5] = IGNORE_INDEX
    return x, weight, bias, targets


def test_the_definition_is_that_of_the_paper_halved():
    x, weight, bias, targets = two_passes()
    first, second = F.linear(x, weight, bias).unbind(2)
    is_target = targets != IGNORE_INDEX
    one, other = (logits[is_target].log_softmax(-1) for logits in (first, second))
    divergences = F.kl_div(one, other, log_target=True, reduction="sum") + F.kl_div(
        other, one, log_target=True, reduction="sum"
    )
    losses = sum(
        F.cross_entropy(part, targets[is_target], reduction="sum")
        for part in (first[is_target], second[is_target])
    )
    sums = reference_loss(x, weight, bias, targets, r_drop=5.0)
    torch.testing.assert_close(sums.loss, (losses + 5.0 * divergences / 2) / 2)
    torch.testing.assert_close(sums.cross_entropy, losses.detach() / 2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 4, 1000])
def test_in_chunks_it_is_the_definition(smoothing, chunk):
    x, weight, bias, targets = two_passes()
    ours = linear_cross_entropy(x, weight, bias, targets, label_smoothing=smoothing, r_drop=3.0, chunk=chunk)
    theirs = reference_loss(x, weight, bias, targets, label_smoothing=smoothing, r_drop=3.0)
    torch.testing.assert_close(tuple(ours), tuple(theirs))
    for mine, expected in zip(
        *(torch.autograd.grad(sums.loss, (x, weight, bias)) for sums in (ours, theirs)), strict=True
    ):
        torch.testing.assert_close(mine, expected)


def test_its_gradients_are_those_of_its_values():
    x, weight, bias, targets = two_passes()
    assert torch.autograd.gradcheck(
        lambda *args: linear_cross_entropy(*args, targets, label_smoothing=0.1, r_drop=3.0, chunk=4).loss,
        (x, weight, bias),
    )


@pytest.mark.parametrize("family", ["t5", "gpt2", "bert"])
def test_without_dropout_nothing_changes(family):
    design = presets.small(getattr(presets, family))
    if family == "bert":
        design = design.but(head=presets.bert_masked.head)
    model = build(design.but(dropout=0.0, attention_dropout=0.0), generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(5, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    inputs = {"tokens": tokens, "segments": (torch.arange(7) < torch.tensor([[7], [4], [5]])).long()}
    if family == "t5":
        inputs["source"] = tokens.flip(1)
    targets = torch.where(inputs["segments"] == 1, tokens, IGNORE_INDEX)
    plain = model_loss(model, inputs, targets, 0.1)
    twice = model_loss(model, inputs, targets, 0.1, r_drop=5.0)
    torch.testing.assert_close(tuple(twice), tuple(plain))


def test_with_dropout_the_passes_differ():
    model = build(presets.small(presets.gpt2).but(dropout=0.5), generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(5, 40, (3, 7), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    weak, strong = (
        float(model_loss(model, {"tokens": tokens}, tokens, r_drop=weight).loss.detach())
        for weight in (1e-9, 5.0)
    )
    assert strong > weak


def test_the_two_passes_must_be_there():
    x, weight, bias, targets = two_passes()
    with pytest.raises(ValueError, match=r"beside \(…, 2, dim\)"):
        linear_cross_entropy(x[:, :, 0], weight, bias, targets, r_drop=1.0)
    with pytest.raises(ValueError, match="r_drop is -1"):
        Recipe(r_drop=-1.0)
