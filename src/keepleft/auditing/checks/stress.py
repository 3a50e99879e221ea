"""A mask of finite numbers holds until a score beats it, and a rescue looks everywhere: scores and inputs
made large, inputs poisoned. All cuts at once, one in each row; what moves is looked at again in a row by
itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keepleft.auditing import interventions, localize, rounding
from keepleft.auditing.checks import findings
from keepleft.auditing.checks.perturbations import Perturbation, perturb, sampled_perturbations
from keepleft.auditing.code_paths import HALF_DTYPES, CodePath
from keepleft.auditing.model_adapter import Inputs
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession


def magnitude_probe(session: AuditSession, path: CodePath) -> None:
    """A mask of finite numbers holds until a score beats it: so scores are made large, and so is what comes
    in.
    """
    length = session.adapter.length
    if session.adapter.dtype in HALF_DTYPES:
        path = path.but(dtype=torch.float32)  # half precision rounds as soon as scores are large
    for sign in (1.0, -1.0):
        _check_magnitude(session, path, length, "large scores", sign)
    _check_magnitude(session, path, length, "large inputs", None)


def _check_magnitude(
    session: AuditSession, path: CodePath, length: int, name: str, sign: float | None
) -> None:
    """Large scores of either sign, or large inputs where there is none."""
    adapter = session.adapter
    if session.quantized or session.out_of_time or session.has_finding("future"):
        return
    base = adapter.make_inputs(1, length, seed=length + 2)

    def run_pair(perturbations: list[Perturbation]) -> _StressPair | None:
        """Without and with what is hidden changed, under strain."""
        if sign is None:
            return _poisoned_pair(session, path, base, perturbations, None)
        repeated = _repeat_row(base, len(perturbations))
        amplifier = interventions.ScoreAmplifier(length, sign)
        new = repeated.but(
            tokens=torch.cat([perturb(session, base.tokens, perturbation) for perturbation in perturbations])
        )
        with amplifier.mode():
            base_output = adapter.run(repeated, path)
        if not amplifier.factors:
            session.note("no attention scores were seen, so no large ones were tried")
            return None
        with amplifier.mode():
            return _StressPair(repeated, new, base_output, adapter.run(new, path), amplifier, None)

    with session.skip_on_error(f"future under {name}"), adapter.on_path(path):
        leak = _strongest_leak(session, path, run_pair, 1e-6)
        if leak is None:
            return
        location, line = leak.locate(session, path)
        explanation = (
            f"once scores reach {interventions.AMPLIFIED_SCORE:g}, its mask of finite numbers no longer "
            "hides it; fill with -inf, or use a "
            "boolean mask"
            if sign
            else f"once inputs reach {interventions.INPUT_SCALE:g}; "
            + findings.remedy("future", location.module_kind)
        )
        session.add_finding(
            Finding(
                "future",
                leak.reader,
                leak.source,
                leak.size,
                f"{session.record_path(path, 1, length)}, {name}",
                location.module,
                f"position {leak.reader} reads position {leak.source}, out of its sight, through "
                f"{location.module or adapter.name} {explanation}.",
                "magnitude",
                line,
                leak.reproducer(session, path),
            ),
            "magnitude",
        )


@dataclass(frozen=True)
class _StressPair:
    """Two calls under strain, and what they gave."""

    base: Inputs
    new: Inputs
    base_output: Tensor
    new_output: Tensor
    amplifier: interventions.ScoreAmplifier | None
    hook: interventions.Hook | None  # what was done to the vectors of the second
    reader: int = 0  # who moves, once that is known; who moves it, and by how much
    source: int = 0
    size: float = 0.0

    def locate(self, session: AuditSession, path: CodePath) -> tuple[localize.Location, str]:
        adapter, hooked_inputs = session.adapter, ((self.base, None), (self.new, self.hook))
        first, second = (
            findings.make_probe(
                session,
                path,
                inputs,
                0,
                self.reader,
                interventions.stressed_run(adapter, inputs, path, self.amplifier, hook),
            )
            for inputs, hook in hooked_inputs
        )
        return findings.locate(session, first, second)

    def reproducer(self, session: AuditSession, path: CodePath) -> str:
        return findings.reproducer(session, path, self.base, self.new, 0, self.reader)


def _poisoned_pair(
    session: AuditSession,
    path: CodePath,
    base: Inputs,
    perturbations: list[Perturbation],
    value: float | None,
) -> _StressPair | None:
    """What is hidden is made large, or NaN or infinite, where the words become vectors."""
    repeated = _repeat_row(base, len(perturbations))
    hook = interventions.poison_hook(
        torch.stack([perturbation.mask for perturbation in perturbations]), value
    )
    new = interventions.select_output_with_hook(session.adapter, repeated, path, hook)
    return (
        None
        if new is None
        else _StressPair(repeated, repeated, session.adapter.run(repeated, path), new, None, hook)
    )


def _strongest_leak(
    session: AuditSession,
    path: CodePath,
    run_pair: Callable[[list[Perturbation]], _StressPair | None],
    min_change: float,
) -> _StressPair | None:
    """The cut that moves a reader: found among all, then seen in a row by itself, where no other row can have
    done it.
    """
    length = session.adapter.length
    allowed = session.allowed_mask(length)
    perturbations = sampled_perturbations(session, allowed)
    stress_pair: _StressPair | None = None
    for _ in ("all cuts", "the one that moves something"):
        stress_pair = run_pair(perturbations)
        if stress_pair is None:
            return None
        session.record_path(path, len(perturbations), length)
        finite = stress_pair.base_output.isfinite().flatten(2).all(
            2
        ) & stress_pair.new_output.isfinite().flatten(2).all(2)
        if stress_pair.amplifier is not None and not finite.all():
            return None
        change = torch.where(
            finite, rounding.max_change(stress_pair.base_output, stress_pair.new_output), 0.0
        ).cpu()
        scale = rounding.scale(stress_pair.base_output)
        hits = (change > 0) & torch.stack(
            [~(allowed & perturbation.mask).any(1) for perturbation in perturbations]
        )
        if not hits.any() or float(change[hits].max()) / scale < min_change:
            return None
        row, reader = divmod(int(torch.where(hits, change, -1.0).argmax()), length)
        perturbations = [perturbations[row]]
    assert stress_pair is not None
    return replace(
        stress_pair,
        reader=reader,
        source=int(perturbations[0].mask.nonzero()[0]),
        size=float(change[0, reader]) / scale,
    )


def _repeat_row(inputs: Inputs, batch_size: int) -> Inputs:
    """The same text in every row."""
    return inputs.but(
        tokens=inputs.tokens[:1].repeat(batch_size, *[1] * (inputs.tokens.dim() - 1)),
        source=None
        if inputs.source is None
        else inputs.source[:1].repeat(batch_size, *[1] * (inputs.source.dim() - 1)),
    )


def poison_probe(session: AuditSession, path: CodePath) -> None:
    """NaN and infinity where a reader may not look.

    NaN behind it proves nothing, since 0 · NaN is NaN in honest kernels too; another number does.
    """
    adapter, length = session.adapter, session.adapter.length
    if session.quantized or session.out_of_time or session.has_finding("future"):
        return
    base = adapter.make_inputs(1, length, seed=length + 3)
    with session.skip_on_error("future by poison"), adapter.on_path(path):
        for value in (float("nan"), float("inf")):
            make_pair = partial(_poisoned_pair, session, path, base, value=value)
            leak = _strongest_leak(session, path, make_pair, 1e-5)
            if leak is None:
                continue
            location, line = leak.locate(session, path)
            path_label = f"{session.record_path(path, 1, length)}, {value} as input"
            session.add_finding(
                Finding(
                    "future",
                    leak.reader,
                    leak.source,
                    leak.size,
                    path_label,
                    location.module,
                    f"position {leak.reader} gives another number when position {leak.source}, out of its "
                    "sight, "
                    f"holds {value}: something looks at the whole sequence; "
                    f"{findings.remedy('future', location.module_kind)}.",
                    "poison",
                    line,
                    leak.reproducer(session, path),
                )
            )
            return
