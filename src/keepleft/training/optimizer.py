"""What changes the weights: AdamW, or Muon for the matrices inside and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from keepleft.nn.attention import CrossAttention, SelfAttention
from keepleft.nn.feedforward import FeedForwardLayer
from keepleft.training.recipe import Recipe

# no matrix between two layers
EMBEDDING_NAMES = {"token", "source_token", "embed", "source_embed", "head", "nearness"}


class Muon(Optimizer):
    """Momentum made orthogonal (Jordan et al.

    2024): every direction of a matrix is learned at the same speed.

    Matrices of one shape are treated together. `row_counts` says of each weight how many rows the matrices
    have that are stacked in it (queries, keys, values); None where it is one matrix.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        ns_steps: int = 5,
    ) -> None:
        super().__init__(
            groups,
            dict(lr=lr, momentum=momentum, weight_decay=weight_decay, ns_steps=ns_steps, row_counts=None),
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            row_counts = group["row_counts"] or [None] * len(group["params"])
            params_and_rows = [
                (p, rows or [p.shape[0]])
                for p, rows in zip(group["params"], row_counts, strict=True)
                if p.grad is not None
            ]
            if not params_and_rows:
                continue
            parameters = [p for p, _ in params_and_rows]
            init_state(self, parameters)
            gradients: list[Tensor] = [p.grad for p in parameters]  # type: ignore[misc]
            momenta = [self.state[p]["momentum"] for p in parameters]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])  # Nesterov's
            updates = [
                piece
                for update, (_, rows) in zip(nesterov, params_and_rows, strict=True)
                for piece in update.split(rows)
            ]
            by_shape: dict[torch.Size, list[int]] = {}
            for n, piece in enumerate(updates):
                by_shape.setdefault(piece.shape, []).append(n)
            for shape, indices in by_shape.items():
                # as large as AdamW's steps, so that one learning rate serves both
                scale = 0.2 * max(shape) ** 0.5
                stack = nesterov[0].new_empty(
                    (len(indices), *shape), dtype=torch.bfloat16 if nesterov[0].is_cuda else None
                )
                torch._foreach_copy_(list(stack), [updates[n] for n in indices])
                orthogonalized = newton_schulz(stack, group["ns_steps"]).to(nesterov[0].dtype)
                orthogonalized *= -group["lr"] * scale  # a number, or a tensor that a recording reads
                for n, piece in zip(indices, orthogonalized, strict=True):
                    updates[n] = piece
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_([piece for p, rows in params_and_rows for piece in p.split(rows)], updates)


def newton_schulz(matrices: Tensor, ns_steps: int = 5) -> Tensor:
    """(n, rows, columns) → the nearest matrices whose singular values are all about 1, by Newton–Schulz
    iteration.
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrices.float() if matrices.dtype == torch.float64 else matrices
    tall = x.shape[1] > x.shape[2]
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    x = x.mT if tall else x
    for _ in range(ns_steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def make_optimizers(model: nn.Module, recipe: Recipe, *, capturable: bool = False) -> list[Optimizer]:
    """The optimizers of all weights that can change. Norms, biases and the like do not decay.

    Those that will be `recorded` ask the CPU nothing.
    """
    named_params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named_params:
        raise ValueError("no weight of the model can change: all have requires_grad=False")
    is_hidden_matrix = lambda name, p: p.dim() == 2 and EMBEDDING_NAMES.isdisjoint(name.split("."))
    muon_params = [
        named_param
        for named_param in named_params
        if recipe.optimizer == "muon" and is_hidden_matrix(*named_param)
    ]
    adamw_params = [
        named_param
        for named_param in named_params
        if recipe.optimizer != "muon" or not is_hidden_matrix(*named_param)
    ]
    decay_groups = [
        ([p for _, p in adamw_params if p.dim() >= 2], recipe.weight_decay),
        ([p for _, p in adamw_params if p.dim() < 2], 0.0),
    ]
    groups = [
        {"params": parameters, "weight_decay": decay} for parameters, decay in decay_groups if parameters
    ]
    out: list[Optimizer] = []
    if groups:
        device = adamw_params[0][1].device.type
        out.append(
            AdamW(
                groups,
                lr=recipe.lr,
                betas=recipe.betas,
                eps=1e-8,
                fused=device in ("cpu", "cuda"),
                capturable=capturable,
            )
        )
    if muon_params:
        row_counts = fused_row_counts(model)
        out.append(
            Muon(
                [
                    {
                        "params": [p for _, p in muon_params],
                        "row_counts": [row_counts.get(name) for name, _ in muon_params],
                    }
                ],
                lr=recipe.lr,
                weight_decay=recipe.weight_decay,
            )
        )
    return out


def fused_row_counts(model: nn.Module) -> dict[str, list[int]]:
    """The weights that are several matrices, one on top of the other, and how many rows each of those has."""
    out: dict[str, list[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, SelfAttention):
            out[f"{name}.qkv.weight"] = module.qkv_sizes
        elif isinstance(module, CrossAttention):
            out[f"{name}.kv.weight"] = [module.kv.out_features // 2] * 2
        elif isinstance(module, FeedForwardLayer) and module.gated:
            out[f"{name}.up.weight"] = [module.up.out_features // 2] * 2
    return out


def init_state(optimizer: Optimizer, params: Iterable[Tensor] | None = None) -> None:
    """Give every weight, or only these, a memory of zeros where it has none: a saved one can then be put in
    its place.
    """
    for p in [p for group in optimizer.param_groups for p in group["params"]] if params is None else params:
        if optimizer.state[p]:
            continue
        if isinstance(optimizer, Muon):
            optimizer.state[p]["momentum"] = torch.zeros_like(p)
        else:
            device = (
                p.device if optimizer.defaults.get("fused") or optimizer.defaults.get("capturable") else "cpu"
            )
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def named_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """All that the optimizers remember, under the names of the weights:
    exp_avg/decoder.layers.0.self.qkv.weight.
    """
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{key}/{names[p]}": value
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
