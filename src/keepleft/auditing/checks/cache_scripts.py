"""Scripts of cache findings: one full pass, the same text in pieces, and the difference at the reader."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import outputs, rounding
from keepleft.auditing.cache_adapters import SPARE_SLOTS, CacheCallables, InferenceParams
from keepleft.auditing.checks.reproducer import UP_TO_ROUNDING, ScriptWriter, UnwritableError
from keepleft.auditing.code_paths import CodePath
from keepleft.auditing.inputs import Inputs
from keepleft.auditing.model_adapter import CallError
from keepleft.auditing.session import AuditSession

# what a call gives, by the name of its method; a piece of the text's output where none fits
_RESULT_NAMES = (
    (re.compile(r"memory|^encode"), "memory"),
    (re.compile(r"cache|state|hidden|reorder|select|keep|crop|truncate|trim|roll|rewind"), "state"),
)


@dataclass(frozen=True)
class CachedText:
    """A text that is read in one pass, and in pieces from a cache."""

    inputs: Inputs  # of the full pass
    decode: Callable[[], Tensor]  # the pieces, up to the one that is compared: its output (B, n, …)
    comment: str  # how the pieces are read
    length: int  # how much of the text is read when the pieces end


def cache_script(
    session: AuditSession,
    path: CodePath,
    callables: CacheCallables,
    texts: Sequence[CachedText],
    row: int,
    reader: int,
    size: float,
) -> str:
    """A script that prints by how much the last of these texts differs at a position of a row.

    size: of the difference that was found. Texts before it are read too where too little differs without
    them: a cache may remember them. Empty where a call cannot be written down, or nothing differs when the
    calls are made again.
    """
    adapter = session.adapter
    for num_earlier in dict.fromkeys((0, 1, len(texts) - 1)):
        if num_earlier >= len(texts):
            continue
        for full_first in (True, False):
            with suppress(UnwritableError, CallError), adapter.on_path(path):
                adapter.state_snapshot = []  # a script restores no buffers
                transcript = CallTranscript(ScriptWriter(session, path), callables)
                adapter.observer = transcript
                try:
                    code = _transcribe(transcript, texts[-1 - num_earlier :], row, reader, full_first)
                finally:
                    adapter.observer = None
                if transcript.change >= size / 10:
                    return code
    return ""


def _transcribe(
    transcript: CallTranscript, texts: Sequence[CachedText], row: int, reader: int, full_first: bool
) -> str:
    """The script of some texts. full_first: the full pass before the pieces."""
    *earlier, text = texts
    for other in earlier:
        transcript.note("another text before")
        transcript.begin(other.inputs)
        transcript.run_full(other.inputs)
        other.decode()
    transcript.begin(text.inputs)
    if full_first:
        transcript.note("in one pass")
        full = transcript.run_full(text.inputs)
    transcript.note(text.comment)
    pieces = transcript.piece_at(text, row, reader)
    if not full_first:
        transcript.note("in one pass")
        full = transcript.run_full(text.inputs)
    expected = full[row, reader]
    code = transcript.full_code(text.inputs, expected, row, reader)
    transcript.change = float(rounding.max_change(expected[None, None], pieces.values[None, None]).max())
    transcript.change /= rounding.scale(full)
    return transcript.text(f"print(float(({code} - {pieces.code}).abs().max())){UP_TO_ROUNDING}")


@dataclass(frozen=True)
class _Place:
    """The values at one position, and the code for them."""

    code: str
    values: Tensor


@dataclass
class CallTranscript:
    """Writes down the calls of a model and of its cache as they are made.

    An argument that an earlier call gave is written as that part of its result: piece_0.past_key_values.
    """

    writer: ScriptWriter
    callables: CacheCallables
    change: float = 0.0  # at the reader, relative to the largest output
    lines: list[str] = field(default_factory=list)
    results: list[tuple[str, Any]] = field(default_factory=list)  # of all calls, by name
    _objects: list[tuple[Any, str]] = field(default_factory=list)  # caches and states, and the code for them
    _tensors: dict[str, Tensor] = field(default_factory=dict)  # the arguments of the full pass
    _length: int = 0  # of the text
    _num_texts: int = 0
    _call: tuple[str, str] = ("", "")  # the pending call, and the name for what it gives

    def __post_init__(self) -> None:
        self.writer.known_code = self._known_code

    def begin(self, inputs: Inputs) -> None:
        """Give the tensors of a text names, so that its pieces can be written as slices of them."""
        self._length = inputs.tokens.shape[1]
        self._num_texts += 1
        suffix = "" if self._num_texts == 1 else f"_{self._num_texts}"
        for name, value in self.writer.arguments(inputs).items():
            if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
                self.lines.append(self.writer.define(name + suffix, value))
                self._tensors[name + suffix] = value

    def note(self, comment: str) -> None:
        self.lines.append(f"# {comment}")

    def text(self, last_line: str) -> str:
        """The script."""
        given = [name for name, function in self._named_callables() if f"{name}(" in "\n".join(self.lines)]
        header = [f"# {', '.join(given)}: given to the audit"] if given else []
        contexts = ", ".join(["torch.no_grad()", *self.writer.contexts])
        return self.writer.text(
            [*header, f"with {contexts}:", *(f"    {line}" for line in self.lines), last_line]
        )

    # -- observing calls

    def before_call(
        self, function: Callable[..., Any], arguments: Mapping[str, Any], args: tuple[Any, ...]
    ) -> None:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        adapter = self.writer.adapter
        if function in (adapter.entry_point, adapter.target, adapter.module):
            code = self.writer.call_code(arguments, *args)
        else:
            callee = next((n for n, given in self._named_callables() if given is function), "")
            if owner is adapter.module:
                callee = f"model.{name}"
            elif owner is not None and self._object_code(owner):
                callee = f"{self._object_code(owner)}.{name}"
            if not callee:
                raise UnwritableError
            codes = [self.writer.code(value) for value in args]
            codes += [f"{key}={self.writer.code(value)}" for key, value in arguments.items()]
            code = f"{callee}({', '.join(codes)})"
        kind = next((kind for pattern, kind in _RESULT_NAMES if pattern.search(name)), "piece")
        self._call = code, kind

    def after_call(self, out: Any) -> None:
        code, kind = self._call
        if out is None:
            self.lines.append(code)
            return
        name = f"{kind}_{sum(result.startswith(kind) for result, _ in self.results)}"
        self.lines.append(f"{name} = {code}")
        self.results.append((name, out))
        self._register(out, name)

    def run_full(self, inputs: Inputs) -> Tensor:
        """The output of the full pass."""
        output = self.writer.adapter.run(inputs, self.writer.path)
        name, out = self.results.pop()
        self.lines[-1] = self.lines[-1].replace(f"{name} = ", "full = ", 1)
        self.results.append(("full", out))
        self._objects = [(value, code) for value, code in self._objects if not code.startswith(name)]
        return output

    def _named_callables(self) -> list[tuple[str, Any]]:
        return [(name, given) for name, given in self.callables._asdict().items() if given is not None]

    # -- code for values

    def _known_code(self, value: Any) -> str:
        """Code for a part of an earlier result, a slice of the text, or an empty cache; '' for others."""
        if code := self._object_code(value):
            return code
        if isinstance(value, Tensor):
            return self._slice_code(value) or self._cast_code(value)
        return self._object_code(value) if self._is_new_cache(value) else ""

    def _object_code(self, value: Any) -> str:
        return next((code for known, code in self._objects if known is value), "")

    def _slice_code(self, value: Tensor) -> str:
        """Code for some of the positions of a tensor of the full pass."""
        for name, tensor in reversed(self._tensors.items()):
            axes = [axis for axis in range(tensor.dim()) if tensor.shape[axis] == self._length]
            if value.dtype != tensor.dtype:
                continue
            if value.shape == tensor.shape and torch.equal(value, tensor):
                return name
            for axis in axes[:1]:
                if value.dim() != tensor.dim():
                    continue
                size = value.shape[axis]
                for start in range(self._length - size + 1):
                    part = tensor.narrow(axis, start, size)
                    if part.shape == value.shape and torch.equal(part, value):
                        return f"{name}[{':, ' * axis}{start or ''}:{start + size}]"
            if value.shape == tensor.shape[:1] and tensor.dim() == 2:
                for position in range(self._length):
                    if torch.equal(tensor[:, position], value):
                        return f"{name}[:, {position}]"
        return ""

    def _cast_code(self, value: Tensor) -> str:
        """Code for a known tensor in another dtype: an empty state in that of the path."""
        for known, code in self._objects:
            is_alike = isinstance(known, Tensor) and known.shape == value.shape
            if is_alike and torch.equal(known.to(value.dtype), value):
                return f"{code}.to({value.dtype})"
        return ""

    def _is_new_cache(self, value: Any) -> bool:
        """Is it an empty cache? Then a line that makes it is written."""
        rows = len(next(iter(self._tensors.values()))) if self._tensors else 0
        if isinstance(value, InferenceParams):
            self.writer.imports.append("from keepleft.auditing.cache_adapters import InferenceParams")
            code = f"InferenceParams({rows}, {self._length})"
        elif type(value).__name__ == "StaticCache" and type(value).__module__.startswith("transformers"):
            self.writer.imports.append("from transformers import StaticCache")
            config = "model.config.get_text_config(decoder=True)"
            code = f"StaticCache(config={config}, max_cache_len={self._length + SPARE_SLOTS})"
        elif isinstance(value, dict | list) and not value:
            code = repr(value)
        else:
            return False
        name = f"cache_{sum(line.startswith('cache_') for line in self.lines)}"
        self.lines.append(f"{name} = {code}")
        self._objects.append((value, name))
        return True

    def _register(self, value: Any, code: str, depth: int = 0) -> None:
        """Remember the code for every object in a result, the outer ones first."""
        if value is None or isinstance(value, str | int | float | bool):
            return
        if not self._object_code(value):
            self._objects.append((value, code))
        if depth < 4 and not isinstance(value, Tensor):
            for key, part in outputs.named_parts(value):
                self._register(part, code + outputs.part_code(value, key), depth + 1)

    # -- the compared position

    def full_code(self, inputs: Inputs, values: Tensor, row: int, reader: int) -> str:
        batch, length = inputs.tokens.shape[:2]
        out = dict(self.results)["full"]
        return self.writer.position_code("full", out, values, (row, reader), (batch, length))

    def piece_at(self, text: CachedText, row: int, reader: int) -> _Place:
        """Read the pieces, and find the reader in the last of them."""
        num_results = len(self.results)
        output = text.decode()
        if output.dim() < 3:
            output = output[:, None]
        position = reader - (text.length - output.shape[1])
        values = output[row, position]
        results = [(name, out) for name, out in self.results[num_results:] if not name.startswith("memory")]
        for name, out in reversed(results[-output.shape[1] :]):
            for at, size in ((position, output.shape[1]), (0, 1)):
                with suppress(UnwritableError):
                    code = self.writer.position_code(name, out, values, (row, at), (len(output), size))
                    return _Place(code, values)
        raise UnwritableError
