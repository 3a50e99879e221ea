"""Mixed precision gives the gradients of a model cast to bfloat16, in float32."""

from __future__ import annotations

import torch

import keepleft as kl
from keepleft.models.heads import LossModule
from keepleft.training.precision import MixedPrecision


def test_mixed_precision_is_a_cast_of_every_weight():
    design = kl.presets.small(kl.presets.pegasus).but(dropout=0.0)
    model = kl.build(design, generator=torch.Generator().manual_seed(0))
    inputs = {"source": torch.randint(512, (3, 7)), "tokens": torch.randint(512, (3, 5))}
    targets = torch.randint(512, (3, 5))
    MixedPrecision(LossModule(model, 0.1))(inputs, targets).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    cast_model = kl.build(design, generator=torch.Generator().manual_seed(0)).bfloat16()
    LossModule(cast_model, 0.1)(inputs, targets).loss.backward()
    for name, p in cast_model.named_parameters():
        assert gradients[name].dtype == torch.float32
        torch.testing.assert_close(gradients[name], p.grad.float(), atol=0, rtol=0)


def test_unused_weights_have_no_gradient():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[0](x)

    MixedPrecision(First())(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None
