"""Builds findings: where a leak enters, its line of code, a message with a remedy, and code that reproduces
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from keepleft.auditing import localize
from keepleft.auditing.checks import reproducer
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.report import LEAK, Finding
from keepleft.auditing.session import AuditSession

# kind of finding → kind of module ('': any other) → remedy
REMEDIES = {
    "future": {
        "attention": "give the attention a causal mask on this path, and fill with -inf before the softmax",
        "norm": "normalise over features, not over time",
        "convolution": "pad the convolution on the left only, by (kernel - 1) · dilation",
        "recurrence": "use one direction only",
        "routing": "choose for each token from that token alone; a choice among tokens looks ahead",
        "pooling": "gather over what came before only, for instance with a cumulative sum",
        "": "let a position read itself and what came before only",
    },
    "padding": {
        "attention": "hide padded keys from every real query, and count positions from the first real token",
        "norm": "take statistics over real tokens only",
        "convolution": "set padded positions to zero before the convolution",
        "pooling": "gather over real tokens only",
        "": "hide padded positions, and count positions from the first real token",
    },
    "packing": {
        "attention": "let a query see keys of its own text only",
        "": "keep texts apart: attention, convolutions, states and positions begin anew with each text",
    },
    "cache": {
        "attention": "align the mask with the end of the keys, hide slots that are not filled, keep keys in "
        "order, and count positions on",
        "": "carry state and positions on from where the last step ended",
    },
    "batch": {
        "norm": "use a norm of each row alone (LayerNorm, RMSNorm)",
        "routing": "route each row for itself, without a limit shared by the batch",
        "": "keep the rows of a batch apart",
    },
    "nan": {"": "give a query that sees nothing zeros: a softmax over nothing but -inf is NaN"},
    "labels": {
        "": "let the scores at position t be judged by the token at t + 1 of the same row, "
        "once, and leave -100 out"
    },
}
PEERS_WITH_NAN = ", as torch.nn.MultiheadAttention gives it (T5 and BART of transformers give numbers)"
NARROW_WINDOW_REMEDY = "narrow the window of the mask, or claim as much as it reaches through all layers"


def add_future_finding(
    session: AuditSession,
    path: CodePath,
    base: Inputs,
    changed: Inputs,
    row: int,
    reader: int,
    source: int,
    size: float,
    probe: str,
) -> None:
    """Report that a reader's output depends on a source that it must not read.

    base, changed: two calls that show it. size: of the change, relative to the largest output.
    """
    adapter = session.adapter
    batch, length = base.tokens.shape[:2]
    unwrapped_path = path.but(wrapped=False)
    location, line = locate(
        session,
        make_probe(session, unwrapped_path, base, row, reader),
        make_probe(session, unwrapped_path, changed, row, reader),
    )
    visibility = "its future" if source > reader else "out of its sight"
    advice = remedy("future", location.module_kind) if source > reader else NARROW_WINDOW_REMEDY
    session.add_finding(
        Finding(
            "future",
            reader,
            source,
            size,
            session.record_path(path, batch, length),
            location.module,
            f"position {reader} reads position {source}, {visibility}, through "
            f"{_name_module(location) or adapter.name}: its output "
            f"moves {format_size(size)}; {advice}.",
            probe,
            line,
            reproducer.script(session, path, base, changed, (row, reader), (row, reader)),
        )
    )


def _name_module(location: localize.Location) -> str:
    """The module and its kind, unless its name says that already: the attention of layers.0.mixer."""
    kind = location.module_kind
    if not kind or not location.module or kind in location.module.rpartition(".")[2].lower():
        return location.module
    return f"the {kind} of {location.module}"


def make_probe(
    session: AuditSession,
    path: CodePath,
    inputs: Inputs,
    row: int,
    reader: int | None,
    run: Callable[[], object] | None = None,
) -> localize.Probe:
    """A call with the position to watch in it. run: the call, where it is not a plain one on this path."""
    adapter = session.adapter
    return localize.Probe(
        run or (lambda: adapter.run_raw(inputs, path)),
        inputs.tokens.shape[0],
        inputs.tokens.shape[1] + adapter.num_further_tokens,
        row,
        reader,
        adapter.parameter_dims,
    )


def locate(
    session: AuditSession,
    first: localize.Probe,
    second: localize.Probe,
    tolerance: float = 0.0,
    *,
    in_own_methods: bool = False,
) -> tuple[localize.Location, str]:
    """The module where two calls begin to differ, and the line of code; empty where they are not known.

    in_own_methods: the line in the methods of the module, rather than in a function that they call.
    """
    adapter = session.adapter
    try:
        location = localize.locate(adapter.module, first, second, tolerance)
        num_further = adapter.num_further_tokens
        if not location.module and num_further:  # tokens may be shifted before they are read
            shorter_first = replace(first, length=first.length - num_further)
            shorter_second = replace(second, length=second.length - num_further)
            location = localize.locate(adapter.module, shorter_first, shorter_second, tolerance)
            if location.module:
                first, second = shorter_first, shorter_second
    except CallError:
        return localize.Location(), ""
    if adapter.module is None:
        return location, ""
    return location, localize.source_line(
        localize.submodule(adapter.module, location.module),
        first,
        second,
        tolerance,
        in_own_methods=in_own_methods,
    )


def locate_nan(session: AuditSession, probe: localize.Probe) -> tuple[str, str]:
    """The module where NaN begins, and the line of code; empty where they are not known."""
    module = session.adapter.module
    name = localize.first_nan_module(module, probe)
    return name, "" if module is None else localize.nan_line(localize.submodule(module, name), probe)


def add_nan_finding(
    session: AuditSession,
    path: CodePath,
    inputs: Inputs,
    out: Tensor,
    when: str,
    path_note: str = "",
    severity: str = LEAK,
) -> None:
    """Report the first NaN in an output, with the module where it begins, if NaN is among the checks.

    when: ends the sentence "position 3 of row 0 is NaN …". severity: WARNING for what widely used models do
    too, which is then named.
    """
    if "nan" not in session.checks:
        return
    row, reader = out.isnan().flatten(2).any(2).nonzero()[0].tolist()
    path_label = session.record_path(path, *inputs.tokens.shape[:2])
    if path_note:
        path_label += f", {path_note}"
    probe = make_probe(session, path, inputs, row, reader)
    module, line = locate_nan(session, probe)
    session.add_finding(
        Finding(
            "nan",
            reader,
            None,
            float("inf"),
            path_label,
            module,
            f"position {reader} of row {row} is NaN {when}, through {module or session.adapter.name}"
            f"{'' if severity == LEAK else PEERS_WITH_NAN}; {remedy('nan', '')}.",
            "forward",
            line,
            reproducer.nan_script(session, path, inputs, row, reader),
            severity=severity,
        )
    )


def remedy(kind: str, module_kind: str) -> str:
    return REMEDIES[kind].get(module_kind) or REMEDIES[kind][""]


def format_size(value: float) -> str:
    return (
        "from a number to NaN or back" if value == float("inf") else f"by {value:.2g} of the largest output"
    )
