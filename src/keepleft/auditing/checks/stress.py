"""Causality under stress: large attention scores, large inputs, NaN and infinity. A mask of finite numbers
holds only until a score exceeds it, and code that repairs NaN often reads the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from keepleft.auditing import interventions, localize, rounding
from keepleft.auditing.checks import findings
from keepleft.auditing.checks.reproducer import literal, script
from keepleft.auditing.code_paths import HALF_DTYPES, CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import perturb_rows
from keepleft.auditing.probe_inputs import Perturbation, first_middle_last, perturbations
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession


def magnitude_probe(session: AuditSession, path: CodePath) -> None:
    """Attention scores made large, with either sign, and then the inputs."""
    length = session.adapter.length
    if session.adapter.dtype in HALF_DTYPES:
        path = path.but(dtype=torch.float32)  # in half precision large scores are rounded too coarsely
    for sign in (1.0, -1.0):
        _check_magnitude(session, path, length, "large scores", sign)
    _check_magnitude(session, path, length, "large inputs", None)


def _check_magnitude(
    session: AuditSession, path: CodePath, length: int, name: str, sign: float | None
) -> None:
    """sign: of the large scores; None for large inputs instead."""
    adapter = session.adapter
    if session.quantized or session.out_of_time or session.has_finding("future"):
        return
    base = adapter.make_inputs(1, length, seed=length + 2)

    def run_pair(candidates: list[Perturbation]) -> _StressPair | None:
        """None where the model offers nothing to amplify."""
        if sign is None:
            return _poisoned_pair(session, path, base, candidates, None)
        repeated = _repeat_row(base, len(candidates))
        amplifier = interventions.ScoreAmplifier(length + adapter.num_further_tokens, sign)
        new = perturb_rows(adapter, repeated, candidates)
        with amplifier.mode():
            base_output = adapter.run(repeated, path)
        if not amplifier.factors:
            session.note("no attention scores were seen, so no large ones were tried")
            return None
        with amplifier.mode():
            return _StressPair(repeated, new, base_output, adapter.run(new, path), amplifier, None)

    with session.skip_on_error(f"future under {name}"), adapter.on_path(path):
        leak = _strongest_leak(session, path, run_pair, 1e-6)
        if leak is None or (sign is None and not _persists_in_float64(session, path, base, leak)):
            return
        location, line = leak.locate(session, path)
        explanation = (
            f"once scores reach {interventions.AMPLIFIED_SCORE:g}, its mask of finite numbers no longer "
            "hides it; fill with -inf, or use a boolean mask"
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


def poison_probe(session: AuditSession, path: CodePath) -> None:
    """NaN and infinity at positions that a reader must not read.

    A reader that becomes NaN proves nothing, since 0 · NaN is NaN in honest kernels too; one that becomes
    another number is a leak.
    """
    adapter = session.adapter
    length = adapter.length
    if session.quantized or session.out_of_time or session.has_finding("future"):
        return
    base = adapter.make_inputs(1, length, seed=length + 3)
    with session.skip_on_error("future by poison"), adapter.on_path(path):
        for value in (float("nan"), float("inf")):
            run_pair = partial(_poisoned_pair, session, path, base, value=value)
            leak = _strongest_leak(session, path, run_pair, 1e-5)
            if leak is None:
                continue
            location, line = leak.locate(session, path)
            session.add_finding(
                Finding(
                    "future",
                    leak.reader,
                    leak.source,
                    leak.size,
                    f"{session.record_path(path, 1, length)}, {value} as input",
                    location.module,
                    f"position {leak.reader} gives another number when position {leak.source}, out of its "
                    f"sight, holds {value}: something looks at the whole sequence; "
                    f"{findings.remedy('future', location.module_kind)}.",
                    "poison",
                    line,
                    leak.reproducer(session, path),
                )
            )
            return


# -- two calls under stress --------------------------------------------------------------------


@dataclass(frozen=True)
class _StressPair:
    """Two calls under stress, without and with perturbations, and their outputs."""

    base: Inputs
    new: Inputs
    base_output: Tensor
    new_output: Tensor
    amplifier: interventions.ScoreAmplifier | None
    hook: interventions.Hook | None  # applied to the embeddings of the second call
    mask: Tensor | None = None  # (B, T) the positions that the hook replaces
    value: float | None = None  # by this; None: by larger ones
    # once the leak is found: the position that changes, the one that changes it, and by how much
    reader: int = 0
    source: int = 0
    size: float = 0.0

    def locate(self, session: AuditSession, path: CodePath) -> tuple[localize.Location, str]:
        first, second = (
            findings.make_probe(
                session,
                path,
                inputs,
                0,
                self.reader,
                interventions.stressed_run(session.adapter, inputs, path, self.amplifier, hook),
            )
            for inputs, hook in ((self.base, None), (self.new, self.hook))
        )
        return findings.locate(session, first, second)

    def reproducer(self, session: AuditSession, path: CodePath) -> str:
        """With the attention scores amplified, or the embeddings of the source replaced."""
        at = (0, self.reader)
        if self.amplifier is not None:
            before = (
                "from keepleft.auditing.interventions import ScoreAmplifier\n"
                f"amplifier = ScoreAmplifier({self.amplifier.length}, {self.amplifier.sign})"
            )
            context = "amplifier.mode()"
            return script(
                session,
                path,
                self.base,
                self.new,
                at,
                at,
                first_context=context,
                second_context=context,
                before=before,
            )
        if self.mask is None:
            return ""
        if self.base.tokens.is_floating_point():
            assert self.hook is not None
            replaced = self.base.but(tokens=self.hook(self.base.tokens))
            return script(session, path, self.base, replaced, at, at)
        is_time_first = session.adapter.time_axis == 0
        tokens, mask = (
            literal(value.transpose(0, 1) if is_time_first else value)
            for value in (self.base.tokens, self.mask)
        )
        value = "None" if self.value is None else f'float("{self.value}")'
        before = (
            "from keepleft.auditing.interventions import EmbeddingHook, poison_hook\n"
            f"hook = EmbeddingHook({tokens}, poison_hook({mask}, {value}))"
        )
        return script(session, path, self.base, self.new, at, at, second_context="hook", before=before)


def _poisoned_pair(
    session: AuditSession, path: CodePath, base: Inputs, candidates: list[Perturbation], value: float | None
) -> _StressPair | None:
    """The embeddings at perturbed positions replaced by a value, or made large where there is none; None
    where no embeddings of the tokens are seen.
    """
    repeated = _repeat_row(base, len(candidates))
    masks = torch.stack([perturbation.mask for perturbation in candidates])
    hook = interventions.poison_hook(masks, value)
    new_output = interventions.select_output_with_hook(session.adapter, repeated, path, hook)
    if new_output is None:
        return None
    base_output = session.adapter.run(repeated, path)
    return _StressPair(repeated, repeated, base_output, new_output, None, hook, masks, value)


def _strongest_leak(
    session: AuditSession,
    path: CodePath,
    run_pair: Callable[[list[Perturbation]], _StressPair | None],
    min_change: float,
) -> _StressPair | None:
    """The perturbation that changes a reader most: found with all of them in one batch, one in each row, and
    then run as a single row, where no other row can be the cause.
    """
    length = session.adapter.length
    allowed = session.allowed_mask(length)
    candidates = perturbations(allowed, 1)
    if session.is_large:
        candidates = first_middle_last(candidates)
    pair: _StressPair | None = None
    for _ in ("all perturbations", "the strongest by itself"):
        pair = run_pair(candidates)
        if pair is None:
            return None
        session.record_path(path, len(candidates), length)
        finite = (pair.base_output.isfinite() & pair.new_output.isfinite()).flatten(2).all(2)
        if pair.amplifier is not None and not finite.all():
            return None
        change = rounding.max_change(pair.base_output, pair.new_output)
        change = torch.where(finite, change, 0.0).cpu()
        scale = rounding.scale(pair.base_output)
        hidden = torch.stack([~(allowed & perturbation.mask).any(1) for perturbation in candidates])
        hits = (change > 0) & hidden
        if not hits.any() or float(change[hits].max()) / scale < min_change:
            return None
        row, reader = divmod(int(torch.where(hits, change, -1.0).argmax()), length)
        candidates = [candidates[row]]
    assert pair is not None
    return replace(
        pair,
        reader=reader,
        source=int(candidates[0].mask.nonzero()[0]),
        size=float(change[0, reader]) / scale,
    )


def _persists_in_float64(session: AuditSession, path: CodePath, base: Inputs, leak: _StressPair) -> bool:
    """Is a change under large inputs as large in finer numbers? The rounding of a large sum is not."""
    if not session.supports_float64:
        return True
    float64_path = path.but(dtype=torch.float64)
    with session.adapter.on_path(float64_path):
        run_pair = partial(_poisoned_pair, session, float64_path, base, value=None)
        finer = _strongest_leak(session, float64_path, run_pair, 1e-12)
    return finer is not None and finer.size > leak.size / 100


def _repeat_row(inputs: Inputs, batch_size: int) -> Inputs:
    """The first row, so many times."""
    rows = torch.zeros(batch_size, dtype=torch.long)
    return inputs.select_rows(rows)
