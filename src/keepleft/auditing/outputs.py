"""The audited output: the tensor with one entry for each position, wherever a model puts it and whichever
axis is time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution

# names under which models return what the audit looks for
PREFERRED_OUTPUTS = tuple(
    "logits last_hidden_state lm_logits prediction_logits scores output outputs out".split()
)


def float_tensors(value: Any, depth: int = 0) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every floating tensor in an output with the keys that lead to it, the preferred ones first."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield (), value
        return
    if depth > 3:
        return
    for key, child in sorted(named_parts(value), key=lambda item: item[0] not in PREFERRED_OUTPUTS):
        for key_path, tensor in float_tensors(child, depth + 1):
            yield (key, *key_path), tensor


def named_parts(value: Any) -> list[tuple[Any, Any]]:
    """The parts of what a model may return, with their names: of containers, distributions, and other objects
    with attributes.
    """
    if isinstance(value, Distribution):
        return _distribution_parts(value)
    if parts := container_parts(value):
        return parts
    if isinstance(value, Tensor | nn.Module | type) or callable(value):
        return []
    return [(name, part) for name, part in getattr(value, "__dict__", {}).items() if name[:1] != "_"]


def container_parts(value: Any) -> list[tuple[Any, Any]]:
    """The parts of a mapping, dataclass, named tuple, tuple or list, with their names; none of anything
    else.
    """
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if hasattr(value, "_asdict"):
        return list(value._asdict().items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    return []


# the parameters of distributions that say most, and the distributions inside others
_DISTRIBUTION_PARTS = "logits loc scale base_dist mixture_distribution component_distribution".split()


def _distribution_parts(distribution: Distribution) -> list[tuple[Any, Any]]:
    out = []
    for name in dict.fromkeys([*_DISTRIBUTION_PARTS, *_constraints(distribution)]):
        with suppress(NotImplementedError, AttributeError, ValueError, RuntimeError):
            out.append((name, getattr(distribution, name)))
    return out


def _constraints(distribution: Distribution) -> list[str]:
    """The names of its parameters, where it says them."""
    with suppress(NotImplementedError):
        return list(distribution.arg_constraints)
    return []


@dataclass(frozen=True)
class Selector:
    """Takes the audited tensor from an output. `flat`: rows and positions share its first axis, as (B·T, …),
    or (T·B, …) where the time axis is the first of the two.
    """

    key_path: tuple[Any, ...]
    time_axis: int
    batch_axis: int
    flat: bool = False
    code: str = field(default="", compare=False)  # the Python expression that follows the call: .logits, [0]

    def __call__(self, value: Any, batch: int, length: int) -> Tensor:
        """(B, T, …)"""
        for key in self.key_path:
            value = dict(named_parts(value))[key]
        if self.flat:
            sizes = (batch, length) if self.batch_axis == 0 else (length, batch)
            value = value.reshape(*sizes, *value.shape[1:])
        tensor: Tensor = value.movedim((self.batch_axis, self.time_axis), (0, 1))
        return tensor[..., None] if tensor.dim() == 2 else tensor

    def __str__(self) -> str:
        return ".".join(map(str, self.key_path)) or "the output"


def selector(value: Any, batch: int, length: int) -> Selector | None:
    """For the first tensor with a time axis: (B, T, …) before any other layout, None where there is none."""
    found = _selector(value, batch, length)
    return None if found is None else replace(found, code=as_code(value, found.key_path))


def _selector(value: Any, batch: int, length: int) -> Selector | None:
    for key_path, tensor in float_tensors(value):
        if tensor.dim() >= 2 and tensor.shape[:2] == (batch, length):
            return Selector(key_path, 1, 0)
    for key_path, tensor in float_tensors(value):
        if tensor.dim() >= 2 and tensor.shape[:2] == (length, batch):
            return Selector(key_path, 0, 1)
        if tensor.dim() >= 2 and tensor.shape[0] == batch and length in tensor.shape[2:]:
            return Selector(key_path, 2 + tuple(tensor.shape[2:]).index(length), 0)
    for key_path, tensor in float_tensors(value):
        if tensor.dim() >= 1 and tensor.shape[0] == batch * length:
            return Selector(key_path, 1, 0, flat=True)
    return None


def selectors(value: Any, batch: int, length: int, main: Selector | None) -> list[Selector]:
    """For every tensor (B, T, …), or flat in the order of the main output."""
    by_time = main is not None and main.flat and main.batch_axis == 1
    return [
        Selector(key_path, 1, 0, code=as_code(value, key_path))
        if tensor.shape[:2] == (batch, length)
        else Selector(
            key_path, 0 if by_time else 1, 1 if by_time else 0, flat=True, code=as_code(value, key_path)
        )
        for key_path, tensor in float_tensors(value)
        if tensor.dim() >= 2 and (tensor.shape[:2] == (batch, length) or tensor.shape[0] == batch * length)
    ]


def as_code(value: Any, key_path: tuple[Any, ...]) -> str:
    """The Python expression that follows a value to get to a part of it: .logits, [0]"""
    code = ""
    for key in key_path:
        code += part_code(value, key)
        value = dict(named_parts(value))[key]
    return code


def part_code(value: Any, key: Any) -> str:
    """The same for one of its named parts."""
    by_attribute = isinstance(key, str) and (
        not isinstance(value, Mapping) or getattr(value, key, None) is value[key]
    )
    return f".{key}" if by_attribute else f"[{key!r}]"


def find(value: Any, names: tuple[str, ...]) -> Any:
    """The part under the first of these names that is there, or None."""
    parts = dict(named_parts(value))
    return next((parts[name] for name in names if parts.get(name) is not None), None)
