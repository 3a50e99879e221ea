"""What changes the weights: AdamW, or Muon for the matrices inside and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from keepleft.nn.attention import CrossAttention, SelfAttention
from keepleft.nn.feedforward import Feed
from keepleft.training.recipe import Recipe

TABLES = {"token", "source_token", "embed", "source_embed", "head", "nearness"}  # no matrix between two layers


class Muon(Optimizer):
    """Momentum made orthogonal (Jordan et al. 2024): every direction of a matrix is learned at the same speed.

    Matrices of one shape are treated together. `heights` says of each weight how many rows the matrices have that are stacked
    in it (queries, keys, values); None where it is one matrix.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float = 1e-3, momentum: float = 0.95, weight_decay: float = 0.01,
                 rounds: int = 5) -> None:
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, rounds=rounds, heights=None))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            heights = group["heights"] or [None] * len(group["params"])
            moving = [(p, rows or [p.shape[0]]) for p, rows in zip(group["params"], heights, strict=True) if p.grad is not None]
            if not moving:
                continue
            parameters = [p for p, _ in moving]
            ready(self, parameters)
            gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
            momenta = [self.state[p]["momentum"] for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
            steps = [piece for step, (_, rows) in zip(ahead, moving, strict=True) for piece in step.split(rows)]
            by_shape: dict[torch.Size, list[int]] = {}
            for n, piece in enumerate(steps):
                by_shape.setdefault(piece.shape, []).append(n)
            for shape, places in by_shape.items():
                size = 0.2 * max(shape) ** 0.5  # as large as AdamW's steps, so that one learning rate serves both
                stack = ahead[0].new_empty((len(places), *shape), dtype=torch.bfloat16 if ahead[0].is_cuda else None)
                torch._foreach_copy_(list(stack), [steps[n] for n in places])
                found = orthogonal(stack, group["rounds"]).to(ahead[0].dtype)
                found *= -group["lr"] * size  # a number, or a tensor that a recording reads
                for n, piece in zip(places, found, strict=True):
                    steps[n] = piece
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_([piece for p, rows in moving for piece in p.split(rows)], steps)


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """(n, rows, columns) → the nearest matrices whose singular values are all about 1, by Newton–Schulz iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.float() if matrices.dtype == torch.float64 else matrices
    tall = x.shape[1] > x.shape[2]
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.mT if tall else x
    for _ in range(rounds):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def optimizers(model: nn.Module, recipe: Recipe, *, recorded: bool = False) -> list[Optimizer]:
    """The optimizers of all weights that can change. Norms, biases and the like do not decay. Those that will be `recorded`
    ask the CPU nothing."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise ValueError("no weight of the model can change: all have requires_grad=False")
    inside = lambda name, p: p.dim() == 2 and TABLES.isdisjoint(name.split("."))
    muon = [pair for pair in named if recipe.optimizer == "muon" and inside(*pair)]
    rest = [pair for pair in named if recipe.optimizer != "muon" or not inside(*pair)]
    apart = [([p for _, p in rest if p.dim() >= 2], recipe.weight_decay), ([p for _, p in rest if p.dim() < 2], 0.0)]
    groups = [{"params": parameters, "weight_decay": decay} for parameters, decay in apart if parameters]
    out: list[Optimizer] = []
    if groups:
        device = rest[0][1].device.type
        out.append(AdamW(groups, lr=recipe.peak, betas=recipe.betas, eps=1e-8, fused=device in ("cpu", "cuda"),
                         capturable=recorded))
    if muon:
        stacks = stacked(model)
        out.append(Muon([{"params": [p for _, p in muon], "heights": [stacks.get(name) for name, _ in muon]}], lr=recipe.peak,
                        weight_decay=recipe.weight_decay))
    return out


def stacked(model: nn.Module) -> dict[str, list[int]]:
    """The weights that are several matrices, one on top of the other, and how many rows each of those has."""
    out: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            out[f"{name}.qkv.weight"] = module.sizes
        elif isinstance(module, CrossAttention):
            out[f"{name}.kv.weight"] = [module.kv.out_features // 2] * 2
        elif isinstance(module, Feed) and module.gated:
            out[f"{name}.up.weight"] = [module.up.out_features // 2] * 2
    return out


def ready(optimizer: Optimizer, only: Iterable[Tensor] | None = None) -> None:
    """Give every weight, or only these, a memory of zeros where it has none: a saved one can then be put in its place."""
    for p in [p for group in optimizer.param_groups for p in group["params"]] if only is None else only:
        if optimizer.state[p]:
            continue
        if isinstance(optimizer, Muon):
            optimizer.state[p]["momentum"] = torch.zeros_like(p)
        else:
            where = p.device if optimizer.defaults.get("fused") or optimizer.defaults.get("capturable") else "cpu"
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=where),
                                  "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def memory(model: nn.Module, chosen: list[Optimizer]) -> dict[str, Tensor]:
    """All that the optimizers remember, under the names of the weights: exp_avg/decoder.layers.0.self.qkv.weight."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    return {f"{kind}/{names[p]}": value for optimizer in chosen for p, kept in optimizer.state.items()
            for kind, value in kept.items()}
