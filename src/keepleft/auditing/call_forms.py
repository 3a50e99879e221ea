"""Models that take a batch as one argument, that have a training step, or that return a loss alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from keepleft.auditing.introspect import Signature, role_of, signature
from keepleft.auditing.outputs import container_parts, float_tensors
from keepleft.nn.loss import IGNORE_INDEX

PAIR_NAMES = ("x", "y")  # of a batch that is a tuple
KEPT_ROLES = ("cache", "positions", "lengths")  # of containers that are one value

# -- anything else, in the caller's words -------------------------------------------------------


@dataclass(frozen=True)
class AuditAdapter:
    """How a model is called that the audit does not know how to call.

    call: (model, tokens (B, T) or features (B, T, D)) → whatever the model returns; read: that → (B, T, …).
    """

    call: Callable[[Any, Tensor], Any]
    read: Callable[[Any], Tensor] = lambda output: output

    def bind(self, model: Any) -> Callable[[Tensor], Tensor]:
        def adapted(tokens: Tensor) -> Tensor:
            return self.read(self.call(model, tokens))

        return adapted


# -- a batch: a dict, a dataclass or a tuple as one argument ------------------------------------


@dataclass(frozen=True)
class Leaf:
    """A tensor within an argument: the keys that lead to it."""

    argument: str
    keys: tuple[Any, ...]


class BatchCall:
    """A function whose argument is a batch, called with the tensors of the batch by name."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.function = function
        self.arguments = dict(arguments)
        self.leaves = dict(_name_leaves(self.arguments))
        inner = signature(function)
        nested = {leaf.argument for leaf in self.leaves.values()}
        self.signature = Signature(
            (*self.leaves, *(name for name in inner.names if name not in nested)),
            (*self.leaves, *(name for name in inner.required if name not in nested)),
            (),
            inner.defaults,
        )
        self.positional_only = inner.positional_only

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the example, by name."""
        return {name: _look_up(self.arguments, leaf) for name, leaf in self.leaves.items()}

    def through(self, function: Callable[..., Any]) -> BatchCall:
        """The same call of another function, a wrapper of this one."""
        return BatchCall(function, self.arguments)

    def __call__(self, **kwargs: Any) -> Any:
        arguments = self.pack(kwargs)
        positional = [arguments.pop(name) for name in self.positional_only if name in arguments]
        return self.function(*positional, **arguments)

    def pack(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the function, with the tensors in their batch."""
        kwargs = dict(kwargs)
        values = {name: kwargs.pop(name) for name in self.leaves if name in kwargs}
        arguments: dict[str, Any] = {}
        for name, value in self.arguments.items():
            changes = {
                leaf.keys: values[leaf_name]
                for leaf_name, leaf in self.leaves.items()
                if leaf.argument == name and leaf_name in values
            }
            arguments[name] = _rebuild(value, changes)
        return arguments | kwargs


def batch_of(example: Any) -> Any:
    """Of an example (batch, batch_idx), as a training step is called, the batch."""
    is_called_so = isinstance(example, tuple | list) and len(example) == 2 and isinstance(example[1], int)
    return example[0] if is_called_so else example


def as_batch_call(
    function: Callable[..., Any], call_signature: Signature, example: Any
) -> tuple[BatchCall | None, Any]:
    """The call where the example has a batch in it, and the example by the names of its tensors; None, and
    the example as it is, where it has none.
    """
    if example is None or isinstance(example, Tensor):
        return None, example
    names = call_signature.names
    original = example
    if not isinstance(example, Mapping):
        is_several = isinstance(example, tuple | list) and (
            len(example) == 1
            or len(call_signature.required) > 1
            or (role_of(names[0]) is not None and len(example) <= len(names))
        )
        example = dict(zip(names, example, strict=False)) if is_several else {names[0]: example}
    elif not set(example) & set(names) and len(call_signature.required or names[:1]) == 1:
        example = {names[0]: example}
    call = BatchCall(function, example)
    if not call.leaves:
        has_tensors = any(isinstance(value, Tensor) for value in example.values())
        return None, example if has_tensors else original
    rest = {
        name: value
        for name, value in example.items()
        if name not in {leaf.argument for leaf in call.leaves.values()}
    }
    return call, {**call.tensors, **rest}


def _tensors(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield keys, value
    elif len(keys) < 4:
        for key, child in container_parts(value):
            yield from _tensors(child, (*keys, key))


def _name_leaves(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Leaf]]:
    """A name for each tensor: its key, or x and y for those of a tuple."""
    used: set[str] = set()
    for argument, value in arguments.items():
        if isinstance(value, Tensor) or role_of(argument) in KEPT_ROLES:
            continue
        for keys, _ in _tensors(value):
            last = keys[-1]
            name = last if isinstance(last, str) else _item_name(last)
            if name in used:
                name = "_".join(map(str, (argument, *keys)))
            used.add(name)
            yield name, Leaf(argument, keys)


def _item_name(n: int) -> str:
    return PAIR_NAMES[n] if n < len(PAIR_NAMES) else f"item_{n}"


def _look_up(arguments: Mapping[str, Any], leaf: Leaf) -> Any:
    value = arguments[leaf.argument]
    for key in leaf.keys:
        value = dict(container_parts(value))[key]
    return value


def _rebuild(value: Any, changes: Mapping[tuple[Any, ...], Any]) -> Any:
    """The same container with other tensors in it."""
    if () in changes:
        return changes[()]
    if isinstance(value, Tensor) or not changes:
        return value
    parts = {
        key: _rebuild(child, {keys[1:]: new for keys, new in changes.items() if keys[0] == key})
        for key, child in container_parts(value)
    }
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **parts)
    if hasattr(value, "_replace"):
        return value._replace(**parts)
    if isinstance(value, Mapping):
        try:
            return type(value)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    return type(value)(parts.values())


# -- a training step ---------------------------------------------------------------------------


def training_step(module: nn.Module | None, example: Any) -> Callable[..., Any] | None:
    """The training step of a Lightning module, where its forward is not what takes the example."""
    step = getattr(module, "training_step", None)
    if module is None or not callable(step):
        return None
    has_forward = type(module).forward is not nn.Module.forward
    if has_forward and (isinstance(example, Tensor) or example is None):
        return None
    if has_forward and isinstance(example, Mapping) and set(example) & set(signature(module).names):
        return None
    _, *others = inspect.signature(step).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # Lightning gives the number of the batch by position, whatever it is called
    numbers = [0 for other in others if other.kind in positional and other.default is other.empty]
    is_numbered = not numbers and any("idx" in other.name or "index" in other.name for other in others)

    def call(batch: Any) -> Any:
        return step(batch, *([0] if is_numbered else numbers))

    return call


# -- one vector for each text ------------------------------------------------------------------


@dataclass
class PooledCall:
    """A function that gives (B, D), called for (B, T, D): the same at each position."""

    function: Callable[..., Any]
    main_argument: str
    time_axis: int = 1

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch, length = _batch_and_length(self, args, kwargs)
        out = self.function(*args, **kwargs)
        pooled = [
            vector.reshape(batch, 1, -1).expand(-1, length, -1)
            for _, vector in float_tensors(out)
            if vector.dim() >= 1 and len(vector) == batch
        ]
        return {f"output_{n}": vectors for n, vectors in enumerate(pooled)}


def _batch_and_length(
    call: PooledCall | LossCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[int, int]:
    """Of the audited sequence among the arguments."""
    tokens = kwargs[call.main_argument] if call.main_argument in kwargs else args[0]
    return tokens.shape[1 - call.time_axis], tokens.shape[call.time_axis]


# -- a loss alone ------------------------------------------------------------------------------


LOSS_FUNCTIONS = frozenset(
    (
        F.cross_entropy,
        F.nll_loss,
        F.binary_cross_entropy_with_logits,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.gaussian_nll_loss,
        F.poisson_nll_loss,
        F.kl_div,
    )
)
NORMALIZERS = frozenset((F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.logsumexp))


class _LossInputs(TorchFunctionMode):
    """Keeps what losses are computed from: the scores that a loss function is given, or log_softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.of_losses: list[Tensor] = []
        self.of_normalizers: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else (kwargs or {}).get("input")
        if isinstance(first, Tensor) and first.is_floating_point():
            if func in LOSS_FUNCTIONS:
                self.of_losses.append(first)
            elif func in NORMALIZERS:
                self.of_normalizers.append(first)
        return func(*args, **(kwargs or {}))


@dataclass
class LossCall:
    """A function that returns a loss, called for the scores that the loss is computed from as well.

    Where labels are shifted within, the last token is not judged, and its scores are not among them: then the
    function gets one token more.
    """

    function: Callable[..., Any]
    main_argument: str
    time_axis: int = 1
    layouts: list[_Layout | None] = field(default_factory=list)  # of the scores, found by the first call
    in_pieces: bool = False  # a loss that is computed in chunks

    @property
    def num_missing(self) -> int:
        """How many tokens more than it is asked for the function gets."""
        return max((layout.num_missing for layout in self.layouts if layout is not None), default=0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch, length = _batch_and_length(self, args, kwargs)
        if not any(self.layouts):
            found = self._call(args, kwargs)[0]
            self.layouts = [_find_layout(scores, batch, length) for scores in found]
            if not any(self.layouts) and len({scores.shape[1:] for scores in found}) == 1:
                self.layouts = [_find_layout(torch.cat(found), batch, length)]
                self.in_pieces = any(self.layouts)
        num_missing = self.num_missing
        if num_missing:
            sizes = (batch, length) if self.time_axis == 1 else (length, batch)
            args = tuple(self._extend(value, "", sizes) for value in args)
            kwargs = {name: self._extend(value, name, sizes) for name, value in kwargs.items()}
        found, out = self._call(args, kwargs)
        if self.in_pieces:
            found = [torch.cat(found)]
        scores = [
            layout.by_position(tensor, batch, length + num_missing)[:, :length]
            for tensor, layout in zip(found, self.layouts, strict=False)
            if layout is not None
        ]
        loss = out if isinstance(out, Tensor) else dict(container_parts(out)).get("loss", out)
        names = ("logits", *(f"logits_{n}" for n in range(1, len(scores))))
        return {**dict(zip(names, scores, strict=False)), "loss": loss}

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Tensor], Any]:
        """The scores, and what the function returns."""
        with _LossInputs() as seen:
            out = self.function(*args, **kwargs)
        return seen.of_losses or seen.of_normalizers, out

    def _extend(self, value: Any, name: str, sizes: tuple[int, int]) -> Any:
        """A tensor (B, T, …) with its last position once more; a label there is ignored."""
        if not isinstance(value, Tensor) or value.shape[:2] != sizes:
            return value
        last = value.narrow(self.time_axis, value.shape[self.time_axis] - 1, 1)
        is_label = role_of(name) in ("labels", "targets") and name != self.main_argument
        if is_label and not value.is_floating_point():
            last = torch.full_like(last, IGNORE_INDEX)
        elif role_of(name) == "positions":
            last = last + 1
        return torch.cat([value, last], self.time_axis)


class _Layout(NamedTuple):
    """How scores are laid out: "(B, T, …)", "(B, C, T)" or "(B·T, …)", and how many of the last ones they
    lack.
    """

    form: str
    num_missing: int

    def by_position(self, scores: Tensor, batch: int, length: int) -> Tensor:
        """(B, T, …), as far as there are scores; length: of what the function was given."""
        if self.form == "(B, C, T)":
            return scores.transpose(1, 2)
        if self.form == "(B·T, …)":
            return scores.reshape(batch, length - self.num_missing, *scores.shape[1:])
        return scores


def _find_layout(scores: Tensor, batch: int, length: int) -> _Layout | None:
    """None where they are not the scores of positions."""
    for num_missing in (0, 1):
        count = length - num_missing
        if scores.dim() >= 2 and scores.shape[:2] == (batch, count):
            return _Layout("(B, T, …)", num_missing)
        if scores.dim() == 3 and scores.shape[0] == batch and scores.shape[2] == count:
            return _Layout("(B, C, T)", num_missing)
        if scores.shape[:1] == (batch * count,):
            return _Layout("(B·T, …)", num_missing)
    return None


@dataclass
class IsolatedLossCall:
    """A function that returns a loss, called once for each position with all other labels ignored: the losses
    (B, T, 1).
    """

    function: Callable[..., Any]
    main_argument: str
    label_argument: str
    label: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        batch, length = kwargs[self.main_argument].shape[:2]
        losses = torch.zeros(batch, length, 1, device=kwargs[self.main_argument].device)
        for row in range(batch):
            for position in range(length):
                labels = torch.full((batch, length), IGNORE_INDEX, device=losses.device)
                labels[row, position] = self.label
                out = self.function(*args, **{**kwargs, self.label_argument: labels})
                losses[row, position] = torch.nan_to_num(_scalar(out).detach())
        return {"losses": losses}


def _scalar(out: Any) -> Tensor:
    found = [tensor for _, tensor in float_tensors(out) if tensor.numel() == 1]
    if not found:
        raise ValueError("no loss comes out")
    return found[0].reshape(())
