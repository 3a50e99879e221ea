"""Random weights that make every path matter: fresh models have near-uniform attention, no biases and closed
gates.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn

# recurrences and state spaces: these have a meaning, and what the class itself draws is sensible
UNCHANGED_PARAMETERS = re.compile(
    r"(^|[._])(A_log|A|D|dt_bias|dt_proj\.bias|time_decay|time_first|time_mix\w*|recurrent_param|inv_freq)$"
)


@torch.no_grad()
def randomize_weights(model: nn.Module, seed: int) -> nn.Module:
    """The same model, its weights drawn again: matrices by their fan-in, norms near 1, biases and gates
    awake.
    """
    rng = torch.Generator().manual_seed(seed)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=rng).to(weight.dtype)
        if weight.numel() == 0 or not weight.is_floating_point() or UNCHANGED_PARAMETERS.search(name):
            continue
        if weight.dim() < 2 or "norm" in name.lower():
            if not _is_well_scaled(weight):
                weight.zero_()
            if (
                float(weight.max() - weight.min()) < 1e-6
            ):  # norms, biases, gates: around the constant that they begin with
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
    if type(module).__name__ == "Conv1D":  # as GPT-2 has it: a matrix the other way round
        return weight.shape[0]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return weight[0].numel()
    return max(weight.shape[-2:])
