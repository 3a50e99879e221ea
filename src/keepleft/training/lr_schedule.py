"""Learning-rate schedules, each after a linear warm-up.

constant, cosine, linear, inverse_sqrt (Vaswani et al. 2017), stable_decay (warmup-stable-decay, WSD)
"""

from __future__ import annotations

import math

from keepleft.training.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    return recipe.lr * lr_factor(recipe, step)


def lr_factor(recipe: Recipe, step: int) -> float:
    """The learning rate of a step as a fraction of `recipe.lr`."""
    if step < recipe.warmup:
        return (step + 1) / recipe.warmup
    progress = min(1.0, (step + 1 - recipe.warmup) / max(1, recipe.steps - recipe.warmup))
    decay_range = 1.0 - recipe.min_lr_ratio
    match recipe.schedule:
        case "inverse_sqrt":
            return math.sqrt(max(1, recipe.warmup) / (step + 1))
        case "cosine":
            return recipe.min_lr_ratio + decay_range * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            return 1.0 - decay_range * progress
        case "stable_decay":
            decay_start = recipe.steps * (1.0 - recipe.decay)
            decay_progress = (step + 1 - decay_start) / max(1e-9, recipe.steps * recipe.decay)
            return 1.0 - decay_range * min(1.0, max(0.0, decay_progress))
    return 1.0
