"""State kept between calls: does an earlier call, with another text, move this one?"""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import Any

from torch import nn

from keepleft.auditing import localize, module_state, rounding
from keepleft.auditing.checks.findings import format_size, locate
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import UnauditableError
from keepleft.auditing.report import Finding
from keepleft.auditing.session import AuditSession

_RESET_METHOD = re.compile(
    r"^(reset|clear|empty)$|^(reset|clear|empty|init|detach)_\w*(state|cache|hidden|mem|history|stream|carry)"
)


def check_between_calls(session: AuditSession, path: CodePath) -> None:
    """The same call after two different ones. A model that has a method to forget what it keeps does so on
    purpose.
    """
    adapter = session.adapter
    module = adapter.module
    if module is None or "batch" not in session.checks:
        return
    inputs = adapter.make_inputs(2, seed=85)
    earlier = [adapter.make_inputs(2, seed=seed) for seed in (86, 87)]
    snapshot = adapter.state_snapshot

    def run_earlier(first: Inputs) -> None:
        module_state.restore_state(snapshot)
        adapter.state_snapshot = []  # nothing is restored in between
        adapter.run(first, path)

    try:
        outputs = []
        for first in earlier:
            run_earlier(first)
            outputs.append(adapter.run(inputs, path))
        change = rounding.max_change(*outputs).cpu()
        scale = rounding.scale(outputs[0])
        row, reader = divmod(int(change.argmax()), change.shape[1])
        size = float(change[row, reader]) / scale
        path_label = f"{session.record_path(path, 2, inputs.tokens.shape[1])}, after another call"
        if reset := _reset_method(module):
            session.note(
                f"it keeps state between calls, and has {reset} to forget it: each call was made with the "
                "state it began with"
            )
            return
        if size <= rounding.MAX_ROUNDING_ULPS * 1e-7:
            if adapter.keeps_state:
                raise UnauditableError(
                    f"{adapter.name} gives another output for the same input, whatever was before: it "
                    "keeps state between calls; reset it in forward, or wrap it so that each call begins anew"
                )
            return
        probes = [
            localize.Probe(
                lambda _: adapter.run_raw(inputs, path),
                inputs.tokens.shape[0],
                inputs.tokens.shape[1],
                row,
                reader,
                adapter.parameter_dims,
                partial(run_earlier, first),
            )
            for first in earlier
        ]
        location, line = locate(session, probes[0], probes[1])
    finally:
        adapter.state_snapshot = snapshot
        module_state.restore_state(snapshot)
    session.add_finding(
        Finding(
            "batch",
            reader,
            None,
            size,
            path_label,
            location.module,
            f"an earlier call moves this one: position {reader} of row {row} moves {format_size(size)} with "
            f"what the model was given before, through {location.module or adapter.name}; begin anew in each "
            "call, or take the state as an argument and return it.",
            "comparison",
            line,
        ),
        "state",
    )


def _reset_method(module: nn.Module) -> str | None:
    """The name of a method that forgets: reset_state, clear_cache."""
    for submodule in module.modules():
        for name in dir(type(submodule)):
            if _RESET_METHOD.match(name) and not hasattr(nn.Module, name):
                method: Any = getattr(submodule, name, None)
                if callable(method) and "parameters" not in name and "weights" not in name:
                    required = [
                        parameter
                        for parameter in inspect.signature(method).parameters.values()
                        if parameter.default is parameter.empty
                        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
                    ]
                    if len(required) <= 1:
                        return name
    return None
