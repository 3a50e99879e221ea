"""Where a leak enters: the innermost module whose input is clean at the reader's position and whose output is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.auditing.outputs import named
from keepleft.auditing.seen import op


@dataclass(frozen=True)
class Spot:
    """A run of a model and the place in it that is looked at."""

    run: Callable[..., Any]
    batch: int
    length: int
    row: int
    reader: int | None                       # None: the whole row
    widths: frozenset[int] = frozenset()     # sizes that weights have: an axis of such a size may not be time
    before: Callable[[], Any] | None = None  # what leads up to it, and is not looked at; `run` takes what it gives

    def go(self, watch: Callable[[], AbstractContextManager[Any]], graph: bool = False) -> None:
        with torch.set_grad_enabled(graph):
            given = () if self.before is None else (self.before(),)
            with watch():
                self.run(*given)


@dataclass(frozen=True)
class Place:
    """Where it enters, and what kind of part that is."""

    module: str = ""
    sort: str = ""  # attention, norm, convolution, routing, recurrence, pooling, or ''


Held = dict[tuple[Any, ...], Tensor]  # by the argument or the part of an output that it is


@dataclass
class Event:
    """One call of one module: what stood at the reader's position before and behind it."""

    name: str
    before: Held = field(default_factory=dict)
    behind: Held = field(default_factory=dict)
    timeless: Held = field(default_factory=dict)   # outputs without a time axis, whole
    known: bool = True                             # is it known what came in at the reader's position?


def located(module: nn.Module | None, one: Spot, other: Spot, tolerance: float = 0.0) -> Place:
    """Compare two runs, part by part, in the order in which parts finish."""
    if module is None:
        return Place()
    try:
        found = _located(module, one, other, tolerance, False)
        return found or _located(module, one, other, tolerance, True) or Place()
    except Exception:  # it is a name in a message; a leak is told without it too
        return Place()


def _located(module: nn.Module, one: Spot, other: Spot, tolerance: float, graph: bool) -> Place | None:
    """None where nothing differs, or only what differed before."""
    first, second = _events(module, one, graph), _events(module, other, graph)
    if [event.name for event in first] != [event.name for event in second]:  # experts may be called or not
        names = {event.name for event in first} & {event.name for event in second}
        first, second = ([event for event in events if event.name in names] for events in (first, second))
    for event, mate in _mates(first, second):
        if (event.known and event.behind and _differ(event.behind, mate.behind, tolerance)
                and not _differ(event.before, mate.before, tolerance)):
            name = event.name or _pooled(first, second, tolerance)
            return Place(name, sort(part(module, name), one))
    return None


def part(module: nn.Module, name: str) -> nn.Module:
    """By its name, in scripted modules too."""
    return dict(module.named_modules())[name]


def _mates(first: list[Event], second: list[Event]) -> Iterator[tuple[Event, Event]]:
    """The calls of the same part in two runs, in turn."""
    seen: dict[str, list[Event]] = {}
    for event in second:
        seen.setdefault(event.name, []).append(event)
    for event in first:
        if seen.get(event.name):
            yield event, seen[event.name].pop(0)


def _pooled(first: list[Event], second: list[Event], tolerance: float) -> str:
    """Nothing below the whole mixes positions in its own output: a part that gathers over time may be what does it."""
    for event, mate in _mates(first, second):
        if (event.name and event.timeless and event.before and _differ(event.timeless, mate.timeless, tolerance)
                and not _differ(event.before, mate.before, tolerance)):
            return event.name
    return ""


def _differ(one: Held, other: Held, tolerance: float) -> bool:
    """A state that only one of two runs is given says nothing."""
    for key, a in one.items():
        b = other.get(key)
        if b is None or a.shape != b.shape:
            continue
        same = (a == b) | (a.isnan() & b.isnan())
        if not same.all() and (tolerance == 0 or not _near(a, b, tolerance)):
            return True
    return False


def _near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    if a.isnan().any() or b.isnan().any():
        return False
    size = max(float(a.abs().max()), float(b.abs().max()), 1e-30)
    return float((a - b).abs().max()) <= tolerance * size


def _events(module: nn.Module, spot: Spot, graph: bool = False) -> list[Event]:
    """What every part saw and gave at one place, in the order in which they finish."""
    done: list[Event] = []
    open_: list[tuple[Event, Held, set[int]]] = []

    def enter(name: str) -> Callable[..., None]:
        def note(part: nn.Module, given: tuple[Any, ...], named_: dict[str, Any]) -> None:
            event = Event(name)
            all_: dict[Any, Any] = dict(enumerate(given)) | named_
            event.before = _slices(all_, spot, ids=True)
            event.known = bool(event.before) or not any(True for _ in _tensors(all_, ids=True))
            open_.append((event, *_late({} if event.before else all_, spot)))

        return note

    def leave(part: nn.Module, given: Any, named_: Any, out: Any) -> None:
        event, late, lengths = open_.pop()
        event.behind = _slices(out, spot)
        if late and not event.behind:
            behind, also = _late(out, spot)
            if behind and len(lengths | also) == 1:
                event.before, event.behind, event.known = late, behind, True
        event.timeless = {way: tensor.detach().float().clone() for way, tensor in _tensors(out) if _at(tensor, spot) is None
                          and tensor.numel() < 1 << 20 and not _map(tensor, spot) and not _long(tensor, spot)}
        done.append(event)

    @contextmanager
    def watched() -> Iterator[None]:
        hooks = []
        try:
            for name, inner in module.named_modules():
                with suppress(RuntimeError, NotImplementedError, AttributeError):  # scripted parts refuse
                    hooks.append(inner.register_forward_pre_hook(enter(name), with_kwargs=True))
                    hooks.append(inner.register_forward_hook(leave, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    spot.go(watched, graph)
    return done


def _tensors(value: Any, depth: int = 0, ids: bool = False) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Each with the way to it."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or (ids and value.dtype in (torch.int64, torch.int32)):
            yield (), value
    elif depth < 4:
        for key, part in named(value):
            for way, tensor in _tensors(part, depth + 1, ids):
                yield (key, *way), tensor


def _slices(value: Any, spot: Spot, *, ids: bool = False) -> Held:
    found = ((way, _at(tensor, spot)) for way, tensor in _tensors(value, ids=ids))
    return {way: tensor.detach().double().flatten().clone() for way, tensor in found if tensor is not None}


def _late(value: Any, spot: Spot) -> tuple[Held, set[int]]:
    """Where something stands before the text (a learned prompt), its positions are counted from the end: what stands at the
    reader's, and the lengths that there are."""
    held: Held = {}
    lengths: set[int] = set()
    for way, tensor in _tensors(value):
        n = tensor.shape[1] if tensor.dim() == 3 and tensor.shape[0] == spot.batch else 0
        if spot.reader is not None and n > spot.length > 1:
            lengths.add(n)
            held[way] = tensor[spot.row, spot.reader + n - spot.length].detach().double().flatten().clone()
    return held, lengths


def _long(tensor: Tensor, spot: Spot) -> bool:
    """Has it an axis at least as long as the text that is no width: time with something at its ends?"""
    return any(n >= spot.length and n not in spot.widths for n in tensor.shape[1:])


def _map(tensor: Tensor, spot: Spot) -> bool:
    """A table of every position against every other: its row may move in what will be hidden."""
    times = sum(n == spot.length for n in tensor.shape)
    if spot.length in spot.widths and tensor.shape[:2] == (spot.batch, spot.length) and tensor.dim() == 3:
        return False  # (B, T, D) with as many features as positions
    return times > 1 and spot.length > 1


def _at(tensor: Tensor, spot: Spot) -> Tensor | None:
    """What stands at the reader's position, if the tensor has a time axis."""
    shape, b, t = tuple(tensor.shape), spot.batch, spot.length
    if spot.reader is None:
        return _row(tensor, spot)
    if _map(tensor, spot) or not shape or (len(shape) == 2 and shape[1] == t and t in spot.widths and t > 1):
        return None
    if shape[0] == b and t in shape[1:]:
        return tensor[spot.row].select(shape[1:].index(t), spot.reader)
    if shape[:2] == (t, b):
        return tensor[spot.reader, spot.row]
    if shape[0] == b * t:
        return tensor[spot.row * t + spot.reader]
    if shape[0] % b == 0 and t in shape[1:]:
        part = tensor.reshape(b, shape[0] // b, *shape[1:])[spot.row]
        return part.select(1 + shape[1:].index(t), spot.reader)
    return None


def _row(tensor: Tensor, spot: Spot) -> Tensor | None:
    """All that belongs to one row of a batch."""
    shape, b, t = tuple(tensor.shape), spot.batch, spot.length
    if not shape or b < 2:
        return None
    if shape[0] % b == 0 and (shape[:2] != (t, b) or b == t):
        return tensor.reshape(b, -1)[spot.row]
    return tensor[:, spot.row] if shape[:2] == (t, b) else None


class _Ops(TorchDispatchMode):
    """Which operations are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(op(func))
        return func(*args, **(kwargs or {}))


def sort(part: nn.Module, spot: Spot) -> str:
    """What kind of part it is, from its type, or else from the operations that it calls."""
    kinds: tuple[tuple[Any, str], ...] = (
        (nn.MultiheadAttention, "attention"), (nn.modules.conv._ConvNd, "convolution"), (nn.RNNBase, "recurrence"),
        ((nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.RMSNorm), "norm"))
    for kind, name in kinds:
        if isinstance(part, kind):
            return name
    seen: set[str] = set()
    ops = _Ops()

    def enter(*_: Any) -> None:
        ops.__enter__()

    def leave(*_: Any) -> None:
        ops.__exit__(None, None, None)
        seen.update(ops.seen)

    hooks = [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
    try:
        spot.go(nullcontext)
    except Exception:  # it is a word in a message; without it the message is shorter
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    if any("scaled_dot_product" in op for op in seen) or ("_softmax" in seen and seen & {"bmm", "baddbmm", "mm"}):
        return "routing" if "topk" in seen and "bmm" not in seen and not any("scaled" in op for op in seen) else "attention"
    if seen & {"topk", "sort", "argmax"}:
        return "routing"
    if any("convolution" in op for op in seen):
        return "convolution"
    if seen & {"native_layer_norm", "native_group_norm", "native_batch_norm", "var", "var_mean", "std"}:
        return "norm"
    if seen & {"mean", "sum", "amax", "max", "cumsum", "_fft_r2c", "_fft_c2c"}:
        return "pooling"
    return ""


class Watcher:
    """The line of code in which an operation first gives something else at the reader's position."""

    def __init__(self, spot: Spot, module: nn.Module) -> None:
        self.spot, self.module = spot, module
        self.seen: list[tuple[str, str, Tensor | None]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        watcher = self

        class Lines(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor) and out.is_floating_point():
                    found = _at(out, watcher.spot)
                    watcher.seen.append((_line(), getattr(func, "__name__", str(func)),
                                         None if found is None else found.detach().double().flatten().clone()))
                return out

        mode = Lines()
        hooks = [self.module.register_forward_pre_hook(lambda *_: mode.__enter__() and None),
                 self.module.register_forward_hook(lambda *_: mode.__exit__(None, None, None))]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _line() -> str:
    """The nearest line of code that is not PyTorch's or ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if "/torch/" not in path and "keepleft/auditing" not in path:
            return f"{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def line(module: nn.Module, one: Spot, other: Spot, tolerance: float = 0.0) -> str:
    """The first operation inside a module whose result moves at the reader's position: its line, and its name."""
    return _line_of(module, one, other, tolerance, False) or _line_of(module, one, other, tolerance, True)


def _line_of(module: nn.Module, one: Spot, other: Spot, tolerance: float, graph: bool) -> str:
    watchers = [Watcher(one, module), Watcher(other, module)]
    for watcher in watchers:
        try:
            watcher.spot.go(watcher.watching, graph)
        except Exception:  # it is a word in a message; without it the message is shorter
            return ""
    for (place, name, a), (also, same, b) in zip(watchers[0].seen, watchers[1].seen, strict=False):
        if (place, name) != (also, same):
            return ""
        if a is not None and b is not None and _differ({(): a}, {(): b}, tolerance):
            return f"{place} ({name})" if place else ""
    return ""


def broken(module: nn.Module | None, spot: Spot) -> str:
    """The innermost module that is given numbers at a place and gives none back."""
    if module is None:
        return ""
    try:
        events = _events(module, spot)
    except Exception:  # it is a name in a message; a leak is told without it too
        return ""
    for event in events:
        gone = any(out.isnan().any() for out in (*event.behind.values(), *event.timeless.values()))
        if gone and event.known and not any(x.isnan().any() for x in event.before.values()):
            return event.name
    return ""


def broken_backward(module: nn.Module | None, run: Callable[[], Tensor]) -> str:
    """The innermost module through which gradients turn to NaN; `run` gives the loss."""
    if module is None:
        return ""
    names: list[str] = []
    hooks: list[Any] = []
    open_: list[dict[str, Any]] = []

    def follow(value: Any, note: Callable[[Tensor], None], depth: int = 0) -> Any:
        """The same with every tensor that has a gradient behind a copy of its own: what flows into it comes through this
        part alone."""
        if isinstance(value, Tensor):
            if not (value.requires_grad and value.is_floating_point()):
                return value
            value = value.clone()
            value.register_hook(note)
            return value
        if type(value) in (tuple, list) and depth < 2:
            return type(value)(follow(part, note, depth + 1) for part in value)
        return value

    def enter(name: str) -> Callable[..., Any]:
        def begun(part: nn.Module, given: tuple[Any, ...], named_: dict[str, Any]) -> Any:
            call = {"whole": True}
            open_.append(call)

            def into(gradient: Tensor) -> None:
                if call["whole"] and gradient.isnan().any():
                    names.append(name)

            return follow(given, into), {key: follow(value, into) for key, value in named_.items()}

        return begun

    def leave(part: nn.Module, given: Any, named_: Any, out: Any) -> None:
        call = open_.pop()

        def behind(gradient: Tensor) -> None:
            call["whole"] = call["whole"] and bool(gradient.isfinite().all())

        for _, tensor in _tensors(out):
            if tensor.requires_grad:
                tensor.register_hook(behind)

    try:
        for name, inner in module.named_modules():
            hooks.append(inner.register_forward_pre_hook(enter(name), with_kwargs=True))
            hooks.append(inner.register_forward_hook(leave, with_kwargs=True))
        torch.autograd.backward(run())
    except Exception:  # it changes things in place, which hooks do not bear, or bears no hooks
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    return names[0] if names else ""
