"""Tensor names and configurations of every family survive a round trip; no tensor is lost or set twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.models import presets
from keepleft.weights.families import families
from keepleft.weights.rules import (
    InMemorySource,
    Rule,
    concat_rules,
    export_tensors,
    identity,
    interleave,
    load_tensors,
    transpose,
)

# a small design that each family can express
SMALL = {
    "gpt2": "gpt2",
    "openai-gpt": "gpt",
    "gpt_neo": "gpt_neo",
    "llama": "llama3_1",
    "mistral": "mistral",
    "qwen2": "qwen2_0_5b",
    "t5": "t5",
    "mt5": "mt5",
    "bart": "bart",
    "marian": "marian",
    "pegasus": "pegasus",
    "bert": "bert",
}
HEADS = {
    "gpt2": [None, kl.ClassificationHead(5, "last", bias=False)],
    "llama": [None, kl.ClassificationHead(5, "last", bias=False)],
    "bert": [None, kl.MaskedLMHead(), kl.ClassificationHead(5)],
}


def small(name: str) -> kl.Design:
    design = presets.small(presets.ALL[SMALL[name]])
    return design.but(
        vocab=23,
        dim=24,
        heads=6,
        kv_heads=3 if design.kv_heads else None,
        feedforward=replace(design.feedforward, width=96),
    )


CASES = [(name, head) for name in SMALL for head in [..., *HEADS.get(name, [])]]


@pytest.mark.parametrize(("name", "head"), CASES)
def test_exporting_and_loading_changes_nothing(name, head):
    design = small(name) if head is ... else small(name).but(head=head)
    model, rules = kl.build(design), families()[name].rules(design)
    theirs = dict(export_tensors(rules, model.state_dict(), prefix=families()[name].prefix))
    again = kl.build(design)
    load_tensors(rules, InMemorySource(theirs), again.state_dict(), prefix=families()[name].prefix)
    assert all(
        torch.equal(x, y)
        for x, y in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )
    formulas = sum(rule.compute().numel() for rule in rules if rule.compute)
    assert sum(t.numel() for t in theirs.values()) - formulas == sum(
        t.numel() for t in model.state_dict().values()
    )


@pytest.mark.parametrize(("name", "head"), CASES)
def test_a_configuration_written_and_read_is_the_same_design(name, head):
    design = small(name) if head is ... else small(name).but(head=head)
    config = families()[name].design_to_config(design)
    assert config is not None
    assert config["model_type"] == name
    tied = not isinstance(design.head, kl.LMHead) or design.head.tied
    assert families()[name].config_to_design(config, [] if tied else ["lm_head.weight"]) == design


@pytest.mark.parametrize("name", SMALL)
def test_a_tensor_too_many_too_few_or_twice_is_an_error_that_names_it(name):
    design = small(name)
    model, family = kl.build(design), families()[name]
    rules = family.rules(design)
    theirs = dict(export_tensors(rules, model.state_dict(), prefix=family.prefix))
    fill = lambda state, table=rules: load_tensors(
        table, InMemorySource(state), kl.build(design).state_dict(), prefix=family.prefix
    )
    with pytest.raises(ValueError, match="'surprise'"):
        fill({**theirs, "surprise": torch.ones(1)})
    formulas = {family.prefix + rule.checkpoint_name for rule in rules if rule.compute}
    for gone in [name for name in theirs if name not in formulas][::7]:
        with pytest.raises(ValueError, match="lacks"):
            fill({k: v for k, v in theirs.items() if k != gone})
    some = next(iter(theirs))
    with pytest.raises(ValueError, match="shape"):
        fill({**theirs, some: theirs[some][:-1]})
    first = next(rule for rule in rules if rule.param_name and not rule.tied)
    with pytest.raises(ValueError, match="set twice"):
        fill({**theirs, "again": theirs[some]}, [*rules, replace(first, checkpoint_name="again")])
    with pytest.raises(ValueError, match="no rule"):
        dict(export_tensors(rules[1:], model.state_dict()))


def test_a_second_copy_of_a_tied_matrix_must_be_a_copy():
    design = small("gpt2")
    model, rules = kl.build(design), families()["gpt2"].rules(design)
    theirs = dict(export_tensors(rules, model.state_dict()))
    load_tensors(
        rules,
        InMemorySource({**theirs, "lm_head.weight": theirs["wte.weight"]}),
        kl.build(design).state_dict(),
    )
    with pytest.raises(ValueError, match="two different ones"):
        load_tensors(
            rules,
            InMemorySource({**theirs, "lm_head.weight": theirs["wte.weight"] + 1}),
            kl.build(design).state_dict(),
        )


@given(st.sampled_from([identity, transpose, interleave(3)]), st.integers(0, 2))
@settings(max_examples=30)
def test_every_op_is_undone(op, layer):
    ours = {f"a.{layer}.w": torch.randn(12, 12)}
    rules = [Rule("b.{i}.x", "a.{i}.w", op=op)]
    theirs = dict(export_tensors(rules, ours))
    back = {f"a.{layer}.w": torch.zeros(12, 12)}
    load_tensors(rules, InMemorySource(theirs), back)
    assert torch.equal(back[f"a.{layer}.w"], ours[f"a.{layer}.w"])
    assert theirs[f"b.{layer}.x"].shape == (12, 12)
    assert torch.equal(theirs[f"b.{layer}.x"], ours[f"a.{layer}.w"]) == (op is identity)


def test_concatenated_matrices_are_rows_one_below_the_other():
    rules = concat_rules("l.{}", ("q", "k"), "qk", (2, 3))
    ours = {"qk.weight": torch.zeros(5, 7), "qk.bias": torch.zeros(5)}
    q, k = torch.randn(2, 7), torch.randn(3, 7)
    load_tensors(
        rules,
        InMemorySource(
            {"l.q.weight": q, "l.k.weight": k, "l.q.bias": torch.ones(2), "l.k.bias": torch.full((3,), 2.0)}
        ),
        ours,
    )
    assert torch.equal(ours["qk.weight"], torch.cat([q, k]))
    assert ours["qk.bias"].tolist() == [1, 1, 2, 2, 2]
