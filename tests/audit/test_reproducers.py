"""The script of a finding runs as it is printed, and shows the leak."""

from __future__ import annotations

import contextlib
import io
import math

import pytest

import keepleft as kl
from audit import test_interfaces as interfaces
from audit.planted import batch, future, packing, padding
from thinned import thinned

PLANTED = [case for room in (future, padding, packing, batch) for case in room.PLANTED]
WRITTEN_KINDS = ("future", "padding", "packing", "batch")


def shown_numbers(report, target) -> list[float]:
    """What the scripts of the findings print."""
    out = []
    for finding in report.findings:
        if finding.kind in WRITTEN_KINDS and finding.reproduce:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(finding.reproduce, {"model": target})
            out.append(float(printed.getvalue()))
    return out


@pytest.mark.parametrize("case", thinned(PLANTED, 2, lambda case: f"{case.kind}: {case.name}"))
def test_the_script_of_a_planted_leak_shows_it(case):
    target, example, *more = case.build()
    options = {**case.options, **(more[0] if more else {})}
    report = kl.audit(
        target, example, claim=kl.causal if case.claim is None else case.claim, budget="quick", **options
    )
    numbers = shown_numbers(report, target)
    assert all(number > 0 or math.isnan(number) for number in numbers), report.text()


@pytest.mark.parametrize("model", interfaces.CASES)
def test_the_script_knows_each_interface_and_is_silent_about_the_twin(model):
    example = interfaces.CASES[model]
    report = kl.audit(model(True), example, vocab=interfaces.VOCAB, budget="quick")
    numbers = shown_numbers(report, model(True))
    assert all(number > 0 for number in numbers), report.text()
    # a script cannot import the class of a batch, and has no words for labels yet
    if model not in (interfaces.DataclassBatch, interfaces.LossOfSums):
        assert numbers, report.text()
    assert all(number < 1e-6 for number in shown_numbers(report, model(False)))
