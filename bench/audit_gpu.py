"""No false alarm on a GPU, where kernels are not deterministic: honest models in bfloat16 and float32; leaks
are found.

python bench/audit_gpu.py [--part 0/8]
"""

from __future__ import annotations

import platform
import sys
import time

import torch

import keepleft as kl

HONEST = ("gpt2", "llama", "vaswani", "t5", "bart", "bert")


def main() -> None:
    sys.path.insert(0, "tests")
    part, parts = map(int, (sys.argv[2] if len(sys.argv) > 2 else "0/1").split("/"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
    print(f"{time.strftime('%Y-%m-%d')}, {name}, torch {torch.__version__}")
    print(f"{'model':44} {'dtype':10} verdict     calls  seconds")
    wrong = 0
    for dtype in (torch.float32, torch.bfloat16):
        for preset in HONEST[part::parts]:
            model = kl.build(
                kl.presets.small(getattr(kl.presets, preset)), generator=torch.Generator().manual_seed(0)
            )
            claim = kl.full if preset == "bert" else kl.causal
            wrong += shown(f"ours, {preset}", model.to(device, dtype), dtype, claim, "clean")
    from audit.honest import peers, plain
    from audit.planted import future

    for dtype in (torch.float32, torch.bfloat16):
        rounding = [case for case in plain.HONEST if "experts" in case.name or "fft" in case.name]
        for case in [*peers.HONEST, *rounding][part::parts]:
            target, example, *more = case.build()
            if isinstance(target, torch.nn.Module):
                wrong += shown(
                    case.name,
                    target.to(device, dtype),
                    dtype,
                    claimed(case),
                    "clean",
                    example,
                    **case.options,
                    **(more[0] if more else {}),
                )
    for case in future.PLANTED[part::parts]:
        target, example, *more = case.build()
        if isinstance(target, torch.nn.Module):
            wrong += shown(
                f"planted: {case.name}", target.to(device), torch.float32, claimed(case), "leak", example
            )
    print(f"{wrong} verdicts are not as they should be")


def claimed(case):
    return kl.causal if case.claim is None else case.claim


def shown(name, model, dtype, claim, wanted, example=None, **options) -> int:
    try:
        report = kl.audit(model, example, claim=claim, budget="quick", **options)
    except Exception as error:
        print(f"{name:44} {str(dtype)[6:]:10} {type(error).__name__}: {error}")
        return 1
    bad = report.verdict != wanted
    print(
        f"{name:44} {str(dtype)[6:]:10} {report.verdict:10} {report.calls:6} {report.seconds:8.1f}"
        + (
            f"  <- {[str(finding) + ' | ' + finding.path for finding in report.findings] or report.blocked}"
            if bad
            else ""
        ),
        flush=True,
    )
    return int(bad)


if __name__ == "__main__":
    main()
