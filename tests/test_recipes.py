"""Every recipe trains, at toy size: the options that it names still exist and are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from keepleft.cli import main
from keepleft.runs import job as jobs
from toy_corpora import write_toy_data

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
TOY_SIZE: dict[str, Any] = {
    "design": {"dim": 16, "heads": 2, "layers": 1, "width": 32},
    "batch": {"tokens": 128, "max_length": 32},
    "recipe": {"steps": 2, "warmup": 1, "eval_every": 1, "save_every": 2},
    "device": "cpu",
    "audit": False,
}


def flags(options: dict[str, Any], prefix: str = "") -> list[str]:
    """Nested options as a command line."""
    words: list[str] = []
    for name, value in options.items():
        if isinstance(value, dict):
            words += flags(value, f"{prefix}{name}.")
        elif value is False:
            words += [f"--no-{name}"]
        else:
            words += [f"--{prefix}{name.replace('_', '-')}", str(value)]
    return words


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("one_thread")
def test_a_recipe_trains_with_its_own_options_on_toy_data(recipe, tmp_path, monkeypatch):
    job = write_toy_data(recipe, tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--config", str(recipe), *flags(TOY_SIZE)]) == 0
    out = tmp_path / job["out"]
    assert (out / "model" / "model.safetensors").exists()
    for name, value in TOY_SIZE.items():
        job[name] = {**job.get(name, {}), **value} if isinstance(value, dict) else value
    expected = jobs.from_yaml(yaml.safe_dump(job), recipe.name)
    assert jobs.from_yaml((out / "config.yaml").read_text("utf-8")) == expected
