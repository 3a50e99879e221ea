"""Toy data files at the very paths that a recipe names, for runs of the recipes at toy size."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import yaml

WORDS = "a small red dog runs over the green field while two old men sit by the sea and talk".split()
NUM_RECORDS = 40


def sentences(seed: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(NUM_RECORDS)]


def write_gzip(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


def write_lines(path: Path, lines: list[str]) -> None:
    write_gzip(path, "".join(f"{line}\n" for line in lines))


def write_toy_data(recipe: Path, folder: Path) -> dict[str, Any]:
    """Write the training and validation files of a recipe below a folder; returns the recipe."""
    job = yaml.safe_load(recipe.read_text("utf-8"))
    for seed, part in enumerate(("train", "valid")):
        source = sentences(seed)
        if job["task"] == "translate":
            write_lines(folder / job[part]["src"], source)
            write_lines(folder / job[part]["tgt"], [" ".join(reversed(line.split())) for line in source])
        elif job["task"] == "classify":
            rows = [f"{line}\t{int('dog' in line)}" for line in source]
            write_lines(folder / job[part], ["sentence\tlabel", *rows])
        else:
            write_lines(folder / job[part], source)
    return job
