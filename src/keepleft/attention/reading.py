"""A mask from its print: the way back from repr(), without running any code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from keepleft.attention.masks import Mask, block, causal, full, prefix, window

LONGEST = 2_000  # characters; a mask that a person can read is far shorter

_NAMES: dict[str, Mask] = {"full": full, "causal": causal}
_CALLS: dict[str, Callable[..., Mask]] = {"window": window, "prefix": prefix, "block": block}


def mask(text: str, names: Mapping[str, Mask] | None = None) -> Mask:
    """Read `causal & window(3) | prefix(1)`; `names` adds masks of your own (each Where under its name)."""
    known = {**_NAMES, **(names or {})}
    if len(text) > LONGEST:
        raise ValueError(f"a mask of {len(text)} characters is too long: {LONGEST} is the limit")
    try:
        return _read(ast.parse(text.strip(), mode="eval").body, known)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is not a mask: write one such as 'causal & window(3) | prefix(1)'") from error


def _read(node: ast.expr, names: Mapping[str, Mask]) -> Mask:
    match node:
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name) if name in _CALLS:
            raise ValueError(f"{name} needs a number: write {name}(3)")
        case ast.Name(id=name):
            raise ValueError(f"no mask is called {name!r}: there are {', '.join(sorted({*names, *_CALLS}))}")
        case ast.Call(func=ast.Name(id=name), args=[number], keywords=[]) if name in _CALLS:
            return _CALLS[name](_number(number))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _read(left, names) & _read(right, names)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, names) | _read(right, names)
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return ~_read(inner, names)
    raise ValueError(f"{ast.unparse(node)!r} cannot stand in a mask: use names, numbers, & | ~ and brackets")


def _number(node: ast.expr) -> int | tuple[int, ...]:
    match node:
        case ast.Tuple(elts=parts):
            return tuple(_one(part) for part in parts)
    return _one(node)


def _one(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
    raise ValueError(f"{ast.unparse(node)!r} is not a whole number")
