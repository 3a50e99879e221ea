"""Attention scores in the syntax tree: products of queries and keys, their softmax, and what hides scores."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from keepleft.auditing.static.syntax import (
    RESHAPING,
    Function,
    Value,
    argument,
    called_name,
    integer,
    is_function_of_module,
    number,
    resolve,
    root_name,
    tensor_argument,
    trace,
)

QUERY_NAME = re.compile(r"^(q(\d|_|$)|quer)", re.I)
KEY_NAME = re.compile(r"^(k(\d|_|$)|key(?!word))", re.I)
SCORES_NAME = re.compile(r"(^|_)(att|attn|attention|scores?|dots|wei|energy|energies|qk)(_|$)")
MASK_NAME = re.compile(r"mask|causal|tril|triu|(^|_)(pad|padding|visible|allowed|hidden)(_|$)", re.I)
OTHER_MASK_NAME = re.compile(
    r"drop|head_|expert|rout|layer_|hidden_s|hidden_d|tril_i|triu_i|fully|empty", re.I
)
TRANSPOSING = frozenset({"transpose", "permute", "swapaxes", "movedim", "t", "rearrange"})
PASSING_SCORES_ON = RESHAPING | frozenset(
    "masked_fill masked_fill_ add add_ sub sub_ mul mul_ div div_ clamp clip tanh dropout nan_to_num "
    "transpose permute rearrange".split()
)


class Softmax(NamedTuple):
    """A call of softmax."""

    call: ast.Call
    scores: Value
    dim: ast.expr | None
    takes_dim: bool  # whether the call could have hidden it behind **options


class Fill(NamedTuple):
    """A place where some entries of a tensor are replaced by a number."""

    node: ast.expr
    tensor: Value
    mask: Value
    is_hidden_where_true: bool
    number: float


class Product(NamedTuple):
    """A matrix product of queries and keys."""

    node: ast.expr
    key_axis: int  # -1, or -2 where the keys come first
    rank: int | None  # of the scores, where it can be told
    min_rank: int


def is_mask_name(name: str) -> bool:
    return bool(MASK_NAME.search(name)) and not OTHER_MASK_NAME.search(name)


def softmaxes(function: Function) -> Iterator[Softmax]:
    """F.softmax(x, dim), x.softmax(dim), nn.Softmax(dim)(x), self.softmax(x) where it is nn.Softmax(dim)."""
    for call in function.calls:
        if called_name(call) == "softmax" and (scores := tensor_argument(call, 0, "input")) is not None:
            dim = tensor_argument(call, 1, "dim")
            if dim is not None or not isinstance(call.func, ast.Attribute) or is_function_of_module(call):
                yield Softmax(call, Value(scores, function), dim, False)
                continue
        for module in _modules(Value(call.func, function)):
            if called_name(module) == "Softmax" and call.args:
                yield Softmax(call, Value(call.args[0], function), argument(module, 0, "dim"), True)


def _modules(value: Value) -> Iterator[ast.Call]:
    """The calls that make the module that is called: for self.softmax, nn.Softmax(dim=-1)."""
    candidates = [value] if isinstance(value.node, ast.Call) else resolve(value)
    yield from (item.node for item in candidates if isinstance(item.node, ast.Call))


def earlier_scores(value: Value) -> Iterator[Value]:
    """What an operation that keeps scores in their places was applied to."""
    node, function = value
    parts: list[ast.expr | None] = []
    match node:
        case ast.Call() if called_name(node) == "where":
            if is_function_of_module(node):
                parts = [argument(node, 1, "input"), argument(node, 2, "other")]
            else:
                parts = [tensor_argument(node, 0, "input"), tensor_argument(node, 2, "other")]
        case ast.Call() if called_name(node) in PASSING_SCORES_ON:
            parts = [tensor_argument(node, 0, "input")]
            if called_name(node) in ("add", "add_", "sub", "sub_", "mul", "mul_"):
                parts.append(tensor_argument(node, 1, "other"))
        case ast.Call(args=[first, *_]) if "drop" in called_name(node):
            parts = [first]
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()):
            parts = [node.left, node.right]
        case ast.IfExp():
            parts = [node.body, node.orelse]
        case ast.Subscript() | ast.Starred():
            parts = [node.value]
        case ast.UnaryOp():
            parts = [node.operand]
    return (Value(part, function) for part in parts if part is not None)


@lru_cache(maxsize=64)
def softmax_inputs(function: Function) -> frozenset[int]:
    """The ids of all nodes of a function whose values reach a softmax."""
    return frozenset(
        id(value.node) for softmax in softmaxes(function) for value in trace(softmax.scores, earlier_scores)
    )


def is_scores(value: Value) -> bool:
    """Whether an expression holds attention scores: by its name, or as a product of queries and keys."""
    return any(
        SCORES_NAME.search(root_name(item.node)) is not None or product(item) is not None
        for item in trace(value, earlier_scores)
        if isinstance(item.node, ast.Name | ast.Attribute | ast.BinOp | ast.Call)
    )


def products(value: Value) -> Iterator[Product]:
    """The products of queries and keys that scores come from."""
    for item in trace(value, earlier_scores):
        if (found := product(item)) is not None:
            yield found


def product(value: Value) -> Product | None:
    """The product of queries and keys that an expression is, if it is one."""
    node, function = value
    match node:
        case ast.BinOp(op=ast.MatMult(), left=left, right=right):
            return _matrix_product(node, left, right, function)
        case ast.Call() if called_name(node) in ("matmul", "bmm"):
            left_operand, right_operand = tensor_argument(node, 0, "input"), tensor_argument(node, 1, "other")
            if left_operand is not None and right_operand is not None:
                return _matrix_product(node, left_operand, right_operand, function)
        case ast.Call(args=[ast.Constant(value=str(equation)), left, right]) if called_name(node) == "einsum":
            return _einsum_product(node, equation.replace(" ", ""), left, right)
    return None


def _matrix_product(node: ast.expr, left: ast.expr, right: ast.expr, function: Function) -> Product | None:
    order = (_kind(left), _kind(right))
    if order not in (("query", "key"), ("key", "query")):
        return None
    ranks = [rank(Value(side, function)) for side in (left, right)]
    known = [item for item in ranks if item is not None]
    axes = [axis for side in (left, right) for axis in _transposed_axes(side, function)]
    min_rank = max([2, *known, *(axis + 1 for axis in axes)])
    return Product(node, -1 if order[0] == "query" else -2, max(known, default=None), min_rank)


def _einsum_product(node: ast.expr, equation: str, left: ast.expr, right: ast.expr) -> Product | None:
    order = (_kind(left), _kind(right))
    inputs, arrow, output = equation.partition("->")
    operands = inputs.split(",")
    if not arrow or not output.isalpha() or len(operands) != 2:
        return None
    if order not in (("query", "key"), ("key", "query")):
        return None
    keys, queries = operands if order[0] == "key" else operands[::-1]
    key_letters = [letter for letter in output if letter in keys and letter not in queries]
    if len(key_letters) != 1:
        return None
    return Product(node, output.index(key_letters[0]) - len(output), len(output), len(output))


def _kind(node: ast.expr) -> str:
    name = root_name(node)
    return "query" if QUERY_NAME.search(name) else "key" if KEY_NAME.search(name) else ""


def rank(value: Value) -> int | None:
    """The number of axes of a tensor, where a view or a reshape says it."""
    ranks: set[int] = set()
    for item in trace(value, _shape_source):
        if isinstance(item.node, ast.Call) and called_name(item.node) in ("view", "reshape"):
            sizes = item.node.args[1:] if is_function_of_module(item.node) else item.node.args
            if len(sizes) == 1 and isinstance(sizes[0], ast.Tuple):
                sizes = sizes[0].elts
            if len(sizes) > 1 and not any(isinstance(size, ast.Starred) for size in sizes):
                ranks.add(len(sizes))
    return ranks.pop() if len(ranks) == 1 else None


def _shape_source(value: Value) -> Iterator[Value]:
    node = value.node
    if isinstance(node, ast.Call) and called_name(node) in TRANSPOSING | {"contiguous"}:
        if (source := tensor_argument(node, 0, "input")) is not None:
            yield Value(source, value.function)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield Value(node.left, value.function)


def _transposed_axes(node: ast.expr, function: Function) -> list[int]:
    """The axes that the outermost transposition exchanges, counted from the front."""
    if isinstance(node, ast.Call) and called_name(node) in ("transpose", "swapaxes", "permute"):
        sizes = node.args[1:] if is_function_of_module(node) else node.args
        return [axis for size in sizes if (axis := integer(size, function)) is not None]
    return []


# -- what hides scores -------------------------------------------------------------------------


def fills(function: Function) -> Iterator[Fill]:
    """masked_fill, where with a number on one side, and x[mask] = number."""
    assigned = [
        definition.value
        for definitions in function.definitions.values()
        for definition in definitions
        if isinstance(definition.value, ast.Call) and id(definition.value) not in function.positions
    ]
    for call in (*function.calls, *assigned):
        name = called_name(call)
        if name in ("masked_fill", "masked_fill_"):
            parts = [tensor_argument(call, n, key) for n, key in enumerate(("input", "mask", "value"))]
            if (fill := _fill(call, function, *parts, is_hidden_where_true=True)) is not None:
                yield fill
        elif name == "where" and is_function_of_module(call):
            condition, a, b = (
                argument(call, n, key) for n, key in enumerate(("condition", "input", "other"))
            )
            yield from _where_fills(call, function, condition, a, b)
        elif name == "where":
            a, condition, b = (
                tensor_argument(call, n, key) for n, key in enumerate(("input", "condition", "other"))
            )
            yield from _where_fills(call, function, condition, a, b)


def _where_fills(
    call: ast.Call,
    function: Function,
    condition: ast.expr | None,
    kept: ast.expr | None,
    other: ast.expr | None,
) -> Iterator[Fill]:
    for tensor, filler, is_hidden_where_true in ((kept, other, False), (other, kept, True)):
        fill = _fill(call, function, tensor, condition, filler, is_hidden_where_true=is_hidden_where_true)
        if fill is not None and number(fill.tensor) is None:
            yield fill


def _fill(
    call: ast.Call,
    function: Function,
    tensor: ast.expr | None,
    mask: ast.expr | None,
    filler: ast.expr | None,
    *,
    is_hidden_where_true: bool,
) -> Fill | None:
    if tensor is None or mask is None or filler is None:
        return None
    constant = number(Value(filler, function))
    if constant is None:
        return None
    return Fill(call, Value(tensor, function), Value(mask, function), is_hidden_where_true, constant)
