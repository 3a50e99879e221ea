"""Masks made with triu and tril: what they hide, however they are negated, transposed and combined."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from keepleft.auditing.static.scores import earlier_scores
from keepleft.auditing.static.syntax import (
    MAX_TRACED_VALUES,
    RESHAPING,
    Value,
    argument,
    called_name,
    dotted_name,
    number,
    resolve,
    tensor_argument,
    trace,
)

TRIANGULAR = ("triu", "tril")
COMPARISONS = {"eq": ast.Eq, "ne": ast.NotEq, "lt": ast.Lt, "gt": ast.Gt, "le": ast.LtE, "ge": ast.GtE}


class Triangle(NamedTuple):
    """The entries of a mask that are True, or not zero: those with key - query on one side of a bound."""

    call: ast.Call
    is_upper: bool  # key - query >= bound; otherwise key - query <= bound
    bound: int
    is_boolean: bool
    filler: float | None  # the number in it, where it is one that is known
    union: bool  # combined with others by |
    intersection: bool  # combined with others by &
    function_name: str  # triu or tril

    def negated(self) -> Triangle:
        bound = self.bound - 1 if self.is_upper else self.bound + 1
        return self._replace(
            is_upper=not self.is_upper, bound=bound, union=self.intersection, intersection=self.union
        )

    def transposed(self) -> Triangle:
        return self._replace(is_upper=not self.is_upper, bound=-self.bound)


class _State(NamedTuple):
    """What lies between the mask and the place that is looked at, from the mask inwards."""

    changes: tuple[str, ...] = ()  # negated and transposed, in the order to apply them, innermost last
    is_boolean: bool = False
    union: bool = False
    intersection: bool = False


def triangles(mask: Value) -> Iterator[Triangle]:
    """The triangles that a mask consists of; none where it is a band, or its diagonal is not known."""
    queue = [(mask, _State())]
    seen: set[tuple[int, bool, bool]] = set()
    while queue and len(seen) < MAX_TRACED_VALUES:
        value, state = queue.pop()
        key = (
            id(value.node),
            state.changes.count("negated") % 2 == 1,
            state.changes.count("transposed") % 2 == 1,
        )
        if key in seen:
            continue
        seen.add(key)
        if isinstance(value.node, ast.Call) and called_name(value.node) in TRIANGULAR:
            if (triangle := _triangle(value.node, value, state)) is not None:
                yield triangle
        else:
            queue += _steps(value, state)


def _steps(value: Value, state: _State) -> list[tuple[Value, _State]]:
    """The operands of the outermost operation of a mask."""
    node, function = value
    to = lambda part, new: [] if part is None else [(Value(part, function), new)]
    negated = state._replace(changes=(*state.changes, "negated"))
    transposed = state._replace(changes=(*state.changes, "transposed"))
    match node:
        case ast.UnaryOp(op=ast.Invert() | ast.Not(), operand=operand):
            return to(operand, negated._replace(is_boolean=True))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _compared(Value(left, function), type(op), Value(right, function), state, negated)
        case ast.BinOp(left=left, op=ast.Sub(), right=right) if number(Value(left, function)) == 1:
            return to(right, negated)
        case ast.BinOp(left=left, op=ast.BitOr() | ast.BitAnd() as op, right=right):
            is_union = isinstance(op, ast.BitOr) == (state.changes.count("negated") % 2 == 0)  # De Morgan
            combined = state._replace(union=True) if is_union else state._replace(intersection=True)
            return [*to(left, combined), *to(right, combined)]
        case ast.Subscript(value=part):
            return to(part, state)
        case ast.Attribute(value=part, attr="T" | "mT"):
            return to(part, transposed)
        case ast.IfExp(body=body, orelse=orelse):
            return [*to(body, state), *to(orelse, state)]
        case ast.Call():
            name = called_name(node)
            if name in RESHAPING:
                is_boolean = state.is_boolean or _converts_to_boolean(node)
                return to(tensor_argument(node, 0, "input"), state._replace(is_boolean=is_boolean))
            if name in ("transpose", "t", "swapaxes"):
                return to(tensor_argument(node, 0, "input"), transposed)
            if name in ("logical_not", "logical_not_"):
                return to(tensor_argument(node, 0, "input"), negated._replace(is_boolean=True))
            if name in COMPARISONS:
                mask, bound = tensor_argument(node, 0, "input"), tensor_argument(node, 1, "other")
                if mask is not None and bound is not None:
                    operands = Value(mask, function), Value(bound, function)
                    return _compared(operands[0], COMPARISONS[name], operands[1], state, negated)
    return [(item, state) for item in resolve(value)]


def _compared(
    left: Value, op: type[ast.cmpop], right: Value, state: _State, negated: _State
) -> list[tuple[Value, _State]]:
    """mask == 0 and the like, for a mask of zeros and ones."""
    bound = number(right)
    if bound is None:
        return []
    holds_for = [n for n in (0.0, 1.0) if _holds(n, op, bound)]
    if holds_for == [1.0]:
        return [(left, state._replace(is_boolean=True))]
    if holds_for == [0.0]:
        return [(left, negated._replace(is_boolean=True))]
    return []


def _holds(n: float, op: type[ast.cmpop], bound: float) -> bool:
    return {
        ast.Eq: n == bound,
        ast.NotEq: n != bound,
        ast.Lt: n < bound,
        ast.LtE: n <= bound,
        ast.Gt: n > bound,
        ast.GtE: n >= bound,
    }.get(op, False)


def _triangle(call: ast.Call, value: Value, state: _State) -> Triangle | None:
    base = tensor_argument(call, 0, "input")
    diagonal = tensor_argument(call, 1, "diagonal") or argument(call, 1, "k")
    bound = 0.0 if diagonal is None else number(Value(diagonal, value.function))
    if base is None or bound is None or abs(bound) > 1e9:
        return None
    base_value = Value(base, value.function)
    sources = [item.node for item in trace(base_value, earlier_scores)]
    if any(isinstance(item, ast.Call) and called_name(item) in TRIANGULAR for item in sources):
        return None  # a band
    makers = [item for item in sources if isinstance(item, ast.Call)]
    is_boolean = state.is_boolean or any(_converts_to_boolean(item) for item in makers)
    triangle = Triangle(
        call,
        called_name(call) == "triu",
        int(bound),
        is_boolean,
        _filler(base_value, makers),
        state.union,
        state.intersection,
        called_name(call),
    )
    for change in reversed(state.changes):
        triangle = triangle.negated() if change == "negated" else triangle.transposed()
    return triangle._replace(union=state.union, intersection=state.intersection)


def _filler(base: Value, makers: list[ast.Call]) -> float | None:
    """The number that full(…, number), ones(…) or ones(…) * number consists of."""
    factor = 1.0
    if isinstance(base.node, ast.BinOp) and isinstance(base.node.op, ast.Mult):
        for side in (base.node.left, base.node.right):
            if (constant := number(Value(side, base.function))) is not None:
                factor = constant
    for call in makers:
        if called_name(call) in ("full", "full_like", "new_full"):
            filler = tensor_argument(call, 2, "fill_value") if called_name(call) == "new_full" else None
            filler = filler or argument(call, 1, "fill_value")
            return None if filler is None else number(Value(filler, base.function))
        if called_name(call) in ("ones", "ones_like", "new_ones"):
            return factor
    return None


def _converts_to_boolean(call: ast.Call) -> bool:
    if called_name(call) == "bool":
        return True
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "dtype")]
    return any(dotted_name(item) in ("torch.bool", "bool", "np.bool_", "torch.uint8") for item in given)
