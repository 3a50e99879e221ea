"""Attention masks and their algebra: which position may attend to which.

A mask is a predicate over (b, h, q, k): batch row, head, query position, key position. True means that q may
attend to k. q and k are positions in a sequence, never slots of a buffer, so one mask serves training,
chunked prefill and cached decoding alike. Masks are values: they compare, hash, print, parse back from their
repr, and combine with & | ~.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import torch
from torch import Tensor

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Mask:
    """The algebra & | ~; the subclasses say which pairs are visible."""

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.predicate(k.device)(b, h, q, k)

    def predicate(self, device: torch.device) -> Predicate:
        """The mask as a plain function that compilers can trace; the tensors it reads are on the device."""
        raise NotImplementedError(f"{type(self).__name__} must say which pairs are visible")

    def simplify(self, length: int) -> Mask:
        """A simpler mask that is the same on positions 0 … length - 1."""
        return self

    @property
    def is_uniform(self) -> bool:
        """Is it known to be the same for every batch row and head?"""
        return True

    @property
    def rows(self) -> int | None:
        """For how many batch rows it has numbers of their own, as prefix((3, 5)); None where it has none."""
        parts = self.parts if isinstance(self, And | Or) else (self.mask,) if isinstance(self, Not) else ()
        return next((part.rows for part in parts if part.rows is not None), None)

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        parts = tuple(part for part in _flatten(And, self, other) if part != full) or (full,)
        return parts[0] if len(parts) == 1 else And(parts)

    def __or__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            return NotImplemented
        parts = _flatten(Or, self, other)
        if full in parts:
            return full
        return parts[0] if len(parts) == 1 else Or(parts)

    def __invert__(self) -> Mask:
        return self.mask if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & | ~, not with and, or, not")


@dataclass(frozen=True, repr=False)
class Full(Mask):
    """Every position attends to every position."""

    def predicate(self, device: torch.device) -> Predicate:
        # a scalar: a table of it takes no memory
        return lambda b, h, q, k: q.new_ones((), dtype=torch.bool)

    def __repr__(self) -> str:
        return "full"


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """A position attends to itself and the past."""

    def predicate(self, device: torch.device) -> Predicate:
        return lambda b, h, q, k: k <= q

    def __repr__(self) -> str:
        return "causal"


@dataclass(frozen=True, repr=False)
class Window(Mask):
    """The last `size` positions up to q, itself included, and all of the future: use causal & window(n)."""

    size: int

    def __post_init__(self) -> None:
        _check_int("window", self.size, 1)

    def predicate(self, device: torch.device) -> Predicate:
        size = self.size
        return lambda b, h, q, k: q - k < size

    def simplify(self, length: int) -> Mask:
        return full if self.size >= length else self

    def __repr__(self) -> str:
        return f"window({self.size})"


@dataclass(frozen=True, repr=False)
class Prefix(Mask):
    """The first `length` positions are visible to all; a tuple gives each batch row its own length."""

    length: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.length, Tensor):
            object.__setattr__(self, "length", self.length.tolist())
        if isinstance(self.length, Sequence):
            object.__setattr__(self, "length", tuple(self.length))
            if not self.length:
                raise ValueError("prefix(()) names no row: give one length for each batch row")
        for length in self.length if isinstance(self.length, tuple) else (self.length,):
            _check_int("prefix", length, 0)

    def predicate(self, device: torch.device) -> Predicate:
        if isinstance(self.length, int):
            length = self.length
            return lambda b, h, q, k: k < length
        lengths = torch.tensor(self.length, device=device)
        return lambda b, h, q, k: k < lengths[b]

    def simplify(self, length: int) -> Mask:
        return full if isinstance(self.length, int) and self.length >= length else self

    @property
    def is_uniform(self) -> bool:
        return isinstance(self.length, int)

    @property
    def rows(self) -> int | None:
        return len(self.length) if isinstance(self.length, tuple) else None

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True, repr=False)
class Block(Mask):
    """Positions of the same block of `size` attend to each other, in both directions."""

    size: int

    def __post_init__(self) -> None:
        _check_int("block", self.size, 1)

    def predicate(self, device: torch.device) -> Predicate:
        size = self.size
        return lambda b, h, q, k: q // size == k // size

    def simplify(self, length: int) -> Mask:
        return full if self.size >= length else self

    def __repr__(self) -> str:
        return f"block({self.size})"


@dataclass(frozen=True, repr=False)
class Where(Mask):
    """A predicate of your own, under the name that it prints."""

    name: str
    function: Predicate

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not callable(self.function):
            raise TypeError(f"Where({self.name!r}, …) needs a name, then a function of (b, h, q, k)")
        if not self.name.isidentifier():
            raise ValueError(f"{self.name!r} cannot name a mask: use a word such as 'even_columns'")

    def predicate(self, device: torch.device) -> Predicate:
        return self.function

    @property
    def is_uniform(self) -> bool:
        return False

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class And(Mask):
    """What every part allows."""

    parts: tuple[Mask, ...]

    def predicate(self, device: torch.device) -> Predicate:
        first, *rest = (part.predicate(device) for part in self.parts)

        def all_of(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            visible = first(b, h, q, k)
            for part in rest:
                visible = visible & part(b, h, q, k)
            return visible

        return all_of

    def simplify(self, length: int) -> Mask:
        out: Mask = full
        for part in self.parts:
            out = out & part.simplify(length)
        return out

    @property
    def is_uniform(self) -> bool:
        return all(part.is_uniform for part in self.parts)

    def __repr__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else repr(part) for part in self.parts)


@dataclass(frozen=True, repr=False)
class Or(Mask):
    """What any part allows."""

    parts: tuple[Mask, ...]

    def predicate(self, device: torch.device) -> Predicate:
        first, *rest = (part.predicate(device) for part in self.parts)

        def any_of(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            visible = first(b, h, q, k)
            for part in rest:
                visible = visible | part(b, h, q, k)
            return visible

        return any_of

    def simplify(self, length: int) -> Mask:
        combined, *rest = (part.simplify(length) for part in self.parts)
        for part in rest:
            combined = combined | part
        return combined

    @property
    def is_uniform(self) -> bool:
        return all(part.is_uniform for part in self.parts)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))  # & binds tighter, so no part needs brackets


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """What the mask forbids."""

    mask: Mask

    def predicate(self, device: torch.device) -> Predicate:
        inner = self.mask.predicate(device)
        return lambda b, h, q, k: ~inner(b, h, q, k)

    def simplify(self, length: int) -> Mask:
        return ~self.mask.simplify(length)

    @property
    def is_uniform(self) -> bool:
        return self.mask.is_uniform

    def __repr__(self) -> str:
        return f"~({self.mask})" if isinstance(self.mask, And | Or) else f"~{self.mask}"


full, causal = Full(), Causal()
window = Window
prefix = Prefix
block = Block


def mask_table(mask: Mask, n: int, *, row: int = 0, head: int = 0) -> Tensor:
    """The mask over the first n positions as an (n, n) boolean matrix: True where the query may attend."""
    if not isinstance(mask, Mask):
        raise TypeError(f"{mask!r} is no mask: give one such as causal & window(3)")
    if n < 1:
        raise ValueError(f"a table of {n} positions is none: ask for at least 1")
    i = torch.arange(n)
    return mask(torch.tensor(row), torch.tensor(head), i[:, None], i[None, :]).expand(n, n)


def is_causal(mask: Mask) -> bool:
    """Is the mask `causal & …`, so that no future position is visible?"""
    return causal in _conjuncts(mask)


def is_causal_window(mask: Mask) -> bool:
    """Is the mask causal, alone or with windows? Then `window_size` describes it completely."""
    return is_causal(mask) and all(isinstance(part, Causal | Window) for part in _conjuncts(mask))


def window_size(mask: Mask) -> int | None:
    """How many positions a causal mask sees at most, itself included; None where it has no window."""
    sizes = [part.size for part in _conjuncts(mask) if isinstance(part, Window)]
    return min(sizes, default=None) if is_causal(mask) else None


def _conjuncts(mask: Mask) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, And) else (mask,)


def _flatten(kind: type[And] | type[Or], *masks: Mask) -> tuple[Mask, ...]:
    parts = [part for mask in masks for part in (mask.parts if isinstance(mask, kind) else (mask,))]
    return tuple(dict.fromkeys(parts))  # drop repeats, keep order


def _check_int(name: str, value: object, minimum: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}({value!r}) needs a whole number")
    if value < minimum:
        raise ValueError(f"{name}({value}) needs a number of at least {minimum}")


MAX_CHARACTERS = 2_000  # a mask that a person can read is far shorter

_NAMED_MASKS: dict[str, Mask] = {"full": full, "causal": causal}
_MASK_FACTORIES: dict[str, Callable[..., Mask]] = {"window": window, "prefix": prefix, "block": block}


def parse_mask(text: str, names: Mapping[str, Mask] | None = None) -> Mask:
    """Parse `causal & window(3) | prefix(1)`; `names` adds masks of your own (each Where under its name).

    Raises ValueError for anything but names, numbers, & | ~ and parentheses.
    """
    named_masks = {**_NAMED_MASKS, **(names or {})}
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"a mask of {len(text)} characters is too long: {MAX_CHARACTERS} is the limit")
    try:
        return _parse_node(ast.parse(text.strip(), mode="eval").body, named_masks)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{text!r} is not a mask: write one such as 'causal & window(3) | prefix(1)'"
        ) from error


def _parse_node(node: ast.expr, names: Mapping[str, Mask]) -> Mask:
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name in _MASK_FACTORIES:
            raise ValueError(f"{name} needs a number: write {name}(3)")
        case ast.Name(id=name):
            raise _unknown_mask(name, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _MASK_FACTORIES:
            return _MASK_FACTORIES[name](_parse_argument(argument))
        case ast.Call(func=ast.Name(id=name)) if name in _MASK_FACTORIES:
            raise ValueError(f"{ast.unparse(node)!r} needs one number: write {name}(3)")
        case ast.Call(func=ast.Name(id=name)) if name in names:
            raise ValueError(f"{name} takes no number: write {name}")
        case ast.Call(func=ast.Name(id=name)):
            raise _unknown_mask(name, names)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _parse_node(left, names) & _parse_node(right, names)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _parse_node(left, names) | _parse_node(right, names)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_parse_node(operand, names)
    raise ValueError(f"{ast.unparse(node)!r} cannot stand in a mask: use names, numbers, & | ~ and brackets")


def _unknown_mask(name: str, names: Mapping[str, Mask]) -> ValueError:
    known = sorted({*names, *_MASK_FACTORIES})
    matches = get_close_matches(name, known, 1)
    suggestion = f"did you mean {matches[0]}? " if matches else ""
    return ValueError(f"no mask is called {name!r}: {suggestion}there are {', '.join(known)}")


def _parse_argument(node: ast.expr) -> int | tuple[int, ...]:
    match node:
        case ast.Tuple(elts=parts):
            return tuple(_parse_int(part) for part in parts)
    return _parse_int(node)


def _parse_int(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
    raise ValueError(f"{ast.unparse(node)!r} is not a whole number")
