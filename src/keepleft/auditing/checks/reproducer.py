"""Scripts that show a finding: the model, two calls, and a number that must be 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import call_forms
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.model_adapter import Inputs, ModelAdapter
from keepleft.auditing.outputs import Selector
from keepleft.auditing.report import MODEL_COMMENT
from keepleft.auditing.session import AuditSession

MAX_ELEMENTS = 4096  # of the arguments of a call: longer ones are not written out
SEED = 0
Wrapper = call_forms.LossCall | call_forms.PooledCall | call_forms.IsolatedLossCall
WRITTEN_FIELDS = ("main_argument", "label_argument", "label", "time_axis")  # of a wrapper


class UnwritableError(Exception):
    """A call cannot be written down as code."""


def script(
    session: AuditSession,
    path: CodePath,
    first: Inputs,
    second: Inputs,
    first_at: tuple[int, int],
    second_at: tuple[int, int],
    *,
    first_context: str = "",
    second_context: str = "",
    before: str = "",
    up_to_rounding: bool = False,
) -> str:
    """A script that prints by how much the outputs differ at a position of each call; empty where a call
    cannot be written down.

    `before`: lines ahead of the calls; the contexts: what each of them runs in.
    """
    adapter = session.adapter
    assert adapter.selector is not None
    try:
        writer = _Writer(adapter, path)
        calls = [
            line
            for name, inputs, context in (("first", first, first_context), ("second", second, second_context))
            for line in writer.call(name, inputs, context)
        ]
        model_lines = writer.model_lines(session.num_randomized)
        setup = [*writer.imports, *model_lines, *before.splitlines()]
    except UnwritableError:
        return ""
    values = [
        f"{_select(adapter.selector, name, inputs)}[{at[0]}, {at[1]}]"
        for name, inputs, at in (("first", first, first_at), ("second", second, second_at))
    ]
    rounding = " up to rounding" if up_to_rounding else ""
    return "\n".join(
        [*setup, *calls, f"print(float(({values[0]} - {values[1]}).abs().max()))  # must be 0{rounding}"]
    )


class _Writer:
    """Code for the calls of a model on a path."""

    def __init__(self, adapter: ModelAdapter, path: CodePath) -> None:
        self.adapter = adapter
        self.path = path
        self.imports = ["import torch"]
        self.contexts = ["torch.no_grad()"]
        self.wrappers: list[Wrapper] = []
        function: Any = adapter.entry_point
        while isinstance(function, Wrapper):
            self.wrappers.append(function)
            function = function.function
        self.batch_call = function if isinstance(function, call_forms.BatchCall) else None
        if self.batch_call is not None:
            function = self.batch_call.function
        self.is_training_step = getattr(function, "__qualname__", "").startswith("training_step.")
        is_model = function is adapter.target or function is adapter.module
        if path.wrapped or path.embeddings or not (is_model or self.is_training_step):
            raise UnwritableError
        self.function = "call" if self.wrappers or self.is_training_step else "model"

    def model_lines(self, num_randomized: int) -> list[str]:
        """The model in the state of the path; `call`: how it is called."""
        path = self.path
        lines = [MODEL_COMMENT]
        if self.adapter.module is None:
            return [*lines, *self._call_lines()]
        if num_randomized:
            lines += [
                "zeros = torch.Generator().manual_seed(0)  # weights of zeros hide what lies behind them",
                "for p in model.parameters():",
                "    if p.is_floating_point() and p.numel() and not p.count_nonzero():",
                "        width = p.shape[-1] if p.dim() > 1 else 4",
                "        p.data = torch.randn(p.shape, generator=zeros).to(p) / width**0.5 * 0.5",
            ]
        lines.append(f"model.{'train' if path.train else 'eval'}()")
        if path.train and not path.dropout:
            lines += [
                "for module in model.modules():",
                "    if isinstance(module, torch.nn.Dropout):",
                "        module.p = 0.0",
            ]
        if path.implementation is not None:
            lines.append(f"model.set_attn_implementation({path.implementation!r})")
        if path.flag is not None:
            name, value = path.flag
            lines += [
                "for module in model.modules():",
                f"    if isinstance(vars(module).get({name!r}), {type(value).__name__}):",
                f"        module.{name} = {value!r}",
            ]
        if path.dtype is not None:
            lines.append(f"model.to({path.dtype})")
        if path.compiling:
            lines.append("torch.compiler._is_compiling_flag = True  # as code sees it under torch.compile")
        if path.autocast:
            self.contexts.append("torch.autocast(next(model.parameters()).device.type, torch.bfloat16)")
        return [*lines, *self._call_lines()]

    def _call_lines(self) -> list[str]:
        """How the model is called, where that is not `model(…)`."""
        if self.function == "model":
            return []
        step = "lambda batch: model.training_step(batch, 0)" if self.is_training_step else "model"
        lines = [f"call = {step}"]
        if self.batch_call is not None and self.wrappers:
            self.imports.append("from keepleft.auditing.call_forms import BatchCall")
            lines.append(f"call = BatchCall(call, {literal(self.batch_call.arguments)})")
        for wrapper in reversed(self.wrappers):
            name = type(wrapper).__name__
            self.imports.append(f"from keepleft.auditing.call_forms import {name}")
            arguments = [
                repr(getattr(wrapper, field.name))
                for field in fields(wrapper)
                if field.name in WRITTEN_FIELDS
            ]
            lines.append(f"call = {name}(call, {', '.join(arguments)})")
        return lines

    def call(self, name: str, inputs: Inputs, context: str) -> list[str]:
        """Lines that call the model, and keep what it returns under a name."""
        arguments = self.adapter.arguments(inputs, self.path)
        if self.batch_call is not None and not self.wrappers:
            arguments = self.batch_call.pack(arguments)
        positional_only = self.adapter.signature.positional_only
        positional = [arguments.pop(key) for key in positional_only if key in arguments]
        written = [
            *map(literal, positional),
            *(f"{key}={literal(value)}" for key, value in arguments.items()),
        ]
        contexts = ", ".join([*self.contexts, *([context] if context else [])])
        return [
            f"torch.manual_seed({SEED})",
            f"with {contexts}:",
            f"    {name} = {self.function}({', '.join(written)})",
        ]


def _select(selector: Selector, name: str, inputs: Inputs) -> str:
    """Code for the audited output (B, T, …) in what a call has returned."""
    batch, length = inputs.tokens.shape[:2]
    code = name + selector.code
    if selector.flat:
        sizes = (batch, length) if selector.batch_axis == 0 else (length, batch)
        code += f".unflatten(0, {sizes})"
    if (selector.batch_axis, selector.time_axis) != (0, 1):
        code += f".movedim(({selector.batch_axis}, {selector.time_axis}), (0, 1))"
    return code


def literal(value: Any) -> str:
    """Code for an argument. Raises UnwritableError for what has none, or a very long one."""
    if isinstance(value, Tensor):
        if value.numel() > MAX_ELEMENTS or value.dtype == torch.complex64:
            raise UnwritableError
        plain = value.detach().cpu()
        default = {torch.float32, torch.int64, torch.bool}
        dtype = "" if plain.dtype in default else f", dtype={plain.dtype}"
        return f"torch.tensor({plain.tolist()}{dtype})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if is_dataclass(value) or not isinstance(value, str | int | float | bool | None | torch.dtype):
        raise UnwritableError
    return repr(value)
