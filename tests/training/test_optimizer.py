"""Muon and AdamW are PyTorch's; which weights get which optimizer; optimizer state has names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim._muon import _zeropower_via_newtonschulz as their_newton_schulz

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

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def make_model(kind: str = "decoder", **changes) -> nn.Module:
    return tiny.model(tiny.design(kind, **changes), dtype=torch.float32)


@pytest.mark.parametrize("shape", [(11, 7), (7, 11), (13, 13)])
def test_muon_is_pytorchs(shape, monkeypatch):
    """PyTorch orthogonalizes in bfloat16 everywhere, ours in float32 on a CPU: so use PyTorch's here."""
    monkeypatch.setattr(
        optimizer,
        "newton_schulz",
        lambda matrices, ns_steps: torch.stack(
            [their_newton_schulz(matrix, COEFFICIENTS, ns_steps, 1e-7) for matrix in matrices]
        ),
    )
    a, b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.zeros(shape))
    b.data.copy_(a.data)
    ours = Muon([{"params": [a]}], lr=0.03, weight_decay=0.1)
    theirs = torch.optim.Muon([b], lr=0.03, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        a.grad = torch.randn(shape)
        b.grad = a.grad.clone()
        ours.step()
        theirs.step()
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=30)
def test_newton_schulz_is_pytorchs_to_half_precision_and_makes_all_singular_values_about_one(
    rows, columns, seed
):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    ours = newton_schulz(matrix[None])[0]
    theirs = their_newton_schulz(matrix, COEFFICIENTS, 5, 1e-7).float()
    assert float((ours - theirs).abs().max()) < 0.1
    before = torch.linalg.svdvals(matrix)
    after = torch.linalg.svdvals(ours)
    assert float(after.max()) < 1.3
    assert float(after[before > 0.05 * before.max()].min()) > 0.6


def test_fused_matrices_are_orthogonalized_one_by_one():
    fused = nn.Parameter(torch.randn(5 + 3 + 3, 7))
    separate = [nn.Parameter(part.clone()) for part in fused.data.split([5, 3, 3])]
    fused.grad = torch.randn(11, 7)
    for part, gradient in zip(separate, fused.grad.split([5, 3, 3]), strict=True):
        part.grad = gradient.clone()
    Muon([{"params": [fused], "row_counts": [[5, 3, 3]]}], lr=0.1).step()
    Muon([{"params": separate}], lr=0.1).step()
    torch.testing.assert_close(fused.data, torch.cat([part.data for part in separate]))


@pytest.mark.parametrize(
    ("kind", "changes"), [("decoder", {"kv_heads": 1}), ("decoder", {"head_dim": 6}), ("both", {})]
)
def test_every_fused_weight_is_known_and_split_where_the_model_splits_it(kind, changes):
    model = make_model(kind, heads=2, **changes)
    state = model.state_dict()
    row_counts = fused_row_counts(model)
    assert all(sum(rows) == state[name].shape[0] for name, rows in row_counts.items())
    layer_names = {"qkv", "up"} | ({"kv"} if kind == "both" else set())
    assert {name.rsplit(".", 2)[1] for name in row_counts} == layer_names
    head_dim = changes.get("head_dim", 10)
    kv_heads = changes.get("kv_heads", 2)
    expected = [2 * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    assert row_counts["decoder.layers.0.self.qkv.weight"] == expected


def test_muon_takes_the_matrices_between_layers_and_adamw_the_rest():
    model = make_model("both", position=kl.RelativeBias(8, 19), norm=kl.LayerNorm())
    names = {p: name for name, p in model.named_parameters()}
    adamw, muon = make_optimizers(model, tiny.recipe(optimizer="muon"))
    muon_names = {names[p] for group in muon.param_groups for p in group["params"]}
    assert muon_names == {name for p, name in names.items() if p.dim() == 2 and ".layers." in name}
    adamw_names = [{names[p] for p in group["params"]} for group in adamw.param_groups]
    assert muon_names | adamw_names[0] | adamw_names[1] == set(names.values())
    assert "decoder.nearness.weight" in adamw_names[0]
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.01, 0.0]
    assert all(p.dim() < 2 for p in adamw.param_groups[1]["params"])


def test_frozen_weights_have_no_optimizer_and_all_frozen_is_refused():
    model = make_model()
    model.token.requires_grad_(False)
    optimizers = make_optimizers(model, tiny.recipe())
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert not any(p is model.token.weight for group in groups for p in group["params"])
    with pytest.raises(ValueError, match="no weight of the model can change"):
        make_optimizers(model.requires_grad_(False), tiny.recipe())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_init_state_creates_the_state_that_a_first_step_creates(name):
    """Zeros of the right shape, type and device: a step from there is a step from nothing."""
    results = []
    for initialized in (False, True):
        model = make_model()
        optimizers = make_optimizers(model, tiny.recipe(optimizer=name))
        if initialized:
            for optimizer in optimizers:
                init_state(optimizer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        for optimizer in optimizers:
            optimizer.step()
        state = named_state(model, optimizers)
        assert {key.split("/")[1] for key in state} == {name for name, _ in model.named_parameters()}
        results.append(model.state_dict() | state)
    assert tiny.equal_tensors(*results)
    assert all(tensor.dtype == results[1][name].dtype for name, tensor in results[0].items())


def test_adamw_is_pytorchs_with_the_recipes_numbers():
    recipe = tiny.recipe(betas=(0.8, 0.7), weight_decay=0.3, lr=0.01)
    a, b = make_model(), make_model()
    ours = make_optimizers(a, recipe)[0]
    groups = [
        {"params": [p for p in b.parameters() if p.dim() >= 2], "weight_decay": 0.3},
        {"params": [p for p in b.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.7))
    for _ in range(3):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
