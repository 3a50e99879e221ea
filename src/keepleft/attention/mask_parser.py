"""Parser of mask expressions: the inverse of repr(mask), without running any code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from keepleft.attention.masks import Mask, block, causal, full, prefix, window

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
            raise ValueError(
                f"no mask is called {name!r}: there are {', '.join(sorted({*names, *_MASK_FACTORIES}))}"
            )
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in _MASK_FACTORIES:
            return _MASK_FACTORIES[name](_parse_argument(argument))
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _parse_node(left, names) & _parse_node(right, names)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _parse_node(left, names) | _parse_node(right, names)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_parse_node(operand, names)
    raise ValueError(f"{ast.unparse(node)!r} cannot stand in a mask: use names, numbers, & | ~ and brackets")


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
