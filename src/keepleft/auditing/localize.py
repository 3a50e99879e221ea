"""Where a leak enters: the innermost module whose input is the same in two runs at the reader's position and
whose output is not, and the line of code in it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.auditing.call_forms import LOSS_FUNCTIONS, NORMALIZERS
from keepleft.auditing.interventions import op_name
from keepleft.auditing.outputs import container_parts

MAX_TIMELESS_ELEMENTS = 1 << 20  # larger outputs without a time axis are not compared


@dataclass(frozen=True)
class Probe:
    """A run of a model, and the position in it that is watched."""

    run: Callable[..., Any]
    batch: int
    length: int
    row: int
    reader: int | None  # None: the whole row
    # dimensions of weights: an axis of such a size may not be time
    parameter_dims: frozenset[int] = frozenset()
    # what leads up to the run and is not watched; `run` takes its result
    setup: Callable[[], Any] | None = None

    def execute(
        self, make_tracer: Callable[[], AbstractContextManager[Any]], with_grad: bool = False
    ) -> None:
        """Run inside a tracer's context."""
        with torch.set_grad_enabled(with_grad):
            setup_args = () if self.setup is None else (self.setup(),)
            with make_tracer():
                self.run(*setup_args)


@dataclass(frozen=True)
class Location:
    """The module where a leak enters; empty where it is not known, or the model itself."""

    module: str = ""
    module_kind: str = ""  # attention, norm, convolution, routing, recurrence, pooling, or ''


TensorsByKey = dict[tuple[Any, ...], Tensor]  # by the keys that lead to them in arguments or outputs


@dataclass
class ModuleCall:
    """One call of one module: its inputs and outputs at the reader's position."""

    name: str
    inputs: TensorsByKey = field(default_factory=dict)
    outputs: TensorsByKey = field(default_factory=dict)
    timeless_outputs: TensorsByKey = field(default_factory=dict)  # outputs without a time axis, all of them
    inputs_known: bool = True  # do the inputs show what came in at the reader's position?


# -- the module --------------------------------------------------------------------------------


def locate(module: nn.Module | None, probe: Probe, other_probe: Probe, tolerance: float = 0.0) -> Location:
    """Compare two runs module by module, in the order in which calls finish. Never raises: a leak is reported
    without its location too.
    """
    if module is None:
        return Location()
    try:
        location = _first_difference(module, probe, other_probe, tolerance, with_grad=False)
        # the fused Transformer layers of PyTorch bypass their submodules unless gradients are on
        location = location or _first_difference(module, probe, other_probe, tolerance, with_grad=True)
        return location or Location()
    except Exception:
        return Location()


def _first_difference(
    module: nn.Module, probe: Probe, other_probe: Probe, tolerance: float, *, with_grad: bool
) -> Location | None:
    """None where no module gives another output for the same input."""
    calls = _record_calls(module, probe, with_grad)
    other_calls = _record_calls(module, other_probe, with_grad)
    names, other_names = ([call.name for call in run_calls] for run_calls in (calls, other_calls))
    if names != other_names:  # experts may be called or not
        common_names = set(names) & set(other_names)
        calls = [call for call in calls if call.name in common_names]
        other_calls = [call for call in other_calls if call.name in common_names]
    for call, counterpart in _matched_calls(calls, other_calls):
        if (
            call.inputs_known
            and call.outputs
            and _differ(call.outputs, counterpart.outputs, tolerance)
            and not _differ(call.inputs, counterpart.inputs, tolerance)
        ):
            name = call.name or _pooling_module(calls, other_calls, tolerance)
            return Location(name, module_kind(submodule(module, name), probe))
    return None


def submodule(module: nn.Module, name: str) -> nn.Module:
    """By its name, in scripted modules too."""
    return dict(module.named_modules())[name]


def _matched_calls(
    calls: list[ModuleCall], other_calls: list[ModuleCall]
) -> Iterator[tuple[ModuleCall, ModuleCall]]:
    """The n-th call of each module in one run, with its n-th call in the other."""
    others_by_name: dict[str, list[ModuleCall]] = {}
    for call in other_calls:
        others_by_name.setdefault(call.name, []).append(call)
    for call in calls:
        if others_by_name.get(call.name):
            yield call, others_by_name[call.name].pop(0)


def _pooling_module(calls: list[ModuleCall], other_calls: list[ModuleCall], tolerance: float) -> str:
    """Where only the model itself mixes positions: the first module that pools over time, if there is one."""
    for call, counterpart in _matched_calls(calls, other_calls):
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
    """Does any tensor differ from the one under the same keys? One that only one run has is no difference."""
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


def first_nan_module(module: nn.Module | None, probe: Probe) -> str:
    """The innermost module with NaN in its output at a position and none in its input; '' where there is none
    or it cannot be told.
    """
    if module is None:
        return ""
    try:
        calls = _record_calls(module, probe)
    except Exception:  # a leak is reported without its location too
        return ""
    for call in calls:
        has_nan = any(out.isnan().any() for out in (*call.outputs.values(), *call.timeless_outputs.values()))
        if has_nan and call.inputs_known and not any(x.isnan().any() for x in call.inputs.values()):
            return call.name
    return ""


def first_nan_backward(module: nn.Module | None, run: Callable[[], Tensor]) -> str:
    """The innermost module whose output gradients are finite and whose input gradients are NaN; '' where it
    cannot be told. `run` gives the loss.
    """
    if module is None:
        return ""
    names: list[str] = []
    hooks: list[Any] = []
    open_calls: list[dict[str, bool]] = []

    def clone_with_hook(value: Any, hook: Callable[[Tensor], None], depth: int = 0) -> Any:
        """Clone every tensor that has a gradient, so that the hook sees the gradient through this module
        alone.
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
            output_gradients = {"finite": True}
            open_calls.append(output_gradients)

            def input_grad_hook(gradient: Tensor) -> None:
                if output_gradients["finite"] and gradient.isnan().any():
                    names.append(name)

            return clone_with_hook(args, input_grad_hook), {
                key: clone_with_hook(value, input_grad_hook) for key, value in kwargs.items()
            }

        return pre_hook

    def forward_hook(submodule: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        output_gradients = open_calls.pop()

        def output_grad_hook(gradient: Tensor) -> None:
            output_gradients["finite"] = output_gradients["finite"] and bool(gradient.isfinite().all())

        for _, tensor in _named_tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(output_grad_hook)

    try:
        for name, submodule in module.named_modules():
            hooks.append(submodule.register_forward_pre_hook(make_pre_hook(name), with_kwargs=True))
            hooks.append(submodule.register_forward_hook(forward_hook, with_kwargs=True))
        torch.autograd.backward(run())
    except Exception:  # hooks are refused, or a module changes its clones in place
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    return names[0] if names else ""


# -- what a module call shows at the reader's position -----------------------------------------


def _record_calls(module: nn.Module, probe: Probe, with_grad: bool = False) -> list[ModuleCall]:
    """Every call of a submodule, in the order in which they finish."""
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
        call, end_aligned_inputs, lengths = open_calls.pop()
        call.outputs = _reader_slices(out, probe)
        if end_aligned_inputs and not call.outputs:
            end_aligned_outputs, output_lengths = _end_aligned_slices(out, probe)
            if end_aligned_outputs and len(lengths | output_lengths) == 1:
                call.inputs = end_aligned_inputs
                call.outputs = end_aligned_outputs
                call.inputs_known = True
        call.timeless_outputs = {
            key_path: tensor.detach().float().clone()
            for key_path, tensor in _named_tensors(out)
            if _at_reader(tensor, probe) is None
            and tensor.numel() < MAX_TIMELESS_ELEMENTS
            and not _is_attention_map(tensor, probe)
            and not _has_long_axis(tensor, probe)
        }
        finished.append(call)

    @contextmanager
    def register_hooks() -> Iterator[None]:
        hooks = []
        try:
            for name, submodule in module.named_modules():
                # scripted modules refuse hooks
                with suppress(RuntimeError, NotImplementedError, AttributeError):
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
    """Floating tensors, and integer ones where asked for, each with the keys that lead to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or (include_ids and value.dtype in (torch.int64, torch.int32)):
            yield (), value
    elif depth < 4:
        for key, child in container_parts(value):
            for key_path, tensor in _named_tensors(child, depth + 1, include_ids):
                yield (key, *key_path), tensor


def _reader_slices(value: Any, probe: Probe, *, include_ids: bool = False) -> TensorsByKey:
    """Of every tensor that has a time axis, the values at the reader's position."""
    slices = (
        (key_path, _at_reader(tensor, probe))
        for key_path, tensor in _named_tensors(value, include_ids=include_ids)
    )
    return {key_path: _flat_copy(tensor) for key_path, tensor in slices if tensor is not None}


def _end_aligned_slices(value: Any, probe: Probe) -> tuple[TensorsByKey, set[int]]:
    """Where something is prepended to the sequence (a learned prompt), positions are counted from the end:
    the values at the reader's position, and the lengths of the tensors.
    """
    tensors: TensorsByKey = {}
    lengths: set[int] = set()
    for key_path, tensor in _named_tensors(value):
        n = tensor.shape[1] if tensor.dim() == 3 and tensor.shape[0] == probe.batch else 0
        if probe.reader is not None and n > probe.length > 1:
            lengths.add(n)
            tensors[key_path] = _flat_copy(tensor[probe.row, probe.reader + n - probe.length])
    return tensors, lengths


def _flat_copy(tensor: Tensor) -> Tensor:
    return tensor.detach().double().flatten().clone()


def _at_reader(tensor: Tensor, probe: Probe) -> Tensor | None:
    """The values at the reader's position; None where the tensor has no time axis."""
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
    """All values of one row of the batch; None where there is no batch axis."""
    shape = tuple(tensor.shape)
    b = probe.batch
    t = probe.length
    if not shape or b < 2:
        return None
    if shape[0] % b == 0 and (shape[:2] != (t, b) or b == t):
        return tensor.reshape(b, -1)[probe.row]
    return tensor[:, probe.row] if shape[:2] == (t, b) else None


def _has_long_axis(tensor: Tensor, probe: Probe) -> bool:
    """Is any axis at least as long as the sequence and no dimension of a weight? It may be time with
    something prepended.
    """
    return any(n >= probe.length and n not in probe.parameter_dims for n in tensor.shape[1:])


def _is_attention_map(tensor: Tensor, probe: Probe) -> bool:
    """A table of every position against every other: its row may change in entries that are masked later."""
    num_time_axes = sum(n == probe.length for n in tensor.shape)
    if (
        probe.length in probe.parameter_dims
        and tensor.shape[:2] == (probe.batch, probe.length)
        and tensor.dim() == 3
    ):
        return False  # (B, T, D) with as many features as positions
    return num_time_axes > 1 and probe.length > 1


# -- operations: the kind of a module, and the line of code ------------------------------------

_KINDS_BY_TYPE: tuple[tuple[Any, str], ...] = (
    (nn.MultiheadAttention, "attention"),
    (nn.modules.conv._ConvNd, "convolution"),
    (nn.RNNBase, "recurrence"),
    ((nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm), "norm"),
)


class _OpRecorder(TorchDispatchMode):
    """Records the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.op_names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.op_names.add(op_name(func))
        return func(*args, **(kwargs or {}))


def module_kind(module: nn.Module, probe: Probe) -> str:
    """The kind of a module, from its type or else from the operations that it runs; '' where they do not
    tell.
    """
    for module_type, kind in _KINDS_BY_TYPE:
        if isinstance(module, module_type):
            return kind
    recorder = _OpRecorder()
    try:
        probe.execute(lambda: _mode_inside(module, recorder))
    except Exception:  # the message is only shorter without it
        return ""
    return _kind_by_ops(recorder.op_names)


@contextmanager
def _mode_inside(module: nn.Module, mode: TorchDispatchMode | TorchFunctionMode) -> Iterator[None]:
    """A torch mode that is on during the calls of one module only, and is left also where a call raises."""
    depth = 0

    def enter(*_: Any) -> None:
        nonlocal depth
        mode.__enter__()
        depth += 1

    def leave(*_: Any) -> None:
        nonlocal depth
        if depth:
            depth -= 1
            mode.__exit__(None, None, None)

    hooks = []
    try:
        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while depth:  # always_call covers exceptions, but not a timeout or an interrupt
            leave()


def _kind_by_ops(op_names: set[str]) -> str:
    has_fused_attention = any("scaled_dot_product" in op for op in op_names)
    if has_fused_attention or ("_softmax" in op_names and op_names & {"bmm", "baddbmm", "mm"}):
        is_router = (
            "topk" in op_names and "bmm" not in op_names and not any("scaled" in op for op in op_names)
        )
        return "routing" if is_router else "attention"
    if op_names & {"topk", "sort", "argmax"}:
        return "routing"
    if any("convolution" in op for op in op_names):
        return "convolution"
    if op_names & {"native_layer_norm", "native_group_norm", "native_batch_norm", "var", "var_mean", "std"}:
        return "norm"
    if op_names & {"mean", "sum", "amax", "max", "cumsum", "_fft_r2c", "_fft_c2c"}:
        return "pooling"
    return ""


def source_line(
    module: nn.Module,
    probe: Probe,
    other_probe: Probe,
    tolerance: float = 0.0,
    *,
    in_own_methods: bool = False,
) -> str:
    """The line of the first operation inside a module whose result differs between two runs at the reader's
    position, with its name where that line calls it: "model.py:31, in softmax()". '' where there is none or
    it cannot be told.

    in_own_methods: the line in the methods of the module, with the function that it calls.
    """
    owner = module if in_own_methods else None
    return _first_differing_line(
        module, probe, other_probe, tolerance, owner, with_grad=False
    ) or _first_differing_line(module, probe, other_probe, tolerance, owner, with_grad=True)


def _first_differing_line(
    module: nn.Module,
    probe: Probe,
    other_probe: Probe,
    tolerance: float,
    owner: nn.Module | None,
    *,
    with_grad: bool,
) -> str:
    try:
        records, other_records = (_trace_ops(module, run, owner, with_grad) for run in (probe, other_probe))
    except Exception:  # the message is only shorter without it
        return ""
    for pairs in (
        _parallel_ops(records, other_records),
        _common_ops(records, other_records, probe.length > 1, other_probe.length > 1),
    ):
        for (line, op, a), (_, _, b) in pairs:
            if a is not None and b is not None and _differ({(): a}, {(): b}, tolerance):
                return line and f"{line}, in {op}()" if op else line
    return ""


OpRecord = tuple[str, str, Tensor | None]  # line, name, and the result at the reader's position


def _parallel_ops(
    records: list[OpRecord], other_records: list[OpRecord]
) -> Iterator[tuple[OpRecord, OpRecord]]:
    """The operations of both runs in pairs, up to where they begin to run different ones."""
    for record, other in zip(records, other_records, strict=False):
        if record[:2] != other[:2]:
            return
        yield record, other


def _common_ops(
    records: list[OpRecord], other_records: list[OpRecord], has_time: bool, other_has_time: bool
) -> Iterator[tuple[OpRecord, OpRecord]]:
    """The operations that run equally often in both runs, in pairs and in order, where one run takes a branch
    that the other does not, as where a cache is empty. They end where a branch computes something at the
    reader's position: what differs from there on may come from that.

    has_time: is a run longer than one position, so that its results at the reader are known for such?
    """
    counts, other_counts = (Counter(record[:2] for record in run) for run in (records, other_records))
    common, other_common = (
        _before_branch(run, {op for op in counts if counts[op] == other_counts[op]}, is_known)
        for run, is_known in ((records, has_time), (other_records, other_has_time))
    )
    others_by_op: dict[tuple[str, str], list[OpRecord]] = {}
    for record in other_common:
        others_by_op.setdefault(record[:2], []).append(record)
    for record in common:
        if others_by_op.get(record[:2]):
            yield record, others_by_op[record[:2]].pop(0)


def _before_branch(
    records: list[OpRecord], common_ops: set[tuple[str, str]], has_time: bool
) -> Iterator[OpRecord]:
    for record in records:
        if record[:2] in common_ops:
            yield record
        elif has_time and record[2] is not None:
            return


UNINITIALIZED_OPS = {
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
}


class _OpTracer(TorchFunctionMode):
    """Records each operation: the line of code that calls it, its name, its result at the reader's
    position.
    """

    def __init__(self, probe: Probe, owner: nn.Module | None) -> None:
        super().__init__()
        self.probe = probe
        self.owner = owner  # the module whose methods are named
        self.records: list[OpRecord] = []
        self.unwritten: dict[int, Tensor] = {}  # by address; kept, so that nothing else gets that memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else (out,):
            if isinstance(part, Tensor) and part.is_floating_point():
                name = getattr(func, "__name__", str(func))
                address = part.untyped_storage().data_ptr()
                if name in UNINITIALIZED_OPS:
                    self.unwritten[address] = part
                # memory that nothing has been written to yet differs by chance, and so do views of it
                values = None if address in self.unwritten else _at_reader(part, self.probe)
                line, op = _caller_line(name, self.owner)
                self.records.append((line, op, None if values is None else _flat_copy(values)))
        return out


def _trace_ops(module: nn.Module, probe: Probe, owner: nn.Module | None, with_grad: bool) -> list[OpRecord]:
    """The operations inside a module while the probe runs."""
    tracer = _OpTracer(probe, owner)
    probe.execute(lambda: _mode_inside(module, tracer), with_grad)
    return tracer.records


def nan_line(module: nn.Module, probe: Probe) -> str:
    """The line inside a module that makes NaN of numbers; '' where there is none, or several."""
    recorder = _NanRecorder()
    try:
        probe.execute(lambda: _mode_inside(module, recorder))
    except Exception:  # the message is only shorter without it
        return ""
    return _only_line(recorder.lines)


class _NanRecorder(TorchFunctionMode):
    """Records the lines whose result has NaN where no argument has."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = (args, kwargs or {})
        had_nan = any(tensor.isnan().any() for _, tensor in _named_tensors(arguments))
        out = func(*args, **(kwargs or {}))
        if not had_nan and any(tensor.isnan().any() for _, tensor in _named_tensors(out)):
            self.lines.append(_caller_line(getattr(func, "__name__", str(func))))
        return out


def _only_line(lines: list[tuple[str, str]]) -> str:
    """A line with its function; '' where there are none, or others too."""
    if len(set(lines)) != 1:
        return ""
    line, op = lines[0]
    return f"{line}, in {op}()" if line and op else line


def loss_line(run: Callable[[], object]) -> str:
    """The line that computes the loss of a run, with the loss function where that line calls it; '' where
    there is none, or several.
    """
    recorder = _LossRecorder()
    try:
        with torch.no_grad(), recorder:
            run()
    except Exception:  # the message is only shorter without it
        return ""
    return _only_line(recorder.of_losses or recorder.of_normalizers)


class _LossRecorder(TorchFunctionMode):
    """Records the lines that call a loss function, or normalise logits."""

    def __init__(self) -> None:
        super().__init__()
        self.of_losses: list[tuple[str, str]] = []
        self.of_normalizers: list[tuple[str, str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LOSS_FUNCTIONS:
            self.of_losses.append(_caller_line(func.__name__))
        elif func in NORMALIZERS:
            self.of_normalizers.append(_caller_line(func.__name__))
        return func(*args, **(kwargs or {}))


def _caller_line(op: str, owner: nn.Module | None = None) -> tuple[str, str]:
    """The file and line of the nearest caller outside PyTorch and the audit, and the operation; '' for that
    where the line does not call it: one of PyTorch's modules or functions does.

    owner: the nearest caller that is a method of this module, and the function that it calls, where there is
    one.
    """
    called = op  # what the line calls
    nearest = "", ""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if "/torch/" in code.co_filename:
            called = code.co_name
        elif "keepleft/auditing" not in code.co_filename:
            line = f"{code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}"
            if not nearest[0]:
                nearest = line, op if called == op else ""
            if owner is None:
                return nearest
            if code.co_varnames[:1] == ("self",) and frame.f_locals.get("self") is owner:
                is_function = called == op or line != nearest[0]
                return line, called if is_function else ""
            called = code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return nearest
