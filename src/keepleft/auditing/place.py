"""Where a leak enters: the innermost module whose input is clean at the reader's position and whose output is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.auditing.outputs import named


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

    def go(self, watch: Callable[[], AbstractContextManager[Any]]) -> None:
        with torch.no_grad():
            given = () if self.before is None else (self.before(),)
            with watch():
                self.run(*given)


@dataclass(frozen=True)
class Place:
    """Where it enters, and what kind of part that is."""

    module: str = ""
    sort: str = ""  # attention, norm, convolution, routing, recurrence, pooling, or ''
    line: str = ""


@dataclass
class Event:
    """One call of one module: what stood at the reader's position before and behind it."""

    name: str
    depth: int
    before: list[Tensor] = field(default_factory=list)
    behind: list[Tensor] = field(default_factory=list)
    timeless: list[Tensor] = field(default_factory=list)   # outputs without a time axis, whole
    known: bool = True                                     # is it known what came in at the reader's position?


def located(module: nn.Module | None, one: Spot, other: Spot, tolerance: float = 0.0) -> Place:
    """Compare two runs, part by part, in the order in which parts finish."""
    if module is None:
        return Place()
    first, second = _events(module, one), _events(module, other)
    if [event.name for event in first] != [event.name for event in second]:  # experts may be called or not
        names = {event.name for event in first} & {event.name for event in second}
        first, second = ([event for event in events if event.name in names] for events in (first, second))
    seen: dict[str, list[Event]] = {}
    for event in second:
        seen.setdefault(event.name, []).append(event)
    for event in first:
        if not seen.get(event.name):
            continue
        mate = seen[event.name].pop(0)
        if (event.known and event.behind and _differ(event.behind, mate.behind, tolerance)
                and not _differ(event.before, mate.before, tolerance)):
            name = event.name or _pooled(first, second, tolerance)
            return Place(name, sort(module.get_submodule(name), one), "")
    return Place()


def _pooled(first: list[Event], second: list[Event], tolerance: float) -> str:
    """Nothing below the whole mixes positions in its own output: a part that gathers over time may be what does it."""
    mates: dict[str, list[Event]] = {}
    for event in second:
        mates.setdefault(event.name, []).append(event)
    for event in first:
        mate = mates[event.name].pop(0) if mates.get(event.name) else None
        if (mate is not None and event.name and event.timeless and event.before
                and _differ(event.timeless, mate.timeless, tolerance) and not _differ(event.before, mate.before, tolerance)):
            return event.name
    return ""


def _differ(one: list[Tensor], other: list[Tensor], tolerance: float) -> bool:
    for a, b in zip(one, other, strict=False):
        if a.shape != b.shape:
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


def _events(module: nn.Module, spot: Spot) -> list[Event]:
    """What every part saw and gave at one place, in the order in which they finish."""
    done: list[Event] = []
    open_: list[Event] = []
    hooks = []

    def enter(name: str) -> Callable[..., None]:
        def note(part: nn.Module, given: tuple[Any, ...], named_: dict[str, Any]) -> None:
            event = Event(name, len(open_))
            event.before = [slice_ for value in (*given, *named_.values()) for slice_ in _slices(value, spot, ids=True)]
            event.known = bool(event.before) or not any(
                True for value in (*given, *named_.values()) for _ in _tensors(value, ids=True))
            open_.append(event)

        return note

    def leave(part: nn.Module, given: Any, named_: Any, out: Any) -> None:
        event = open_.pop()
        event.behind = list(_slices(out, spot))
        event.timeless = [tensor.detach().float().clone() for tensor in _tensors(out) if _at(tensor, spot) is None
                          and tensor.numel() < 1 << 20 and not _map(tensor, spot)]
        done.append(event)

    @contextmanager
    def watched() -> Iterator[None]:
        for name, part in module.named_modules():
            hooks.append(part.register_forward_pre_hook(enter(name), with_kwargs=True))
            hooks.append(part.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    spot.go(watched)
    return done


def _tensors(value: Any, depth: int = 0, ids: bool = False) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or (ids and value.dtype in (torch.int64, torch.int32)):
            yield value
    elif depth < 3:
        for _, part in named(value):
            yield from _tensors(part, depth + 1, ids)


def _slices(value: Any, spot: Spot, *, ids: bool = False) -> Iterator[Tensor]:
    for tensor in _tensors(value, ids=ids):
        found = _at(tensor, spot)
        if found is not None:
            yield found.detach().double().flatten().clone()


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
        self.seen.add(func.name().partition("::")[2].partition(".")[0])
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
    watchers = [Watcher(one, module), Watcher(other, module)]
    for watcher in watchers:
        try:
            watcher.spot.go(watcher.watching)
        except Exception:  # it is a word in a message; without it the message is shorter
            return ""
    for (place, name, a), (also, same, b) in zip(watchers[0].seen, watchers[1].seen, strict=False):
        if (place, name) != (also, same):
            return ""
        if a is not None and b is not None and _differ([a], [b], tolerance):
            return f"{place} ({name})" if place else ""
    return ""


def broken(module: nn.Module | None, spot: Spot) -> str:
    """The innermost module that is given numbers at a place and gives none back."""
    if module is None:
        return ""
    for event in _events(module, spot):
        gone = any(out.isnan().any() for out in (*event.behind, *event.timeless))
        if gone and event.known and not any(x.isnan().any() for x in event.before):
            return event.name
    return ""


def broken_backward(module: nn.Module | None, run: Callable[[], Tensor]) -> str:
    """The innermost module through which gradients turn to NaN; `run` gives the loss."""
    if module is None:
        return ""
    names: list[str] = []

    def watch(name: str) -> Callable[..., None]:
        def note(part: nn.Module, into: Any, out: Any) -> None:
            if all(g is None or g.isfinite().all() for g in out) and any(g is not None and g.isnan().any() for g in into):
                names.append(name)

        return note

    hooks = [part.register_full_backward_hook(watch(name)) for name, part in module.named_modules()]
    try:
        torch.autograd.backward(run())
    except RuntimeError:  # it changes things in place, which hooks do not bear
        return ""
    finally:
        for hook in hooks:
            hook.remove()
    return names[0] if names else ""
