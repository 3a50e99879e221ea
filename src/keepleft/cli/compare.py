"""keepleft compare"""

from __future__ import annotations

import json as json_format
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from keepleft.demo.masking import ExperimentResult, TrainedSide

Item = TypeVar("Item")


def compare(
    lengths: tuple[int, ...] = (16, 64, 128, 300),
    steps: int = 400,
    out: str = "out/compare",
    json: bool = False,
) -> int:
    """Measure what the causal mask does: one pass against a loop over tokens, and training without the mask.

    It takes a minute or two.

    Args:
        lengths: target lengths at which the gradients of one pass and of the loop are compared
        steps: training steps of each of the two models
        out: the folder for compare.json and the plots
        json: print all numbers as JSON instead of text
    """
    from pathlib import Path

    import torch

    from keepleft import checks
    from keepleft.demo.masking import save

    checks.check_int("steps", steps)
    if not lengths:
        raise ValueError("there is no length to compare at: give some, such as --lengths 16 64")
    Path(out).mkdir(parents=True, exist_ok=True)  # fail before the work if the folder cannot be made
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model gains little from more, and loses much where cores are busy
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

    matches = list(_with_progress("gradients", match_gradients(lengths), len(lengths)))
    control = next(match_gradients([CONTROL_LENGTH], mask=full, measure_time=False))
    phrases = PhraseData()
    sides = []
    for name, mask in (("with the mask", causal), ("without it", full)):
        trial = MaskTrial(mask, phrases, steps)
        for _ in _with_progress(name, trial.train(), trial.num_reports):
            pass
        sides.append(trial.examine())
    return ExperimentResult(matches, control, masked=sides[0], unmasked=sides[1])


def _print_gradients(result: ExperimentResult) -> None:
    from keepleft.cli.demo import print_heading

    print_heading("1. One masked pass and the step-by-step loop: the same gradients")
    print(
        "Times: forward and backward, float32, one thread. "
        "Differences: the largest of all gradients, relative, float64."
    )
    loops = list(result.control.difference)
    columns = "".join(f"{loop:>20}{'times':>8}{'difference':>12}" for loop in loops)
    print(f"{'target':>8}{'one pass':>12}{columns}")
    for row in result.matches:
        columns = "".join(
            f"{row.seconds[loop] * 1000:17.1f} ms{row.ratio[loop]:8.1f}{row.difference[loop]:12.1e}"
            for loop in loops
        )
        print(f"{row.length:8}{row.seconds['one pass'] * 1000:9.1f} ms{columns}")
    differences = " and ".join(f"{value:.2g} ({loop})" for loop, value in result.control.difference.items())
    print(
        f"Without the mask, at length {result.control.length}, the difference is {differences}: "
        "then one pass learns something else."
    )


def _print_training(result: ExperimentResult) -> None:
    from keepleft.cli.demo import print_heading
    from keepleft.demo.masking import EMPTY_OUTPUT

    print_heading("2. The same model, data and seed, with the mask and without it")
    sides = {"with the mask": result.masked, "without it": result.unmasked}
    print(f"{'':44}" + "".join(f"{name:>16}" for name in sides))
    rows: list[tuple[str, Callable[[TrainedSide], str]]] = [
        ("mask of the decoder", lambda side: side.mask),
        ("faults of this mask over 4 positions", lambda side: str(len(side.faults))),
        ("training loss at the end", lambda side: f"{side.curve[-1][1]:.4f}"),
        ("held out, teacher forcing: loss", lambda side: f"{side.loss:.4f}"),
        ("held out, teacher forcing: tokens right", lambda side: f"{side.accuracy:.1%}"),
        ("held out, future cut off: tokens right", lambda side: f"{side.honest:.1%}"),
        ("held out, generated: words right", lambda side: f"{side.words:.1%}"),
        ("held out, generated: sentences right", lambda side: f"{side.exact:.1%}"),
    ]
    for label, value in rows:
        print(f"{label:44}" + "".join(f"{value(side):>16}" for side in sides.values()))
    for masked, unmasked in zip(result.masked.samples, result.unmasked.samples, strict=True):
        print(f"\n  English        {masked['english']}\n  French         {masked['french']}")
        print(f"  with the mask  {masked['written'] or EMPTY_OUTPUT}")
        print(f"  without it     {unmasked['written'] or EMPTY_OUTPUT}")
    print(f"\n{result.masked.seen}\n{result.unmasked.seen}")


def _verdict(result: ExperimentResult) -> str:
    gradients = (
        "One masked pass gives the gradients of the loop"
        if result.gradients_equal
        else "The gradients of one masked pass are NOT those of the loop"
    )
    comparison = f"{result.masked.exact:.1%} of the sentences right against {result.unmasked.exact:.1%}"
    if result.mask_needed:
        return f"{gradients}; the model with the mask generates better text: {comparison}."
    if result.too_few_steps:
        return (
            f"{gradients}; so few steps do not yet show which model generates better text ({comparison}): "
            "leave --steps out to see."
        )
    return f"{gradients}; the model with the mask does NOT generate better text, {comparison}."


def _with_progress(name: str, items: Iterable[Item], total: int) -> Iterator[Item]:
    """Pass the items on, with a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, f"{name:14}", total, console=Console(stderr=True), transient=True)
