"""Where a leak enters: the innermost module whose input is clean at the reader's position and whose output is
not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.auditing.op_counter import op_name
from keepleft.auditing.outputs import named_parts


@dataclass(frozen=True)
class Probe:
    """A run of a model and the place in it that is looked at."""

    run: Callable[..., Any]
    batch: int
    length: int
    row: int
    reader: int | None  # None: the whole row
    # sizes that weights have: an axis of such a size may not be time
    parameter_dims: frozenset[int] = frozenset()
    setup: Callable[[], Any] | None = (
        None  # what leads up to it, and is not looked at; `run` takes what it gives
    )

    def execute(
        self, make_tracer: Callable[[], AbstractContextManager[Any]], with_grad: bool = False
    ) -> None:
        with torch.set_grad_enabled(with_grad):
            setup_args = () if self.setup is None else (self.setup(),)
            with make_tracer():
                self.run(*setup_args)


@dataclass(frozen=True)
class Location:
    """Where it enters, and what kind of part that is."""

    module: str = ""
    module_kind: str = ""  # attention, norm, convolution, routing, recurrence, pooling, or ''


TensorsByKey = dict[tuple[Any, ...], Tensor]  # by the argument or the part of an output that it is


@dataclass
class ModuleCall:
    """One call of one module: what stood at the reader's position before and behind it."""

    name: str
    inputs: TensorsByKey = field(default_factory=dict)
    outputs: TensorsByKey = field(default_factory=dict)
    timeless_outputs: TensorsByKey = field(default_factory=dict)  # outputs without a time axis, whole
    inputs_known: bool = True  # is it known what came in at the reader's position?


def locate(module: nn.Module | None, probe: Probe, other_probe: Probe, tolerance: float = 0.0) -> Location:
    """Compare two runs, part by part, in the order in which parts finish."""
    if module is None:
        return Location()
    try:
        location = _first_difference(module, probe, other_probe, tolerance, False)
        return location or _first_difference(module, probe, other_probe, tolerance, True) or Location()
    except Exception:  # it is a name in a message; a leak is told without it too
        return Location()


def _first_difference(
    module: nn.Module, probe: Probe, other_probe: Probe, tolerance: float, with_grad: bool
) -> Location | None:
    """None where nothing differs, or only what differed before."""
    first_calls = _record_calls(module, probe, with_grad)
    second_calls = _record_calls(module, other_probe, with_grad)
    if [call.name for call in first_calls] != [
        call.name for call in second_calls
    ]:  # experts may be called or not
        common_names = {call.name for call in first_calls} & {call.name for call in second_calls}
        first_calls, second_calls = (
            [call for call in calls if call.name in common_names] for calls in (first_calls, second_calls)
        )
    for call, counterpart in _matched_calls(first_calls, second_calls):
        if (
            call.inputs_known
            and call.outputs
            and _differ(call.outputs, counterpart.outputs, tolerance)
            and not _differ(call.inputs, counterpart.inputs, tolerance)
        ):
            name = call.name or _pooling_module(first_calls, second_calls, tolerance)
            return Location(name, module_kind(submodule(module, name), probe))
    return None


def submodule(module: nn.Module, name: str) -> nn.Module:
    """By its name, in scripted modules too."""
    return dict(module.named_modules())[name]


def _matched_calls(
    first_calls: list[ModuleCall], second_calls: list[ModuleCall]
) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """The calls of the same part in two runs, in turn."""
    calls_by_name: dict[str, list[ModuleCall]] = {}
    for call in second_calls:
        calls_by_name.setdefault(call.name, []).append(call)
    for call in first_calls:
        if calls_by_name.get(call.name):
            yield call, calls_by_name[call.name].pop(0)


def _pooling_module(first_calls: list[ModuleCall], second_calls: list[ModuleCall], tolerance: float) -> str:
    """Nothing below the whole mixes positions in its own output: a part that gathers over time may be what
    does it.
    """
    for call, counterpart in _matched_calls(first_calls, second_calls):
        if (
            call.name
            and call.timeless_outputs
            and call.inputs
            and _differ(call.timeless_outputs, counterpart.timeless_outputs, tolerance)
            and not _differ(call.inputs, counterpart.inputs, tolerance)
        ):
            return call.name
    return ""


def _differ(tensors: TensorsByKey, other_tensors: TensorsByKey, tolerance: float) -> bool:
    """A state that only one of two runs is given says nothing."""
    for key, a in tensors.items():
        b = other_tensors.get(key)
        if b is None or a.shape != b.shape:
            continue
        equal = (a == b) | (a.isnan() & b.isnan())
        if not equal.all() and (tolerance == 0 or not _is_close(a, b, tolerance)):
            return True
    return False


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.isnan().any() or b.isnan().any():
        return False
    scale = max(float(a.abs().max()), float(b.abs().max()), 1e-30)
    return float((a - b).abs().max()) <= tolerance * scale


def _record_calls(module: nn.Module, probe: Probe, with_grad: bool = False) -> list[ModuleCall]:
    """What every part saw and gave at one place, in the order in which they finish."""
    finished: list[ModuleCall] = []
    open_calls: list[tuple[ModuleCall, TensorsByKey, set[int]]] = []

    def make_pre_hook(name: str) -> Callable[..., None]:
        def pre_hook(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = ModuleCall(name)
            arguments: dict[Any, Any] = dict(enumerate(args)) | kwargs
            call.inputs = _reader_slices(arguments, probe, include_ids=True)
            call.inputs_known = bool(call.inputs) or not any(
                True for _ in _named_tensors(arguments, include_ids=True)
            )
            open_calls.append((call, *_end_aligned_slices({} if call.inputs else arguments, probe)))

        return pre_hook

    def forward_hook(submodule: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call, end_aligned, lengths = open_calls.pop()
        call.outputs = _reader_slices(out, probe)
        if end_aligned and not call.outputs:
            end_aligned_outputs, output_lengths = _end_aligned_slices(out, probe)
            if end_aligned_outputs and len(lengths | output_lengths) == 1:
                call.inputs = end_aligned
                call.outputs = end_aligned_outputs
                call.inputs_known = True
        call.timeless_outputs = {
            key_path: tensor.detach().float().clone()
            for key_path, tensor in _named_tensors(out)
            if _at_reader(tensor, probe) is None
            and tensor.numel() < 1 << 20
            and not _is_attention_map(tensor, probe)
            and not _has_long_axis(tensor, probe)
        }
        finished.append(call)

    @contextmanager
    def register_hooks() -> Iterator[None]:
        hooks = []
        try:
            for name, submodule in module.named_modules():
                with suppress(RuntimeError, NotImplementedError, AttributeError):  # scripted parts refuse
                    hooks.append(submodule.register_forward_pre_hook(make_pre_hook(name), with_kwargs=True))
                    hooks.append(submodule.register_forward_hook(forward_hook, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    probe.execute(register_hooks, with_grad)
    return finished


def _named_tensors(
    value: Any, depth: int = 0, include_ids: bool = False
) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Each with the way to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or (include_ids and value.dtype in (torch.int64, torch.int32)):
            yield (), value
    elif depth < 4:
        for key, child in named_parts(value):
            for key_path, tensor in _named_tensors(child, depth + 1, include_ids):
                yield (key, *key_path), tensor


def _reader_slices(value: Any, probe: Probe, *, include_ids: bool = False) -> TensorsByKey:
    slices = (
        (key_path, _at_reader(tensor, probe))
        for key_path, tensor in _named_tensors(value, include_ids=include_ids)
    )
    return {
        key_path: tensor.detach().double().flatten().clone()
        for key_path, tensor in slices
        if tensor is not None
    }


def _end_aligned_slices(value: Any, probe: Probe) -> tuple[TensorsByKey, set[int]]:
    """Where something stands before the text (a learned prompt), its positions are counted from the end: what
    stands at the reader's, and the lengths that there are.
    """
    tensors: TensorsByKey = {}
    lengths: set[int] = set()
    for key_path, tensor in _named_tensors(value):
        n = tensor.shape[1] if tensor.dim() == 3 and tensor.shape[0] == probe.batch else 0
        if probe.reader is not None and n > probe.length > 1:
            lengths.add(n)
            tensors[key_path] = (
                tensor[probe.row, probe.reader + n - probe.length].detach().double().flatten().clone()
            )
    return tensors, lengths


def _has_long_axis(tensor: Tensor, probe: Probe) -> bool:
    """Has it an axis at least as long as the text that is no width: time with something at its ends?"""
    return any(n >= probe.length and n not in probe.parameter_dims for n in tensor.shape[1:])


def _is_attention_map(tensor: Tensor, probe: Probe) -> bool:
    """A table of every position against every other: its row may move in what will be hidden."""
    num_time_axes = sum(n == probe.length for n in tensor.shape)
    if (
        probe.length in probe.parameter_dims
        and tensor.shape[:2] == (probe.batch, probe.length)
        and tensor.dim() == 3
    ):
        return False  # (B, T, D) with as many features as positions
    return num_time_axes > 1 and probe.length > 1


def _at_reader(tensor: Tensor, probe: Probe) -> Tensor | None:
    """What stands at the reader's position, if the tensor has a time axis."""
    shape = tuple(tensor.shape)
    b = probe.batch
    t = probe.length
    if probe.reader is None:
        return _batch_row(tensor, probe)
    if (
        _is_attention_map(tensor, probe)
        or not shape
        or (len(shape) == 2 and shape[1] == t and t in probe.parameter_dims and t > 1)
    ):
        return None
    if shape[0] == b and t in shape[1:]:
        return tensor[probe.row].select(shape[1:].index(t), probe.reader)
    if shape[:2] == (t, b):
        return tensor[probe.reader, probe.row]
    if shape[0] == b * t:
        return tensor[probe.row * t + probe.reader]
    if shape[0] % b == 0 and t in shape[1:]:
        row_tensor = tensor.reshape(b, shape[0] // b, *shape[1:])[probe.row]
        return row_tensor.select(1 + shape[1:].index(t), probe.reader)
    return None


def _batch_row(tensor: Tensor, probe: Probe) -> Tensor | None:
    """All that belongs to one row of a batch."""
    shape = tuple(tensor.shape)
    b = probe.batch
    t = probe.length
    if not shape or b < 2:
        return None
    if shape[0] % b == 0 and (shape[:2] != (t, b) or b == t):
        return tensor.reshape(b, -1)[probe.row]
    return tensor[:, probe.row] if shape[:2] == (t, b) else None


class _OpRecorder(TorchDispatchMode):
    """Which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.op_names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op_names.add(op_name(func))
        return func(*args, **(kwargs or {}))


def module_kind(module: nn.Module, probe: Probe) -> str:
    """What kind of part it is, from its type, or else from the operations that it calls."""
    kinds_by_type: tuple[tuple[Any, str], ...] = (
        (nn.MultiheadAttention, "attention"),
        (nn.modules.conv._ConvNd, "convolution"),
        (nn.RNNBase, "recurrence"),
        ((nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm), "norm"),
    )
    for module_type, kind in kinds_by_type:
        if isinstance(module, module_type):
            return kind
    op_names: set[str] = set()
    recorder = _OpRecorder()

    def pre_hook(*_: Any) -> None:
        recorder.__enter__()

    def forward_hook(*_: Any) -> None:
        recorder.__exit__(None, None, None)
        op_names.update(recorder.op_names)

    hooks = [module.register_forward_pre_hook(pre_hook), module.register_forward_hook(forward_hook)]
    try:
        probe.execute(nullcontext)
    except Exception:  # it is a word in a message; without it the message is shorter
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    if any("scaled_dot_product" in op for op in op_names) or (
        "_softmax" in op_names and op_names & {"bmm", "baddbmm", "mm"}
    ):
        return (
            "routing"
            if "topk" in op_names and "bmm" not in op_names and not any("scaled" in op for op in op_names)
            else "attention"
        )
    if op_names & {"topk", "sort", "argmax"}:
        return "routing"
    if any("convolution" in op for op in op_names):
        return "convolution"
    if op_names & {"native_layer_norm", "native_group_norm", "native_batch_norm", "var", "var_mean", "std"}:
        return "norm"
    if op_names & {"mean", "sum", "amax", "max", "cumsum", "_fft_r2c", "_fft_c2c"}:
        return "pooling"
    return ""


class OpTracer:
    """The line of code in which an operation first gives something else at the reader's position."""

    def __init__(self, probe: Probe, module: nn.Module) -> None:
        self.probe = probe
        self.module = module
        self.records: list[tuple[str, str, Tensor | None]] = []

    @contextmanager
    def trace(self) -> Iterator[None]:
        tracer = self

        class RecordingMode(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor) and out.is_floating_point():
                    reader_slice = _at_reader(out, tracer.probe)
                    tracer.records.append(
                        (
                            _caller_line(),
                            getattr(func, "__name__", str(func)),
                            None
                            if reader_slice is None
                            else reader_slice.detach().double().flatten().clone(),
                        )
                    )
                return out

        mode = RecordingMode()
        hooks = [
            self.module.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
            self.module.register_forward_hook(lambda *_: mode.__exit__(None, None, None)),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _caller_line() -> str:
    """The nearest line of code that is not PyTorch's or ours."""
    frame = sys._getframe(2)
    while frame is not None:
        filename = frame.f_code.co_filename
        if "/torch/" not in filename and "keepleft/auditing" not in filename:
            return f"{filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def source_line(module: nn.Module, probe: Probe, other_probe: Probe, tolerance: float = 0.0) -> str:
    """The first operation inside a module whose result moves at the reader's position: its line, and its
    name.
    """
    return _first_differing_line(module, probe, other_probe, tolerance, False) or _first_differing_line(
        module, probe, other_probe, tolerance, True
    )


def _first_differing_line(
    module: nn.Module, probe: Probe, other_probe: Probe, tolerance: float, with_grad: bool
) -> str:
    tracers = [OpTracer(probe, module), OpTracer(other_probe, module)]
    for tracer in tracers:
        try:
            tracer.probe.execute(tracer.trace, with_grad)
        except Exception:  # it is a word in a message; without it the message is shorter
            return ""
    for (line, op, a), (other_line, other_op, b) in zip(tracers[0].records, tracers[1].records, strict=False):
        if (line, op) != (other_line, other_op):
            return ""
        if a is not None and b is not None and _differ({(): a}, {(): b}, tolerance):
            return f"{line} ({op})" if line else ""
    return ""


def first_nan_module(module: nn.Module | None, probe: Probe) -> str:
    """The innermost module that is given numbers at a place and gives none back."""
    if module is None:
        return ""
    try:
        calls = _record_calls(module, probe)
    except Exception:  # it is a name in a message; a leak is told without it too
        return ""
    for call in calls:
        has_nan = any(out.isnan().any() for out in (*call.outputs.values(), *call.timeless_outputs.values()))
        if has_nan and call.inputs_known and not any(x.isnan().any() for x in call.inputs.values()):
            return call.name
    return ""


def first_nan_backward(module: nn.Module | None, run: Callable[[], Tensor]) -> str:
    """The innermost module through which gradients turn to NaN; `run` gives the loss."""
    if module is None:
        return ""
    names: list[str] = []
    hooks: list[Any] = []
    open_calls: list[dict[str, Any]] = []

    def clone_with_hook(value: Any, hook: Callable[[Tensor], None], depth: int = 0) -> Any:
        """The same with every tensor that has a gradient behind a copy of its own: what flows into it comes
        through this part alone.
        """
        if isinstance(value, Tensor):
            if not (value.requires_grad and value.is_floating_point()):
                return value
            value = value.clone()
            value.register_hook(hook)
            return value
        if type(value) in (tuple, list) and depth < 2:
            return type(value)(clone_with_hook(item, hook, depth + 1) for item in value)
        return value

    def make_pre_hook(name: str) -> Callable[..., Any]:
        def pre_hook(submodule: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            call_state = {"finite": True}
            open_calls.append(call_state)

            def input_grad_hook(gradient: Tensor) -> None:
                if call_state["finite"] and gradient.isnan().any():
                    names.append(name)

            return clone_with_hook(args, input_grad_hook), {
                key: clone_with_hook(value, input_grad_hook) for key, value in kwargs.items()
            }

        return pre_hook

    def forward_hook(submodule: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call_state = open_calls.pop()

        def output_grad_hook(gradient: Tensor) -> None:
            call_state["finite"] = call_state["finite"] and bool(gradient.isfinite().all())

        for _, tensor in _named_tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(output_grad_hook)

    try:
        for name, submodule in module.named_modules():
            hooks.append(submodule.register_forward_pre_hook(make_pre_hook(name), with_kwargs=True))
            hooks.append(submodule.register_forward_hook(forward_hook, with_kwargs=True))
        torch.autograd.backward(run())
    except Exception:  # it changes things in place, which hooks do not bear, or bears no hooks
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    return names[0] if names else ""
