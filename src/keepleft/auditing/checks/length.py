"""A text and its beginning: what comes behind a position may not even count."""

from __future__ import annotations

import torch

from keepleft.auditing import rounding
from keepleft.auditing.checks import findings
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import Inputs
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession


def length_probe(session: AuditSession, path: CodePath) -> None:
    """A text and its beginning: what comes behind a position may not even count."""
    adapter = session.adapter
    length_pairs = [(adapter.length, extra_length) for extra_length in (1, 2, adapter.length)] + [
        (3, 1),
        (5, 4),
    ]
    length_pairs += [(n, 1) for n in session.lengths[: 8 if session.budget.exhaustive else 3] if n > 2]
    length_pairs += [
        (n, n)
        for n in session.lengths[: 6 if session.budget.exhaustive else 2]
        if 2 < n <= session.budget.max_length // 2
    ]
    for dtype in [torch.float64, None] if session.supports_float64 else [None]:
        dtype_path = path.but(dtype=dtype)
        limit = rounding.tolerance(session, dtype_path)
        for short_length, extra_length in session.within_budget(length_pairs, "future by length"):
            if short_length + extra_length >= session.run_cache.rejected_length or not session.accepts_length(
                dtype_path, short_length + extra_length
            ):
                continue
            with (
                session.skip_on_error(
                    f"future by length, {dtype_path.label(1, short_length + extra_length)}"
                ),
                adapter.on_path(dtype_path),
            ):
                long_inputs = adapter.make_inputs(1, short_length + extra_length, seed=short_length + 40)
                short_inputs = long_inputs.but(tokens=long_inputs.tokens[:, :short_length])
                if (
                    not torch.equal(
                        session.allowed_mask(short_length),
                        session.allowed_mask(short_length + extra_length)[:short_length, :short_length],
                    )
                    or session.allowed_mask(short_length + extra_length)[:short_length, short_length:].any()
                ):
                    return  # the claim itself looks at the end
                a = adapter.run(short_inputs, dtype_path)
                b = adapter.run(long_inputs, dtype_path)[:, :short_length]
                session.record_path(dtype_path, 1, short_length + extra_length)
                change, scale = rounding.max_change(a, b)[0].cpu(), rounding.scale(a)
                if not float(change.max()) / scale > limit:
                    continue
                if session.has_finding("future"):
                    return
                reader = int(change.argmax())
                short_probe, long_probe = (
                    findings.make_probe(session, dtype_path, inputs, 0, reader)
                    for inputs in (short_inputs, long_inputs)
                )
                location, line = findings.locate(session, short_probe, long_probe, limit)
                relative = float(change[reader]) / scale
                session.add_finding(
                    Finding(
                        "future",
                        reader,
                        short_length,
                        relative,
                        dtype_path.label(1, short_length + extra_length),
                        location.module,
                        f"position {reader} changes when {extra_length} more positions follow, from "
                        f"{short_length} to "
                        f"{short_length + extra_length}: something depends on the length, through "
                        f"{location.module or adapter.name}; "
                        "let nothing depend on what comes later, not even its amount.",
                        "length",
                        line,
                        _reproducer(session, short_inputs, long_inputs, reader),
                    ),
                    "length",
                )
                return


def _reproducer(session: AuditSession, short_inputs: Inputs, long_inputs: Inputs, reader: int) -> str:
    adapter = session.adapter
    if long_inputs.tokens.is_floating_point():
        return (
            f"a = torch.randn({tuple(long_inputs.tokens.shape)}); (model(a)[:, {reader}] - model(a[:, "
            f":{short_inputs.tokens.shape[1]}])"
            f"[:, {reader}]).abs().max()  # must be rounding only"
        )
    assert adapter.selector is not None
    call_code = f"model({adapter.main_argument}={{}}){adapter.selector.as_code()}[0, {reader}]"
    slice_code = f"a[:, :{short_inputs.tokens.shape[1]}]"
    return (
        f"a = torch.tensor({long_inputs.tokens.tolist()})\n({call_code.format('a')} - "
        f"{call_code.format(slice_code)}).abs().max()"
        "  # must be rounding only"
    )
