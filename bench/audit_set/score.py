"""Audit every case: `python bench/audit_set/score.py [--budget quick] [part of a name …]`.

Prints each case that was missed, misplaced or falsely accused, and then how many leaks were found (by a
finding of a kind that the case allows) and placed (that finding names one of its modules), how many were
called clean or left unchecked, and how many honest models were accused.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from typing import Any

from prove import load


def judge(case: Any, report: Any) -> tuple[str, str]:
    """What became of a case, and the finding or the reason."""
    if not case.leaks:
        if report.verdict == "leak":
            return "false alarm", str(report.findings[0])
        return report.verdict, "; ".join(report.blocked)
    right = [finding for finding in report.findings if finding.kind in case.kinds]
    if not right:
        found = "; ".join(map(str, report.findings))
        return ("wrong kind" if found else report.verdict), found or "; ".join(report.blocked)
    placed = [finding for finding in right if finding.module in case.modules]
    if not placed:
        return "misplaced", f"{right[0].module!r} instead of {case.modules}: {right[0]}"
    return "placed", ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="audit the cases whose names contain one of these")
    parser.add_argument("--budget", default="standard")
    options = parser.parse_args()
    import torch

    import keepleft as kl
    from audit_set.case import CASES

    load()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    slowest: list[tuple[float, str]] = []
    for case in CASES:
        if options.words and not any(word in case.name for word in options.words):
            continue
        begin = time.perf_counter()
        try:
            result, note = judge(case, kl.audit(**case.build(), budget=options.budget))
        except Exception as error:
            result, note = "crash", f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - begin
        slowest.append((seconds, case.name))
        counts[case.leaks][result] += 1
        if result != ("placed" if case.leaks else "clean"):
            kind = f"leak {'/'.join(case.kinds)}" if case.leaks else "honest"
            print(f"{case.name} ({kind}) {result}, {seconds:.1f} s: {note[:400]}", flush=True)
    for leaks, name in ((True, "leaks"), (False, "honest models")):
        parts = ", ".join(f"{count} {result}" for result, count in counts[leaks].most_common())
        print(f"{counts[leaks].total()} {name}: {parts}")
    total = sum(seconds for seconds, _ in slowest)
    longest = ", ".join(f"{name} {seconds:.1f}" for seconds, name in sorted(slowest, reverse=True)[:12])
    print(f"{total:.0f} s; the longest: {longest}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
