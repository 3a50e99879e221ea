"""The option table says in words what the code does."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

import pytest

from keepleft.cli.command_table import find_command
from keepleft.cli.option_table import (
    DESIGN_OPTIONS,
    RECIPE_DEFAULTS,
    Option,
    command_options,
    describe_command,
    group_options,
    join_words,
    make_option,
    spell_flags,
)
from keepleft.cli.value_checks import RANGES
from keepleft.models.design import Design
from keepleft.runs import defaults
from keepleft.runs.job import RecipeOverrides, TrainJob
from keepleft.training.recipe import Recipe


def options_of(name: str) -> dict[str, Option]:
    return {option.key: option for option in command_options(find_command(name))}


@pytest.mark.parametrize(
    ("hint", "default", "metavar", "takes", "default_text"),
    [
        (int, 3, "N", "a whole number", "3"),
        (float | None, None, "X", "a number", ""),
        (float, 30.0, "X", "a number", "30"),
        (bool, False, "", "", ""),
        (bool | None, None, "true|false", "true or false", ""),
        (Literal["a", "b", "c"], "a", "a|b|c", "a, b or c", "a"),
        (Literal["adagrad", "momentum", "newton"], None, "KIND", "adagrad, momentum or newton", ""),
        (bool | Literal["never"] | None, None, "true|false|never", "true, false or never", ""),
        (str | list[str] | None, None, "KIND", 'a text, or several as in \'["a", "b"]\'', ""),
        (int | list[int] | None, None, "N", "a whole number, or several as in '[1, 2]'", ""),
        (tuple[int, ...], (16, 64), "N ...", "whole numbers, separated by spaces", "16 64"),
        (dict[int, float] | None, None, "MAP", "whole numbers with values, as in '{50: -1.5}'", ""),
    ],
)
def test_types_are_told_in_words(hint, default, metavar, takes, default_text):
    option = make_option("some_kind", hint, default, "a sentence")
    assert (option.metavar, option.takes, option.default) == (metavar, takes, default_text)


def test_help_shows_the_first_sentence():
    option = options_of("train")["out"]
    assert option.summary == "the run directory (default: runs/TASK)"
    assert option.help.startswith(f"{option.summary}. --resume finds")


def test_names_of_fields_are_spelled_as_options():
    names = {"save_every", "top_k"}
    assert spell_flags("those of save_every, or of others_here", names, "recipe.") == (
        "those of --recipe.save-every, or of others_here"
    )
    assert join_words(["a"]) == "a"
    assert join_words([]) == ""


def test_options_of_a_row_come_first_under_its_titles():
    command = find_command("generate")
    groups = group_options(command, command_options(command), common_only=False)
    assert list(groups)[: len(command.options)] == list(command.options)
    lengths = [option.key for option in groups["Length"]]
    assert lengths[:2] == command.options["Length"].split()
    assert "min_new_tokens" in lengths


def test_a_description_is_that_of_the_docstring():
    first, *_ = describe_command(find_command("doctor"))
    assert first.startswith("Report what this machine has")


def make_job(task: str, size: str = "small", **changes) -> TrainJob:
    return TrainJob(task=task, train="a.txt", size=size, recipe=RecipeOverrides(**changes))


def test_defaults_of_the_recipe_are_those_that_a_job_gets():
    plain = Recipe()
    jobs = [make_job(task, size) for task in ("lm", "translate", "classify") for size in ("tiny", "base")]
    recipes = [defaults.recipe(job, targets, 100) for job in jobs for targets in (10_000, 10_000_000)]
    chosen = {
        f.name for f in fields(Recipe) if any(getattr(r, f.name) != getattr(plain, f.name) for r in recipes)
    }
    assert chosen == set(RECIPE_DEFAULTS)
    for steps in (500, 3000, 3001):
        recipe = defaults.recipe(make_job("lm", steps=steps), 10_000, 100)
        assert recipe.warmup == recipe.eval_every == recipe.save_every == steps // 10
        assert recipe.ema_decay == (0.999 if steps > 3000 else 0.99)
    assert defaults.recipe(make_job("translate"), 10_000, 100).label_smoothing == 0.1
    assert defaults.recipe(make_job("lm"), 10_000, 100).label_smoothing == 0


def test_every_design_option_is_a_field_that_a_job_may_set():
    examples = {
        "dim": 48,
        "layers": 2,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "width": 96,
        "activation": "relu",
        "dropout": 0.2,
        "attention_dropout": 0.1,
        "token_types": 2,
    }
    for name, (field_type, _) in DESIGN_OPTIONS.items():
        value = examples.get(name, True)
        assert isinstance(value, field_type)
        job = TrainJob(task="translate", train="a.tsv", design={"dim": 64, "heads": 2, name: value})
        assert defaults.design(job, 100, None, 16, labels=2, targets=1000) is not None
    by_the_data = {"vocab", "source_vocab"}
    plain_fields = {f.name for f in fields(Design) if str(f.type).split(" ")[0] in ("int", "float", "bool")}
    assert plain_fields - by_the_data <= set(DESIGN_OPTIONS)


def test_every_checked_value_is_an_option():
    for name in RANGES:
        command, _, key = name.rpartition(" ")
        commands = [command] if command else ["translate", "serve", "fill"]
        assert any(key in options_of(name) for name in commands), name
