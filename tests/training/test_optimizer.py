"""Muon is PyTorch's; which weights get which optimizer; what an optimizer remembers has names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import keepleft as kl
import tiny_training as tiny
from keepleft.training import optimizer
from keepleft.training.optimizer import (
    Muon,
    fused_row_counts,
    init_state,
    make_optimizers,
    named_state,
    newton_schulz,
)


def model(kind: str = "decoder", **changes) -> nn.Module:
    return tiny.model(tiny.design(kind, **changes), dtype=torch.float32)


@pytest.mark.parametrize("shape", [(11, 7), (7, 11), (13, 13)])
def test_muon_is_pytorchs(shape, monkeypatch):
    """PyTorch orthogonalises in bfloat16 everywhere; here this is done in float32 on a CPU, so it is lent PyTorch's way."""
    from torch.optim._muon import _zeropower_via_newtonschulz as theirs

    lent = lambda matrices, rounds: torch.stack(
        [theirs(one, (3.4445, -4.7750, 2.0315), rounds, 1e-7) for one in matrices]
    )
    monkeypatch.setattr(optimizer, "newton_schulz", lent)
    a, b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(shape))
    b.data.copy_(a.data)
    ours = Muon([{"params": [a]}], lr=0.03, weight_decay=0.1)
    other = torch.optim.Muon([b], lr=0.03, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        a.grad = torch.randn(shape)
        b.grad = a.grad.clone()
        ours.step()
        other.step()
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=30)
def test_orthogonal_is_pytorchs_to_half_precision_and_makes_all_singular_values_about_one(
    rows, columns, seed
):
    from torch.optim._muon import _zeropower_via_newtonschulz as theirs

    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    found = newton_schulz(matrix[None])[0]
    assert float((found - theirs(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7).float()).abs().max()) < 0.1
    values, before = torch.linalg.svdvals(found), torch.linalg.svdvals(matrix)
    assert float(values.max()) < 1.3
    assert float(values[before > 0.05 * before.max()].min()) > 0.6


def test_stacked_matrices_are_made_orthogonal_one_by_one():
    tall = nn.Parameter(torch.randn(5 + 3 + 3, 7))
    apart = [nn.Parameter(part.clone()) for part in tall.data.split([5, 3, 3])]
    tall.grad = torch.randn(11, 7)
    for part, gradient in zip(apart, tall.grad.split([5, 3, 3]), strict=True):
        part.grad = gradient.clone()
    Muon([{"params": [tall], "row_counts": [[5, 3, 3]]}], lr=0.1).step()
    Muon([{"params": apart}], lr=0.1).step()
    torch.testing.assert_close(tall.data, torch.cat([part.data for part in apart]))


@pytest.mark.parametrize(
    ("kind", "changes"), [("decoder", {"kv_heads": 1}), ("decoder", {"head_dim": 6}), ("both", {})]
)
def test_every_stack_is_known_and_falls_where_the_model_cuts_it(kind, changes):
    made = model(kind, heads=2, **changes)
    state, stacks = made.state_dict(), fused_row_counts(made)
    assert all(sum(rows) == state[name].shape[0] for name, rows in stacks.items())
    assert {name.rsplit(".", 2)[1] for name in stacks} == {"qkv", "up"} | (
        {"kv"} if kind == "both" else set()
    )
    width = changes.get("head_dim", 10)
    assert (
        stacks["decoder.layers.0.self.qkv.weight"] == [2 * width] + [changes.get("kv_heads", 2) * width] * 2
    )


def test_muon_takes_the_matrices_between_layers_and_adamw_the_rest():
    made = model("both", position=kl.RelativeBias(8, 19), norm=kl.LayerNorm())
    names = {p: name for name, p in made.named_parameters()}
    adamw, muon = make_optimizers(made, tiny.recipe(optimizer="muon"))
    inside = {names[p] for group in muon.param_groups for p in group["params"]}
    assert inside == {name for name, p in made.named_parameters() if p.dim() == 2 and ".layers." in name}
    outside = [{names[p] for p in group["params"]} for group in adamw.param_groups]
    assert inside | outside[0] | outside[1] == set(names.values())
    assert "decoder.nearness.weight" in outside[0]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]
    assert all(p.dim() < 2 for p in adamw.param_groups[1]["params"])


def test_frozen_weights_have_no_optimizer_and_all_frozen_is_refused():
    made = model()
    made.token.requires_grad_(False)
    groups = [group for one in make_optimizers(made, tiny.recipe()) for group in one.param_groups]
    assert not any(p is made.token.weight for group in groups for p in group["params"])
    with pytest.raises(ValueError, match="no weight of the model can change"):
        make_optimizers(made.requires_grad_(False), tiny.recipe())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_memory_made_ready_is_the_one_that_a_first_step_makes(name):
    """Zeros of the right shape, type and device: a step from there is a step from nothing."""
    ends = []
    for prepared in (False, True):
        made = model()
        chosen = make_optimizers(made, tiny.recipe(optimizer=name))
        for one in chosen if prepared else []:
            init_state(one)
        for p in made.parameters():
            p.grad = torch.ones_like(p)
        for one in chosen:
            one.step()
        remembered = named_state(made, chosen)
        assert {key.split("/")[1] for key in remembered} == {name for name, _ in made.named_parameters()}
        ends.append(made.state_dict() | remembered)
    assert tiny.equal_tensors(*ends)
    assert all(a.dtype == ends[1][name].dtype for name, a in ends[0].items())


def test_adamw_is_pytorchs_with_the_recipes_numbers():
    recipe = tiny.recipe(betas=(0.8, 0.7), weight_decay=0.3, lr=0.01)
    a, b = model(), model()
    ours = make_optimizers(a, recipe)[0]
    decays = [p for p in b.parameters() if p.dim() >= 2], [p for p in b.parameters() if p.dim() < 2]
    theirs = torch.optim.AdamW(
        [{"params": decays[0], "weight_decay": 0.3}, {"params": decays[1], "weight_decay": 0.0}],
        lr=0.01,
        betas=(0.8, 0.7),
    )
    for _ in range(3):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
