"""Low-rank adaptation (Hu et al.

2021): the weights stay as they are, and beside them small matrices learn the difference.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft import checks

TARGET_MODULES = ("self.qkv", "self.out", "cross.q", "cross.kv", "cross.out", "feed.up", "feed.down")


class LoRALinear(nn.Module):
    """W x + b + scale / rank · up (down x): (…, in) → (…, out).

    Only `down` and `up` learn; up starts at zero.
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
        """The same as one matrix."""
        out = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        compute_dtype = torch.promote_types(self.weight.dtype, torch.float32)
        out.weight = nn.Parameter(
            (
                self.weight.to(compute_dtype)
                + self.scaling * (self.up.to(compute_dtype) @ self.down.to(compute_dtype))
            ).to(self.weight.dtype)
        )
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
    """Put small matrices beside the layers whose names end so, freeze everything else, and say which layers
    they are.

    `also` names what learns as a whole besides: "head", or "encoder.norm". Call it again in the same way
    before a run goes on.
    """
    checks.check_int("rank", rank)
    checks.check_number("alpha", alpha, above=0)
    target_modules = tuple(target_modules)
    modules_to_save = tuple(modules_to_save)
    rng = torch.Generator().manual_seed(seed)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and f".{name}".endswith(tuple(f".{suffix}" for suffix in target_modules))
    }
    if missing := [
        suffix
        for suffix in target_modules
        if suffix not in TARGET_MODULES and not any(f".{name}".endswith(f".{suffix}") for name in layers)
    ]:
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
    """Fold the small matrices in, in place: the model has its own layers and names again, all of its weights
    can learn.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, module in layers.items():
        model.set_submodule(name, module.to_linear())
    model.requires_grad_(True)
    return list(layers)
