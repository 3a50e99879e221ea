"""Run the proofs of all cases: `python bench/audit_set/prove.py [part of a name …]`. Exits 1 if one fails."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]

LEAK, HONEST = 1e-4, 1e-9


def load() -> None:
    """Import every part, so that its cases are registered."""
    for part in sorted(HERE.glob("part_*")):
        package = importlib.import_module(f"audit_set.{part.name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"audit_set.{part.name}.{module.name}")


def main(words: list[str]) -> int:
    """Prove the cases whose names contain one of the words, or all; the number of failures, at most 1."""
    import torch

    from audit_set.case import CASES

    torch.set_num_threads(1)
    load()
    failed, start = 0, time.perf_counter()
    for case in CASES:
        if words and not any(word in case.name for word in words):
            continue
        begin = time.perf_counter()
        try:
            size, note = case.prove(), ""
        except Exception as error:
            size, note = float("nan"), f"{type(error).__name__}: {error}"
        ok = size > LEAK if case.leaks else size <= HONEST
        failed += not ok
        seconds = time.perf_counter() - begin
        word = "leaks" if case.leaks else "honest"
        print(
            f"{case.name:36} {word:7} {size:10.3g} {seconds:6.1f} s  {'ok' if ok else 'FAILED'} {note}",
            flush=True,
        )
    leaks = sum(case.leaks for case in CASES)
    print(f"{len(CASES)} cases, {leaks} leak; {failed} failed; {time.perf_counter() - start:.0f} s")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
