"""Random weights with which every part of a model has an effect: freshly initialised ones have near-uniform
attention, zero biases and closed gates.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

# of recurrences and state spaces: their values have a meaning, so the initialisation of the class is kept
UNCHANGED_PARAMETERS = re.compile(
    r"(^|[._])(A_log|A|D|dt_bias|dt_proj\.bias|time_decay|time_first|time_mix\w*|recurrent_param|inv_freq)$"
)


@torch.no_grad()
def randomize_weights(model: nn.Module, seed: int) -> nn.Module:
    """Sample the weights again, in place: matrices scaled by their fan-in; norms, biases and gates near their
    initial value, but not at it.
    """
    rng = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=rng).to(weight.dtype)
        if weight.numel() == 0 or not weight.is_floating_point() or UNCHANGED_PARAMETERS.search(name):
            continue
        if weight.dim() > 1 and not weight.requires_grad:
            continue  # a table, say of rotary angles: other values would change its meaning
        if weight.dim() < 2 or "norm" in name.lower():
            if not _is_well_scaled(weight):
                weight.zero_()
            is_constant = float(weight.max() - weight.min()) < 1e-6
            if is_constant:
                weight.add_(0.2 * noise)
        else:
            std = 0.5 if id(weight) in embeddings else 1 / math.sqrt(_fan_in(model, name, weight))
            weight.copy_(std * noise)
    return model


def _is_well_scaled(weight: Tensor) -> bool:
    return bool(weight.isfinite().all()) and float(weight.abs().max()) < 1e3


def _fan_in(model: nn.Module, name: str, weight: Tensor) -> int:
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.Linear):
        return weight.shape[1]
    if type(module).__name__ == "Conv1D":  # of GPT-2: its matrix is transposed
        return weight.shape[0]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return weight[0].numel()
    return max(weight.shape[-2:])
