"""LoRA, low-rank adaptation (Hu et al. 2021): frozen weights, and trainable low-rank matrices beside them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft import checks

TARGET_MODULES = ("self.qkv", "self.out", "cross.q", "cross.kv", "cross.out", "feed.up", "feed.down")


class LoRALinear(nn.Module):
    """W x + b + alpha / rank · up (down x): (…, in) → (…, out)

    Only `down` and `up` are trained. `up` starts at zero, so that at first nothing changes.
    """

    def __init__(
        self, linear: nn.Linear, rank: int, alpha: float, dropout: float, rng: torch.Generator
    ) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.scaling = alpha / rank
        self.weight = linear.weight
        self.bias = linear.bias
        initial_down = torch.randn(rank, linear.in_features, generator=rng) * linear.in_features**-0.5
        self.down = nn.Parameter(initial_down.to(linear.weight))
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return (
            F.linear(x, self.weight, self.bias)
            + F.linear(F.linear(self.dropout(x), self.down), self.up) * self.scaling
        )

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """The same function as an ordinary layer, the low-rank product added to its weight."""
        out = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        compute_dtype = torch.promote_types(self.weight.dtype, torch.float32)
        update = self.scaling * (self.up.to(compute_dtype) @ self.down.to(compute_dtype))
        out.weight = nn.Parameter((self.weight.to(compute_dtype) + update).to(self.weight.dtype))
        out.bias = self.bias
        return out.train(self.training)


def add_lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float = 16.0,
    target_modules: Iterable[str] = TARGET_MODULES,
    modules_to_save: Iterable[str] = (),
    dropout: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Freeze the model and add low-rank matrices to the layers whose names end in `target_modules`, in place.

    `modules_to_save` names what is trained in full besides, such as "head" or "encoder.norm". Returns the
    names of the adapted layers. To resume a run, call this with the same arguments before training. Raises
    ValueError if a name is not in the model, which is then unchanged.
    """
    checks.check_int("rank", rank)
    checks.check_number("alpha", alpha, above=0)
    target_modules = tuple(target_modules)
    modules_to_save = tuple(modules_to_save)
    rng = torch.Generator().manual_seed(seed)
    has_suffix = lambda name, suffix: f".{name}".endswith(f".{suffix}")
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(has_suffix(name, suffix) for suffix in target_modules)
    }
    unmatched = [suffix for suffix in target_modules if not any(has_suffix(name, suffix) for name in layers)]
    if missing := [suffix for suffix in unmatched if suffix not in TARGET_MODULES]:
        raise ValueError(
            f"no layer of the model is called {missing[0]!r}: the layers end in {', '.join(TARGET_MODULES)}"
        )
    if not layers:
        raise ValueError(f"no layer of the model ends in {', '.join(target_modules)}: is it adapted already?")
    trainable = {
        module_name: [p for name, p in model.named_parameters() if f".{module_name}." in f".{name}."]
        for module_name in modules_to_save
    }
    if missing := [module_name for module_name, parameters in trainable.items() if not parameters]:
        raise ValueError(
            f"no weight of the model is called {missing[0]!r}: there are "
            f"{', '.join(name for name, _ in model.named_children())}"
        )
    model.requires_grad_(False)
    for name, linear in layers.items():
        model.set_submodule(name, LoRALinear(linear, rank, alpha, dropout, rng))
    for p in (p for parameters in trainable.values() for p in parameters):
        p.requires_grad_(True)
    return list(layers)


def merge(model: nn.Module) -> list[str]:
    """Merge the low-rank matrices into the weights, in place, and make all weights trainable again.

    The model has its ordinary layers and names again. Returns the names of the merged layers.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, module in layers.items():
        model.set_submodule(name, module.to_linear())
    model.requires_grad_(True)
    return list(layers)
