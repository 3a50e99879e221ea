"""Proofs of the audit's test set, without code of the audit: leaks leak, and honest models do not.

    python bench/audit_set/prove.py [NAME …]

Imports every module of the packages part_*, runs the proof of each case (of those whose name contains one of
the words given) and prints a table. Exit code 1 if a proof fails.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "src")]

import torch  # noqa: E402

from audit_set.case import CASES  # noqa: E402

LEAK = 1e-4  # a leak moves an output by more than this part of the largest
HONEST = 1e-9  # what float64 may lose where shapes differ


def load() -> None:
    """Import every module of every part, which registers its cases."""
    for path in sorted(HERE.glob("part_*/*.py")):
        importlib.import_module(f"audit_set.{path.parent.name}.{path.stem}")


def main(words: list[str]) -> int:
    """Run the proofs, print a table, and say how many failed."""
    torch.set_num_threads(1)
    load()
    failed, start = 0, time.perf_counter()
    chosen = [case for case in CASES if not words or any(word in case.name for word in words)]
    for case in chosen:
        size = case.prove()
        ok = size > LEAK if case.leaks else size < HONEST
        failed += not ok
        kind = ", ".join(case.kinds) if case.leaks else "honest"
        print(f"{case.name:<36} {kind:<24} {size:10.3g}  {'ok' if ok else 'FAILED'}", flush=True)
    leaking = sum(case.leaks for case in chosen)
    seconds = time.perf_counter() - start
    print(f"{leaking} leak, {len(chosen) - leaking} do not; {failed} proofs failed; {seconds:.0f} s")
    return 1 if failed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
