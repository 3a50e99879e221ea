"""Optimizers: AdamW, or Muon for the matrices inside the layers and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from keepleft.nn.attention import CrossAttention, SelfAttention
from keepleft.nn.feedforward import FeedForwardLayer
from keepleft.training.recipe import Recipe

# modules whose matrices are tables or outputs, not maps between hidden states: AdamW trains them
EMBEDDING_NAMES = {"token", "source_token", "embed", "source_embed", "head", "nearness"}


class Muon(Optimizer):
    """Orthogonalized momentum (Jordan et al. 2024): all singular directions of a matrix learn equally fast.

    Matrices of one shape are processed together. Where a weight fuses several matrices, such as queries, keys
    and values, the group's `row_counts` lists the rows of each; None where it is one matrix.
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
            nesterov = torch._foreach_lerp(gradients, momenta, group["momentum"])
            updates = [
                piece
                for update, (_, rows) in zip(nesterov, params_and_rows, strict=True)
                for piece in update.split(rows)
            ]
            by_shape: dict[torch.Size, list[int]] = {}
            for n, piece in enumerate(updates):
                by_shape.setdefault(piece.shape, []).append(n)
            for shape, indices in by_shape.items():
                scale = 0.2 * max(shape) ** 0.5  # updates as large as AdamW's: one learning rate serves both
                dtype = torch.bfloat16 if nesterov[0].is_cuda else None
                stack = nesterov[0].new_empty((len(indices), *shape), dtype=dtype)
                torch._foreach_copy_(list(stack), [updates[n] for n in indices])
                orthogonalized = newton_schulz(stack, group["ns_steps"]).to(nesterov[0].dtype)
                orthogonalized *= -group["lr"] * scale  # lr is a tensor where a CUDA graph reads it
                for n, piece in zip(indices, orthogonalized, strict=True):
                    updates[n] = piece
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_([piece for p, rows in params_and_rows for piece in p.split(rows)], updates)


def newton_schulz(matrices: Tensor, ns_steps: int = 5) -> Tensor:
    """(n, rows, columns) → the nearest matrices with singular values near 1, by Newton–Schulz iteration."""
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
    """The optimizers of all trainable weights. Weights of one dimension (norms, biases) have no weight decay.

    If `capturable`, a CUDA graph can capture their steps. Raises ValueError if no weight is trainable.
    """
    named_params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named_params:
        raise ValueError("no weight of the model can change: all have requires_grad=False")
    muon_params: list[tuple[str, nn.Parameter]] = []
    adamw_params: list[nn.Parameter] = []
    for name, p in named_params:
        is_hidden_matrix = p.dim() == 2 and EMBEDDING_NAMES.isdisjoint(name.split("."))
        if recipe.optimizer == "muon" and is_hidden_matrix:
            muon_params.append((name, p))
        else:
            adamw_params.append(p)
    out: list[Optimizer] = []
    if adamw_params:
        groups = [
            {"params": [p for p in adamw_params if p.dim() >= 2], "weight_decay": recipe.weight_decay},
            {"params": [p for p in adamw_params if p.dim() < 2], "weight_decay": 0.0},
        ]
        adamw = AdamW(
            [group for group in groups if group["params"]],
            lr=recipe.lr,
            betas=recipe.betas,
            eps=1e-8,
            fused=adamw_params[0].device.type in ("cpu", "cuda"),
            capturable=capturable,
        )
        out.append(adamw)
    if muon_params:
        row_counts = fused_row_counts(model)
        muon_group = {
            "params": [p for _, p in muon_params],
            "row_counts": [row_counts.get(name) for name, _ in muon_params],
        }
        out.append(Muon([muon_group], lr=recipe.lr, weight_decay=recipe.weight_decay))
    return out


def fused_row_counts(model: nn.Module) -> dict[str, list[int]]:
    """The weights that fuse several matrices (QKV, KV, gated feed-forward), and the rows of each matrix."""
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
    """Create the optimizer state of all weights, or of `params`, as zeros where there is none yet.

    It is what the first step would create; a checkpoint can then be loaded into it.
    """
    if params is None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        if optimizer.state[p]:
            continue
        if isinstance(optimizer, Muon):
            optimizer.state[p]["momentum"] = torch.zeros_like(p)
        else:
            step_on_device = optimizer.defaults.get("fused") or optimizer.defaults.get("capturable")
            step_device = p.device if step_on_device else "cpu"
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=step_device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def named_state(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Tensor]:
    """The state tensors of the optimizers by weight name, as in exp_avg/decoder.layers.0.self.qkv.weight."""
    names: dict[Any, str] = {p: name for name, p in model.named_parameters()}
    return {
        f"{key}/{names[p]}": value
        for optimizer in optimizers
        for p, state in optimizer.state.items()
        for key, value in state.items()
    }
