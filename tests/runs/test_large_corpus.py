"""A corpus of a gigabyte trains with little memory: it is read in pieces and mapped, never held."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_gigabyte_trains_with_flat_memory(tmp_path):
    chance = random.Random(0)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 8))) for _ in range(20_000)]
    block = "".join(" ".join(chance.choices(words, k=14)) + ".\n" for _ in range(100_000)).encode()
    most = {}
    for name, size in (("small", 50_000_000), ("large", 1_000_000_000)):
        with (tmp_path / f"{name}.txt").open("wb") as file:
            while file.tell() < size:
                file.write(block)
        code = (
            "import resource, sys; from keepleft.cli import main; assert main(sys.argv[1:]) == 0; "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
        )
        arguments = [
            "train",
            "--task",
            "lm",
            "--train",
            str(tmp_path / f"{name}.txt"),
            "--out",
            str(tmp_path / f"run-{name}"),
            "--size",
            "tiny",
            "--recipe.steps",
            "3",
            "--device",
            "cpu",
        ]
        ran = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        most[name] = int(ran.stdout.split()[-1])
    print(most)
    assert most["large"] < most["small"] + 400, most  # megabytes; the store alone would be more
