"""NaN in the output, or only in the gradients, above all where a query may attend to nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing import localize
from keepleft.auditing.checks.findings import add_nan_finding, remedy
from keepleft.auditing.checks.padding import make_keep_mask, pad_inputs
from keepleft.auditing.checks.reproducer import gradient_script
from keepleft.auditing.code_paths import HALF_DTYPES, CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.report import LEAK, WARNING, Finding
from keepleft.auditing.session import AuditSession

DIRECTION_SEED = 3  # of the random loss whose gradients are taken
EMPTY_SOURCE = "a source of nothing but padding"
LONG_LENGTH = 192  # tokens: a product of so many factors of one half underflows in single precision


def nan(session: AuditSession, paths: Sequence[CodePath], all_paths: Sequence[CodePath] = ()) -> None:
    """Forward and backward in the model's own precision; in half precision forward only, and only for NaN
    that a mask causes.
    """
    for path in session.within_budget(
        [path for path in paths if path.dtype not in HALF_DTYPES], "nan, further paths"
    ):
        for case, inputs, real_mask in _cases(session):
            with (
                session.skip_on_error(f"nan, {case}, {path.label(*inputs.tokens.shape[:2])}"),
                session.adapter.on_path(path),
            ):
                if _check_forward(session, path, case, inputs) and (
                    inputs.keep_mask is not None or not session.essential
                ):
                    _check_backward(session, path, case, inputs, real_mask)
    if not session.essential:
        _check_long_sequence(session)
    # where the audit takes half-precision paths at all: they need a copy of the weights
    if any(path.dtype in HALF_DTYPES for path in (*paths, *all_paths)):
        for dtype in session.within_budget(
            [dtype for dtype in HALF_DTYPES if dtype != session.adapter.dtype], "nan in coarser numbers"
        ):
            path = CodePath(dtype=dtype)
            if session.run_cache.first_visit(("nan", path)):
                with session.skip_on_error(f"nan, {path.label()}"), session.adapter.on_path(path):
                    _check_half_precision(session, path)


def _cases(session: AuditSession) -> Iterator[tuple[str, Inputs, Tensor]]:
    """Inputs that may leave a query with nothing to attend to: name, inputs, and a mask (B, T) of the
    positions whose outputs matter.
    """
    adapter = session.adapter
    for length in (1, 2, adapter.length):
        yield (
            f"{length} positions",
            adapter.make_inputs(2, length, seed=70),
            torch.ones(2, length, dtype=torch.bool),
        )
    yield "one row", adapter.make_inputs(1, seed=70), torch.ones(1, adapter.length, dtype=torch.bool)
    yield from _padding_cases(session)


def _padding_cases(session: AuditSession) -> Iterator[tuple[str, Inputs, Tensor]]:
    """The cases with padding."""
    adapter = session.adapter
    length = adapter.length
    if adapter.padding_argument is not None:
        left_mask = make_keep_mask(torch.tensor([length, length - 4]), length, "left")
        if adapter.padding_argument.form != "lengths":
            yield (
                "padding on the left",
                pad_inputs(adapter, adapter.make_inputs(2, seed=71), left_mask, "left", False),
                left_mask,
            )
        empty_mask = make_keep_mask(torch.tensor([length, length - 4, 0]), length, "right")
        yield (
            "a row of nothing but padding",
            pad_inputs(adapter, adapter.make_inputs(3, seed=72), empty_mask, "right", False),
            empty_mask,
        )
    if adapter.source_padding_argument is not None:
        empty_mask = make_keep_mask(torch.tensor([adapter.source_length, 0]), adapter.source_length, "right")
        yield (
            EMPTY_SOURCE,
            adapter.make_inputs(2, seed=73).but(source_keep_mask=empty_mask),
            torch.ones(2, length, dtype=torch.bool),
        )


def _check_long_sequence(session: AuditSession) -> None:
    """The longest sequence that the model takes, once: products over many positions underflow, and sums
    overflow.
    """
    adapter = session.adapter
    path = CodePath()
    lengths = sorted({max(LONG_LENGTH, session.budget.max_length), *session.lengths}, reverse=True)
    for length in [n for n in lengths if adapter.length < n < session.run_cache.rejected_length][:4]:
        if ("nan", length) in session.run_cache.visited:
            return
        try:
            with adapter.on_path(path):
                _check_forward(session, path, f"{length} positions", adapter.make_inputs(1, length, seed=74))
        except CallError:
            continue
        session.run_cache.visited.add(("nan", length))
        return


def _check_half_precision(session: AuditSession, path: CodePath) -> None:
    """Report NaN only where the same call without a mask gives none: a model need not support half
    precision.
    """
    adapter = session.adapter
    if adapter.run(adapter.make_inputs(2, 1, seed=70), path).isnan().any():
        return
    # a causal mask hides something from 2 positions on
    if not session.claims_nothing and not _check_forward(
        session, path, "3 positions", adapter.make_inputs(2, 3, seed=70)
    ):
        return
    for case, inputs, _ in _padding_cases(session):
        unmasked = inputs.but(keep_mask=None, source_keep_mask=None, positions=None)
        if adapter.run(unmasked, path).isnan().any() or not _check_forward(session, path, case, inputs):
            return


def _check_forward(session: AuditSession, path: CodePath, case: str, inputs: Inputs) -> bool:
    """Is the output free of NaN? If not, report it."""
    out = session.adapter.run(inputs, path)
    session.record_path(path, *inputs.tokens.shape[:2])
    if not out.isnan().any():
        return True
    severity = WARNING if case == EMPTY_SOURCE else LEAK
    add_nan_finding(session, path, inputs, out, f"with {case}", case, severity)
    return False


def _check_backward(
    session: AuditSession, path: CodePath, case: str, inputs: Inputs, real_mask: Tensor
) -> None:
    """The gradients of a loss over the positions in real_mask (B, T) must be finite."""
    adapter = session.adapter
    if adapter.module is None:
        return
    parameters = [p for p in adapter.module.parameters() if p.requires_grad]
    if not parameters or adapter.selector is None:
        return

    def loss() -> Tensor:
        with torch.enable_grad():
            out = adapter.select_output(adapter.run_raw(inputs, path), *inputs.tokens.shape[:2])
            real_output = out[real_mask.to(out.device)]
            rng = torch.Generator().manual_seed(DIRECTION_SEED)
            direction = torch.randn(real_output.shape, generator=rng).to(real_output)
            return (real_output * direction).sum()

    value = loss()
    if not value.requires_grad:
        return
    saved_grads = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        try:
            with warnings.catch_warnings(), adapter.timed():
                warnings.simplefilter("ignore")
                torch.autograd.backward(value)
        except RuntimeError as error:
            raise CallError(f"no gradients: {error}") from error
        if all(p.grad is None or p.grad.isfinite().all() for p in parameters):
            return
        for p in parameters:
            p.grad = None
        name = localize.first_nan_backward(adapter.module, loss)
    finally:
        for p, grad in zip(parameters, saved_grads, strict=True):
            p.grad = grad
    path_label = session.record_path(path, *inputs.tokens.shape[:2]) + f", {case}"
    session.add_finding(
        Finding(
            "nan",
            None,
            None,
            float("inf"),
            path_label,
            name,
            f"what comes out are numbers, but gradients are NaN or infinite with {case}, through "
            f"{name or adapter.name}; {remedy('nan', '')}, and choose between values before they are "
            "computed, not after.",
            "gradient",
            "",
            gradient_script(session, path, inputs, real_mask, DIRECTION_SEED),
            severity=WARNING if case == EMPTY_SOURCE else LEAK,
        ),
        "backward",
    )
