"""keepleft compare"""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepleft.demo.masking import ExperimentResult


def compare(
    lengths: tuple[int, ...] = (16, 64, 128, 300),
    steps: int = 400,
    out: str = "out/compare",
    json: bool = False,
) -> int:
    """Measure what the mask is for: gradients of one pass and of the loop, and training with the mask and
    without.

    Args:
        lengths: target lengths at which one pass and the loop are compared
        steps: training steps of each of the two models
        out: where compare.json and the pictures go
        json: print all numbers as JSON instead of text

    """
    from pathlib import Path

    import torch

    from keepleft import checks
    from keepleft.demo.masking import save

    checks.check_int("steps", steps)
    if not lengths:
        raise ValueError("there is no length to compare at: give some, such as --lengths 16 64")
    Path(out).mkdir(parents=True, exist_ok=True)  # if that cannot be, let it be known before the work
    threads = torch.get_num_threads()
    # so small a model gains little by more, and loses much where others want them too
    torch.set_num_threads(1)
    try:
        result = _run_experiment(lengths, steps)
    finally:
        torch.set_num_threads(threads)
    files = save(result, Path(out))
    if json:
        json_format.dump(result.to_dict(), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        _print_gradients(result)
        _print_training(result)
        print(f"\n{_verdict(result)}\nWritten: {', '.join(map(str, files))}")
    return 0 if result.ok else 1


def _run_experiment(lengths: Sequence[int], steps: int) -> ExperimentResult:
    from keepleft.attention.masks import causal, full
    from keepleft.demo.masking import CONTROL_LENGTH, ExperimentResult, MaskTrial, PhraseData, match_gradients

    rows = list(_with_progress("gradients", match_gradients(lengths), len(lengths)))
    control = next(match_gradients([CONTROL_LENGTH], mask=full, measure_time=False))
    phrases, results = PhraseData(), []
    for name, mask in (("with the mask", causal), ("without it", full)):
        trial = MaskTrial(mask, phrases, steps)
        for _ in _with_progress(name, trial.train(), trial.num_reports):
            pass
        results.append(trial.examine())
    return ExperimentResult(rows, control, masked=results[0], unmasked=results[1])


def _print_gradients(result: ExperimentResult) -> None:
    from keepleft.cli.demo import heading

    heading("1. One masked pass and the step-by-step loop: the same gradients")
    print(
        "Times: forward and backward, float32, one thread. Differences: the largest of all gradients, relative, float64."
    )
    loops = list(result.control.difference)
    print(
        f"{'target':>8}{'one pass':>12}"
        + "".join(f"{loop:>20}{'times':>8}{'difference':>12}" for loop in loops)
    )
    for row in result.matches:
        print(
            f"{row.length:8}{row.seconds['one pass'] * 1000:9.1f} ms"
            + "".join(
                f"{row.seconds[loop] * 1000:17.1f} ms{row.ratio[loop]:8.1f}{row.difference[loop]:12.1e}"
                for loop in loops
            )
        )
    print(
        f"Without the mask, at length {result.control.length}, the difference is "
        + " and ".join(f"{value:.2g} ({loop})" for loop, value in result.control.difference.items())
        + ": then one pass learns something else."
    )


def _print_training(result: ExperimentResult) -> None:
    from keepleft.cli.demo import heading
    from keepleft.demo.masking import EMPTY_OUTPUT

    heading("2. The same model, data and seed, with the mask and without it")
    sides = {"with the mask": result.masked, "without it": result.unmasked}
    print(f"{'':44}" + "".join(f"{name:>16}" for name in sides))
    for text, value in (
        ("mask of the decoder", lambda side: side.mask),
        ("faults of this mask over 4 positions", lambda side: str(len(side.faults))),
        ("training loss at the end", lambda side: f"{side.curve[-1][1]:.4f}"),
        ("held out, as in training: loss", lambda side: f"{side.loss:.4f}"),
        ("held out, as in training: tokens right", lambda side: f"{side.accuracy:.1%}"),
        ("held out, future cut off: tokens right", lambda side: f"{side.honest:.1%}"),
        ("held out, written alone: words right", lambda side: f"{side.words:.1%}"),
        ("held out, written alone: sentences right", lambda side: f"{side.exact:.1%}"),
    ):
        print(f"{text:44}" + "".join(f"{value(side):>16}" for side in sides.values()))
    for masked, unmasked in zip(result.masked.samples, result.unmasked.samples, strict=True):
        print(f"\n  English        {masked['english']}\n  French         {masked['french']}")
        print(
            f"  with the mask  {masked['written'] or EMPTY_OUTPUT}\n  without it     {unmasked['written'] or EMPTY_OUTPUT}"
        )
    print(f"\n{result.masked.seen}\n{result.unmasked.seen}")


def _verdict(result: ExperimentResult) -> str:
    equal = (
        "One masked pass gives the gradients of the loop"
        if result.gradients_equal
        else "The gradients of one masked pass are NOT those of the loop"
    )
    comparison = f"{result.masked.exact:.1%} of the sentences right against {result.unmasked.exact:.1%}"
    if result.mask_needed:
        return f"{equal}; the model with the mask writes better: {comparison}."
    if result.too_few_steps:
        return f"{equal}; which model writes better, so few steps do not say yet ({comparison}): leave --steps out to see."
    return f"{equal}; the model with the mask does NOT write better, {comparison}."


def _with_progress(name: str, items: Iterable[Any], total: int) -> Iterator[Any]:
    """The same, with a bar on stderr while it lasts if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, f"{name:14}", total, console=Console(stderr=True), transient=True)
