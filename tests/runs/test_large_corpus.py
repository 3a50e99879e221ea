"""A corpus of a gigabyte trains with little memory: it is read in chunks and memory-mapped."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest


@pytest.mark.long
def test_a_gigabyte_trains_with_flat_memory(tmp_path):
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 8))) for _ in range(20_000)]
    block = "".join(" ".join(rng.choices(words, k=14)) + ".\n" for _ in range(100_000)).encode()
    peak_megabytes = {}
    for name, size in (("small", 50_000_000), ("large", 1_000_000_000)):
        with (tmp_path / f"{name}.txt").open("wb") as file:
            while file.tell() < size:
                file.write(block)
        code = (
            "import resource, sys; from keepleft.cli import main; assert main(sys.argv[1:]) == 0; "
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
        )
        paths = ["--train", str(tmp_path / f"{name}.txt"), "--out", str(tmp_path / f"run-{name}")]
        options = "--task lm --size tiny --recipe.steps 3 --device cpu".split()
        command = [sys.executable, "-c", code, "train", *paths, *options]
        result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
        assert result.returncode == 0, result.stderr
        peak_megabytes[name] = int(result.stdout.split()[-1])
    print(peak_megabytes)
    assert peak_megabytes["large"] < peak_megabytes["small"] + 400  # the token store alone would be more
