"""Scripts that show a finding: the model, its calls, and a number that must be 0."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import call_forms, outputs
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.outputs import Selector
from keepleft.auditing.report import MODEL_COMMENT
from keepleft.auditing.session import AuditSession

MAX_ELEMENTS = 4096  # of the arguments of a call: longer ones are not written out
SEED = 0
Wrapper = call_forms.LossCall | call_forms.PooledCall | call_forms.IsolatedLossCall
WRITTEN_FIELDS = ("main_argument", "label_argument", "label", "time_axis")  # of a wrapper
UP_TO_ROUNDING = "  # must be 0 up to rounding"


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
    try:
        writer = ScriptWriter(session, path)
        lines = [
            line
            for name, inputs, context in (("first", first, first_context), ("second", second, second_context))
            for line in writer.call(name, writer.arguments(inputs), context)
        ]
    except UnwritableError:
        return ""
    first_value, second_value = (
        f"{writer.output(name, inputs)}[{row}, {position}]"
        for name, inputs, (row, position) in (("first", first, first_at), ("second", second, second_at))
    )
    comment = UP_TO_ROUNDING if up_to_rounding else "  # must be 0"
    return writer.text(
        [*before.splitlines(), *lines, f"print(float(({first_value} - {second_value}).abs().max())){comment}"]
    )


def nan_script(session: AuditSession, path: CodePath, inputs: Inputs, row: int, position: int) -> str:
    """A script that prints how many numbers are NaN at a position of a call."""
    try:
        writer = ScriptWriter(session, path)
        lines = writer.call("out", writer.arguments(inputs))
    except UnwritableError:
        return ""
    value = f"{writer.output('out', inputs)}[{row}, {position}]"
    return writer.text([*lines, f"print(int({value}.isnan().sum()))  # must be 0"])


def gradient_script(
    session: AuditSession, path: CodePath, inputs: Inputs, real_mask: Tensor, seed: int
) -> str:
    """A script that prints how many gradients of weights are not finite.

    real_mask: (B, T) the positions that the loss is a sum over, in a direction drawn with the seed.
    """
    try:
        writer = ScriptWriter(session, path)
        lines = writer.call("out", writer.arguments(inputs), with_grad=True)
        real_code = literal(real_mask)
    except UnwritableError:
        return ""
    on_cpu = "" if session.adapter.device.type == "cpu" else ', device="cpu"'
    rng = f"generator=torch.Generator().manual_seed({seed}){on_cpu}"
    return writer.text(
        [
            *lines,
            f"real = {writer.output('out', inputs)}[{real_code}]",
            f"direction = torch.randn(real.shape, {rng}).to(real)",
            "model.zero_grad()",
            "(real * direction).sum().backward()",
            "gradients = [p.grad for p in model.parameters() if p.grad is not None]",
            "print(sum(int((~gradient.isfinite()).sum()) for gradient in gradients))  # must be 0",
        ]
    )


def constant_script(
    session: AuditSession, path: CodePath, inputs: Inputs, position: int, other_label: int
) -> str:
    """A script that prints 1 where the loss of a position, by itself, is the same for another label."""
    try:
        writer = ScriptWriter(session, path)
        arguments = writer.arguments(inputs)
        lines = [
            *writer.call("first", arguments),
            f"call.label = {other_label}",
            *writer.call("second", arguments),
        ]
    except UnwritableError:
        return ""
    first, second = (f"{writer.output(name, inputs)}[:, {position}]" for name in ("first", "second"))
    return writer.text([*lines, f"print(int(torch.equal({first}, {second})))  # must be 0"])


class ScriptWriter:
    """Code for the calls of a model on a path. Raises UnwritableError where they have none."""

    def __init__(self, session: AuditSession, path: CodePath) -> None:
        adapter = session.adapter
        assert adapter.selector is not None
        self.adapter = adapter
        self.path = path
        self.num_randomized = session.num_randomized
        self.imports = ["import torch"]
        self.contexts: list[str] = []
        if path.autocast:
            self.contexts.append("torch.autocast(next(model.parameters()).device.type, torch.bfloat16)")
        self.variables: list[tuple[Tensor, str]] = []  # arguments that have a name in the script
        self.known_code: Callable[[Any], str] = lambda value: ""  # for further values that have one
        self.wrappers: list[Wrapper] = []
        function: Any = adapter.entry_point
        while isinstance(function, Wrapper):
            self.wrappers.append(function)
            function = function.function
        self.batch_call = function if isinstance(function, call_forms.BatchCall) else None
        if self.batch_call is not None:
            function = self.batch_call.function
        self.inner_function = self._inner_code(function)
        self.function = "call" if self.wrappers or self.inner_function != "model" else "model"

    def _inner_code(self, function: Any) -> str:
        """Code for what is called within the wrappers."""
        adapter = self.adapter
        if function is adapter.target or function is adapter.module:
            return "model"
        if getattr(function, "__qualname__", "").startswith("training_step."):
            return "lambda batch: model.training_step(batch, 0)"
        if adapter.form is not None:
            return "adapter.bind(model)  # adapter: the one that the audit was given"
        if getattr(function, "__self__", None) is adapter.module and not self.path.wrapped:
            return f"model.{function.__name__}"
        raise UnwritableError

    # -- the model

    def text(self, lines: list[str]) -> str:
        """The script: the model in the state of the path, and these lines."""
        model_lines = self._model_lines()  # which may import something
        return "\n".join([*dict.fromkeys(self.imports), *model_lines, *lines])

    def _model_lines(self) -> list[str]:
        path = self.path
        lines = [MODEL_COMMENT]
        device_option = ""
        if self.adapter.device.type != "cpu":
            lines.append(f"torch.set_default_device({str(self.adapter.device)!r})")
            device_option = ', device="cpu"'
        if self.adapter.module is None:
            return [*lines, *self._call_lines()]
        if self.adapter.is_wrapped and not path.wrapped:
            self.imports.append("from keepleft.auditing.introspect import unwrap")
            lines.append("model = unwrap(model)")
        if self.num_randomized:
            lines += [
                "zeros = torch.Generator().manual_seed(0)  # weights of zeros hide what lies behind them",
                "for p in model.parameters():",
                "    if p.is_floating_point() and p.numel() and not p.count_nonzero():",
                "        width = p.shape[-1] if p.dim() > 1 else 4",
                f"        value = torch.randn(p.shape, generator=zeros{device_option})",
                "        p.data = value.to(p) / width**0.5 * 0.5",
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
        return [*lines, *self._call_lines()]

    def _call_lines(self) -> list[str]:
        """How the model is called, where that is not `model(…)`."""
        if self.function == "model":
            return []
        lines = [f"call = {self.inner_function}"]
        if self.batch_call is not None and self.wrappers:
            self.imports.append("from keepleft.auditing.call_forms import BatchCall")
            arguments_code = container_code(self.batch_call.arguments, self.code)
            lines.append(f"call = BatchCall(call, {arguments_code})")
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

    # -- its calls

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """The arguments of a call; embeddings are left to be looked up in the script."""
        return self.adapter.arguments(inputs, self.path.but(embeddings=False))

    def define(self, name: str, value: Tensor) -> str:
        """A line that gives a tensor a name, by which later calls take it."""
        line = f"{name} = {literal(value)}"
        self.variables.append((value, name))
        return line

    def call(
        self, name: str, arguments: Mapping[str, Any], context: str = "", *, with_grad: bool = False
    ) -> list[str]:
        """Lines that call the model, and keep what it returns under a name."""
        grad_mode = "torch.enable_grad()" if with_grad else "torch.no_grad()"
        contexts = ", ".join([grad_mode, *self.contexts, *([context] if context else [])])
        return [
            f"torch.manual_seed({SEED})",
            f"with {contexts}:",
            f"    {name} = {self.call_code(arguments)}",
        ]

    def call_code(self, arguments: Mapping[str, Any], *args: Any) -> str:
        """The expression that calls the model."""
        arguments = dict(arguments)
        codes: dict[str, str] = {}
        if self.path.embeddings:
            tokens = arguments.pop(self.adapter.main_argument)
            codes[self.adapter.signature.argument_for("embeddings") or ""] = self._lookup_code(tokens)
        if self.batch_call is not None and not self.wrappers:
            arguments = self.batch_call.pack(arguments)
        positional_only = self.adapter.signature.positional_only
        positional = [*args, *(arguments.pop(key) for key in positional_only if key in arguments)]
        codes |= {key: self.code(value) for key, value in arguments.items()}
        return (
            f"{self.function}("
            + ", ".join([*map(self.code, positional), *(f"{key}={code}" for key, code in codes.items())])
            + ")"
        )

    def _lookup_code(self, tokens: Tensor) -> str:
        """Code for the embeddings of tokens."""
        table = self.adapter.embedding_table
        modules = self.adapter.module.named_modules() if self.adapter.module is not None else ()
        for name, submodule in modules:
            if submodule is table:
                return f"model.get_submodule({name!r})({self.code(tokens)})"
        raise UnwritableError

    def code(self, value: Any) -> str:
        """Code for an argument: its name where it has one."""
        if known := self.known_code(value):
            return known
        if isinstance(value, Tensor):
            for variable, name in self.variables:
                if _same(variable, value):
                    return name
        if is_dataclass(value) or hasattr(value, "_fields"):
            parts = [f"{key}={self.code(part)}" for key, part in outputs.container_parts(value)]
            return f"{self._class_code(type(value))}({', '.join(parts)})"
        return container_code(value, self.code) or literal(value)

    def _class_code(self, cls: type) -> str:
        """The name of the class of a batch, which is imported where it can be."""
        if "." in cls.__qualname__:
            raise UnwritableError
        if cls.__module__ == "__main__":
            return cls.__name__
        if importlib.util.find_spec(cls.__module__) is None:
            raise UnwritableError
        self.imports.append(f"from {cls.__module__} import {cls.__name__}")
        return cls.__name__

    def output(self, name: str, inputs: Inputs) -> str:
        """Code for the audited output (B, T, …) in what a call has returned."""
        assert self.adapter.selector is not None
        return select_code(self.adapter.selector, name, *inputs.tokens.shape[:2])

    def position_code(
        self, name: str, out: Any, values: Tensor, at: tuple[int, int], sizes: tuple[int, int]
    ) -> str:
        """Code for the values at (row, position) of the output with these (rows, positions)."""
        for selector in (outputs.selector(out, *sizes), self.adapter.selector):
            with suppress(KeyError, IndexError, AttributeError, TypeError, RuntimeError):
                if selector is not None and _is_equal(selector(out, *sizes)[at], values):
                    return f"{select_code(selector, name, *sizes)}[{at[0]}, {at[1]}]"
        for key_path, tensor in outputs.float_tensors(out):
            for index in (at, (at[0], -1), at[:1]):
                with suppress(IndexError):
                    if _is_equal(tensor[index], values):
                        return f"{name}{outputs.as_code(out, key_path)}[{', '.join(map(str, index))}]"
        raise UnwritableError


def select_code(selector: Selector, name: str, batch: int, length: int) -> str:
    """Code for (B, T, …) in what a call has returned."""
    code = name + selector.code
    if selector.flat:
        sizes = (batch, length) if selector.batch_axis == 0 else (length, batch)
        code += f".unflatten(0, {sizes})"
    if (selector.batch_axis, selector.time_axis) != (0, 1):
        code += f".movedim(({selector.batch_axis}, {selector.time_axis}), (0, 1))"
    return code


def _is_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.isclose(a, b, rtol=0, atol=0, equal_nan=True).all())


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu()))


def container_code(value: Any, code: Callable[[Any], str]) -> str:
    """Code for a mapping, a tuple or a list; empty for anything else."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {code(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(map(code, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(code, value))}]"
    return ""


def literal(value: Any) -> str:
    """Code for an argument. Raises UnwritableError for what has none, or a very long one."""
    if isinstance(value, Tensor):
        if value.numel() > MAX_ELEMENTS or value.dtype == torch.complex64:
            raise UnwritableError
        plain = value.detach().cpu()
        default = {torch.float32, torch.int64, torch.bool}
        dtype = "" if plain.dtype in default else f", dtype={plain.dtype}"
        numbers = str(plain.tolist()).replace("inf", "torch.inf").replace("nan", "torch.nan")
        return f"torch.tensor({numbers}{dtype})"
    if container := container_code(value, literal):
        return container
    if is_dataclass(value) or not isinstance(value, str | int | float | bool | None | torch.dtype):
        raise UnwritableError
    return repr(value)
