"""Verdicts of the audit on a GPU, whose kernels are not deterministic: no false alarm, planted leaks found.

Honest models in float32 and bfloat16, then models of the tests with leaks planted in them.

python bench/audit_gpu.py [--part 0/8]
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import torch

import keepleft as kl
from command_line import add_device, make_parser, parse_arguments
from report import environment, write_json

HONEST_PRESETS = ("gpt2", "llama", "vaswani", "t5", "bart", "bert")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Case(NamedTuple):
    name: str
    model: torch.nn.Module
    dtype: torch.dtype
    claim: Any
    expected: str  # verdict
    example: Any = None
    options: dict[str, Any] = {}


def preset_cases(select: slice, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    for dtype in dtypes:
        for preset in HONEST_PRESETS[select]:
            design = kl.presets.small(getattr(kl.presets, preset))
            model = kl.build(design, generator=torch.Generator().manual_seed(0))
            yield Case(
                f"keepleft, {preset}", model, dtype, kl.full if preset == "bert" else kl.causal, "clean"
            )


def cases_of_the_tests(select: slice, dtypes: Sequence[torch.dtype]) -> Iterator[Case]:
    """The models of tests/audit: those of other libraries, those that round, those with planted leaks."""
    from audit.honest import peers, plain
    from audit.planted import future

    rounding = [case for case in plain.HONEST if "experts" in case.name or "fft" in case.name]
    for dtype in dtypes:
        for case in [*peers.HONEST, *rounding][select]:
            target, example, *more = case.build()
            if isinstance(target, torch.nn.Module):
                options = {**case.options, **(more[0] if more else {})}
                yield Case(
                    case.name,
                    target,
                    dtype,
                    kl.causal if case.claim is None else case.claim,
                    "clean",
                    example,
                    options,
                )
    for case in future.PLANTED[select]:
        target, example, *_ = case.build()
        if isinstance(target, torch.nn.Module):
            claim = kl.causal if case.claim is None else case.claim
            yield Case(f"planted: {case.name}", target, torch.float32, claim, "leak", example)


def audit_case(case: Case, device: str, smoke: bool) -> dict[str, Any]:
    """A row with the verdict. An error is a verdict too; in a smoke run it is raised."""
    row: dict[str, Any] = {"model": case.name, "dtype": str(case.dtype).removeprefix("torch.")}
    try:
        model = case.model.to(device, case.dtype)
        report = kl.audit(model, case.example, claim=case.claim, budget="quick", **case.options)
    except Exception as error:
        if smoke:
            raise
        return row | {"verdict": f"{type(error).__name__}: {error}", "as expected": False}
    row |= {"verdict": report.verdict, "calls": report.calls, "seconds": round(report.seconds, 1)}
    row["as expected"] = report.verdict == case.expected
    if not row["as expected"]:
        row["findings"] = [f"{finding} | {finding.path}" for finding in report.findings] or report.blocked
    return row


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--part", default="0/1", metavar="N/OF", help="every OF-th model, from the N-th on")
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    options = parse_arguments(parser, argv, part="0/100", dtypes=["float32"])
    part, parts = map(int, options.part.split("/"))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}")
    print(f"{'model':44} {'dtype':10} {'verdict':10} {'calls':>6} {'seconds':>8}")
    select = slice(part, None, parts)
    dtypes = [DTYPES[name] for name in options.dtypes]
    rows = []
    for cases in (preset_cases(select, dtypes), cases_of_the_tests(select, dtypes)):
        for case in cases:
            row = audit_case(case, device, options.smoke)
            rows.append(row)
            problem = (
                "" if row["as expected"] else f"  <- expected {case.expected}: {row.get('findings', '')}"
            )
            print(
                f"{row['model']:44} {row['dtype']:10} {row['verdict']:10} {row.get('calls', ''):>6} "
                f"{row.get('seconds', ''):>8}{problem}",
                flush=True,
            )
    unexpected = sum(not row["as expected"] for row in rows)
    print(f"{unexpected} unexpected verdicts")
    write_json(options.json, {"environment": environment(), "rows": rows})
    return 1 if unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
