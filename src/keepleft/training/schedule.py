"""The learning rate at each step, as a share of its peak."""

from __future__ import annotations

import math

from keepleft.training.recipe import Recipe


def rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    return recipe.peak * share(recipe, step)


def share(recipe: Recipe, step: int) -> float:
    """Straight up through the warm-up, then as the schedule says."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    gone = min(1.0, (step + 1 - recipe.warmup) / max(1, recipe.steps - recipe.warmup))
    fall = 1.0 - recipe.floor
    match recipe.schedule:
        case "inverse_sqrt":
            return math.sqrt(max(1, recipe.warmup) / (step + 1))
        case "cosine":
            return recipe.floor + fall * 0.5 * (1.0 + math.cos(math.pi * gone))
        case "linear":
            return 1.0 - fall * gone
        case "stable_decay":
            left = max(0.0, (step + 1 - recipe.steps * (1.0 - recipe.decay)) / max(1e-9, recipe.steps * recipe.decay))
            return 1.0 - fall * min(1.0, left)
    return 1.0
