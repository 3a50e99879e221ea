"""Low-rank adaptation (Hu et al. 2021): the weights stay as they are, and beside them small matrices learn the difference."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepleft.nn import sense

WHERE = ("self.qkv", "self.out", "cross.q", "cross.kv", "cross.out", "feed.up", "feed.down")


class LowRank(nn.Module):
    """W x + b + scale / rank · up (down x): (…, in) → (…, out). Only `down` and `up` learn; up starts at zero."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features, self.factor = linear.in_features, linear.out_features, scale / rank
        self.weight, self.bias = linear.weight, linear.bias
        fresh = torch.randn(rank, linear.in_features, generator=generator) * linear.in_features ** -0.5
        self.down = nn.Parameter(fresh.to(linear.weight))
        self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(self.dropout(x), self.down), self.up) * self.factor

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The same as one matrix."""
        out = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        out.weight = nn.Parameter((self.weight.to(exact) + self.factor * (self.up.to(exact) @ self.down.to(exact)))
                                  .to(self.weight.dtype))
        out.bias = self.bias
        return out.train(self.training)


def adapt(model: nn.Module, rank: int = 8, scale: float = 16.0, where: Iterable[str] = WHERE, also: Iterable[str] = (),
          dropout: float = 0.0, seed: int = 0) -> list[str]:
    """Put small matrices beside the layers whose names end so, freeze everything else, and say which layers they are.

    `also` names what learns as a whole besides: "head", or "encoder.norm". Call it again in the same way before a run goes on.
    """
    sense.whole("rank", rank)
    sense.real("scale", scale, above=0)
    where, also, generator = tuple(where), tuple(also), torch.Generator().manual_seed(seed)
    found = {name: module for name, module in model.named_modules()
             if isinstance(module, nn.Linear) and f".{name}".endswith(tuple(f".{end}" for end in where))}
    if missing := [end for end in where if end not in WHERE and not any(f".{name}".endswith(f".{end}") for name in found)]:
        raise ValueError(f"no layer of the model is called {missing[0]!r}: the layers end in {', '.join(WHERE)}")
    if not found:
        raise ValueError(f"no layer of the model ends in {', '.join(where)}: is it adapted already?")
    whole = {part: [p for name, p in model.named_parameters() if f".{part}." in f".{name}."] for part in also}
    if missing := [part for part, chosen in whole.items() if not chosen]:
        raise ValueError(f"no weight of the model is called {missing[0]!r}: there are "
                         f"{', '.join(name for name, _ in model.named_children())}")
    model.requires_grad_(False)
    for name, linear in found.items():
        model.set_submodule(name, LowRank(linear, rank, scale, dropout, generator))
    for p in (p for chosen in whole.values() for p in chosen):
        p.requires_grad_(True)
    return list(found)


def merge(model: nn.Module) -> list[str]:
    """Fold the small matrices in, in place: the model has its own layers and names again, all of its weights can learn."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}
    for name, module in found.items():
        model.set_submodule(name, module.merged())
    model.requires_grad_(True)
    return list(found)
