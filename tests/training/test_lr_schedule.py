"""Learning-rate schedules follow their formulas."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.training.lr_schedule import learning_rate
from keepleft.training.recipe import SCHEDULES, Recipe

RECIPES = st.builds(
    lambda steps, warmup, **fields: Recipe(steps=steps, warmup=min(warmup, steps), **fields),
    steps=st.integers(1, 500),
    warmup=st.integers(0, 500),
    schedule=st.sampled_from(SCHEDULES),
    min_lr_ratio=st.floats(0, 1),
    decay=st.floats(0, 1),
    lr=st.floats(1e-6, 1.0),
)


@given(st.integers(1, 4000), st.integers(1, 2048), st.integers(1, 20_000))
def test_inverse_sqrt_is_the_formula_of_2017(warmup, dim, step):
    """d_model^-0.5 · min(step^-0.5, step · warmup^-1.5), for steps counted from 1."""
    recipe = Recipe(steps=20_000, warmup=warmup, lr=(dim * warmup) ** -0.5, schedule="inverse_sqrt")
    expected = dim**-0.5 * min(step**-0.5, step * warmup**-1.5)
    assert learning_rate(recipe, step - 1) == pytest.approx(expected, rel=1e-12)


@given(RECIPES)
def test_warm_up_is_linear_to_the_peak_and_its_first_step_is_not_zero(recipe):
    for step in range(recipe.warmup):
        assert learning_rate(recipe, step) == pytest.approx(recipe.lr * (step + 1) / recipe.warmup, rel=1e-12)
        assert learning_rate(recipe, step) > 0
    assert max(learning_rate(recipe, step) for step in range(recipe.steps)) <= recipe.lr * (1 + 1e-12)


@given(RECIPES)
def test_after_the_warm_up_it_never_rises_and_ends_at_the_minimum(recipe):
    rates = [learning_rate(recipe, step) for step in range(recipe.steps)]
    after_warmup = rates[max(0, recipe.warmup - 1) :]
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(after_warmup))
    if recipe.warmup < recipe.steps:
        last_factors = {"constant": 1.0, "inverse_sqrt": math.sqrt(max(1, recipe.warmup) / recipe.steps)}
        last_factor = last_factors.get(recipe.schedule, recipe.min_lr_ratio)
        if recipe.schedule != "stable_decay" or recipe.steps * recipe.decay >= 1:
            assert rates[-1] == pytest.approx(recipe.lr * last_factor, abs=1e-12)


def test_cosine_and_linear_are_half_way_down_half_way_through():
    for schedule in ("cosine", "linear"):
        recipe = Recipe(steps=110, warmup=10, lr=1.0, min_lr_ratio=0.2, schedule=schedule)
        assert learning_rate(recipe, 10 + 50 - 1) == pytest.approx(0.6)
    recipe = Recipe(steps=110, warmup=10, lr=1.0, min_lr_ratio=0.2)
    expected = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(recipe, 10 + 25 - 1) == pytest.approx(expected)


def test_stable_decay_stays_at_the_peak_until_it_decays():
    recipe = Recipe(steps=100, warmup=10, lr=1.0, min_lr_ratio=0.0, decay=0.2, schedule="stable_decay")
    assert [learning_rate(recipe, step) for step in range(10, 80)] == [1.0] * 70
    assert [learning_rate(recipe, step) for step in range(80, 100)] == pytest.approx(
        [1 - (n + 1) / 20 for n in range(20)]
    )
