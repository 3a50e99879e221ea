"""Through what a reader gives, nothing may flow back to what it does not see."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from keepleft.auditing import interventions, rounding
from keepleft.auditing.checks import findings
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import CallError, Inputs
from keepleft.auditing.session import AuditSession


def gradients(session: AuditSession, path: CodePath, length: int) -> None:
    """Through what a reader gives, nothing may flow back to what it does not see."""
    adapter = session.adapter
    if session.quantized:
        session.skip("future by gradients", "a quantised model has none")
        return
    allowed = session.allowed_mask(length)
    base = adapter.make_inputs(1, length, seed=length + 1)
    with session.skip_on_error(f"future by gradients, {path.label(1, length)}"), adapter.on_path(path):
        try:
            out, leaf = interventions.run_with_grad(adapter, base, path)
        except interventions.UntracedError as error:
            session.skip("future by gradients", error)
            return
        session.record_path(path, 1, length)
        for reader, gradient in _position_gradients(out, leaf, range(length)):
            hidden = ~allowed[reader]
            largest = float(gradient.max())
            if largest <= 0 or not hidden.any() or not float(gradient[hidden].max()) > 0:
                continue
            source = int(torch.where(hidden, gradient, -1.0).argmax())
            relative = float(gradient[source]) / largest
            if relative < 1e-4 and not _persists_in_float64(session, path, base, reader, source, relative):
                continue
            changed = base.but(tokens=base.tokens.clone())
            changed.tokens[0, source] = adapter.sampler.resample(base.tokens, 11)[0, source]
            change = rounding.change_on_path(session, path, base, changed, 0, reader)
            # too small for its own precision
            finding_path = path if change or not session.supports_float64 else path.but(dtype=torch.float64)
            with adapter.on_path(finding_path):
                findings.add_future_finding(
                    session, finding_path, base, changed, 0, reader, source, change or relative, "gradient"
                )
            return


def _position_gradients(out: Tensor, leaf: Tensor, readers: range) -> Iterator[tuple[int, Tensor]]:
    """(T,) for each reader: how much of a random direction of its output flows back to each position."""
    rng = torch.Generator().manual_seed(5)
    for reader in readers:
        reader_output = out[0, reader].flatten()
        direction = torch.randn(reader_output.shape, generator=rng).to(reader_output)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                (gradient,) = torch.autograd.grad(
                    (reader_output * direction).sum(), leaf, retain_graph=True, allow_unused=True
                )
        except RuntimeError as error:
            raise CallError(f"no gradients: {str(error)[:160]}") from error
        if gradient is None:
            continue
        yield (
            reader,
            torch.nan_to_num(gradient[0].abs().reshape(len(gradient[0]), -1).amax(1).double(), nan=0.0).cpu(),
        )


def _persists_in_float64(
    session: AuditSession, path: CodePath, base: Inputs, reader: int, source: int, relative: float
) -> bool:
    """Does a small gradient stay when rounding becomes finer?"""
    if not session.supports_float64:
        return relative > 1e-6
    float64_path = path.but(dtype=torch.float64)
    try:
        with session.adapter.on_path(float64_path):
            out, leaf = interventions.run_with_grad(session.adapter, base, float64_path)
            ((_, gradient),) = _position_gradients(out, leaf, range(reader, reader + 1))
    except (CallError, interventions.UntracedError, ValueError):
        return relative > 1e-6
    relative_float64 = float(gradient[source]) / max(float(gradient.max()), 1e-300)
    return relative_float64 > relative / 100 and (
        session.is_pure_float64(float64_path) or relative_float64 > 1e-6 or relative_float64 < 1e-9
    )
