"""Rules for masks of attention scores: the number that hides, the triangle, before or after the softmax."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from keepleft.auditing.static.rules import HintRule, Match, format_number
from keepleft.auditing.static.scores import (
    SCORES_NAME,
    Fill,
    earlier_scores,
    fills,
    is_mask_name,
    is_scores,
    product,
    products,
    softmax_inputs,
    softmaxes,
)
from keepleft.auditing.static.syntax import (
    Function,
    Value,
    argument,
    called_name,
    number,
    resolve,
    root_name,
    tensor_argument,
    trace,
)
from keepleft.auditing.static.triangles import TRIANGULAR, Triangle, triangles

SMALL = -1e5  # scores of a trained model stay below its size
FLOAT16_MIN = -65504.0
LARGEST_FLOAT16_CONSTANT = -6e4  # -6e4, -65000, -65500 stand for the smallest float16
ADDED_MASK_NAME = re.compile(r"att|causal", re.I)
TARGETS_NAME = re.compile(r"^(labels?|targets?|tgt|y)$")
TORCH_MASKS = ("attn_mask", "tgt_mask", "src_mask", "mask")
TORCH_ATTENTION = ("MultiheadAttention", "Transformer")


class Hiding(NamedTuple):
    """A number that is meant to hide scores."""

    node: ast.expr
    number: float


# -- the number that hides ---------------------------------------------------------------------


def hidings(function: Function) -> Iterator[Hiding]:
    """The numbers other than 0 that attention scores are filled with, or get added, where they are hidden."""
    inputs = softmax_inputs(function)
    for fill in fills(function):
        if fill.number != 0 and _fills_scores(fill, inputs):
            yield Hiding(fill.node, fill.number)
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            if (hiding := _added_mask(node, function, inputs)) is not None:
                yield hiding
        elif isinstance(node, ast.Call) and called_name(node) in TRIANGULAR:
            for triangle in triangles(Value(node, function)):
                if triangle.filler is not None and triangle.filler < 0:
                    yield Hiding(node, triangle.filler)


def _fills_scores(fill: Fill, inputs: frozenset[int]) -> bool:
    """Whether what is filled reaches a softmax, is called scores, or is a mask that becomes what is added."""
    name = root_name(fill.tensor.node)
    if TARGETS_NAME.search(name):
        return False
    if is_mask_name(name):
        return fill.number < -1 and ADDED_MASK_NAME.search(name) is not None
    return id(fill.node) in inputs or (SCORES_NAME.search(name) is not None and _is_mask(fill.mask))


def _added_mask(node: ast.BinOp, function: Function, inputs: frozenset[int]) -> Hiding | None:
    """(1 - mask) * number, which is added to scores."""
    for mask, factor in ((node.left, node.right), (node.right, node.left)):
        constant = number(Value(factor, function))
        if constant is None or constant == 0 or number(Value(mask, function)) is not None:
            continue
        if not _is_mask(Value(mask, function)):
            continue
        if any(TARGETS_NAME.search(root_name(target)) for target in _targets(node, function)):
            continue
        parent = function.file.parents.get(id(node))
        subtracted = isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Sub) and parent.right is node
        constant = -constant if subtracted else constant
        is_complement = isinstance(mask, ast.BinOp) and isinstance(mask.op, ast.Sub)
        if id(node) in inputs or (is_complement and constant < -1):
            return Hiding(node, constant)
    return None


def _is_mask(value: Value) -> bool:
    """Whether an expression is a mask, by its name: mask, ~mask, 1 - mask, (mask == 0).float()."""
    node = value.node
    while True:
        match node:
            case ast.BinOp(left=left, op=ast.Sub(), right=right) if number(Value(left, value.function)) == 1:
                node = right
            case ast.UnaryOp(operand=operand) | ast.Compare(left=operand):
                node = operand
            case ast.Call() if called_name(node) in ("any", "all"):
                return False  # which rows are hidden entirely
            case ast.Call(func=ast.Attribute(value=receiver)) if called_name(node) not in TRIANGULAR:
                node = receiver
            case ast.Subscript(value=inner):
                node = inner
            case _:
                break
    definitions = [item.node for item in resolve(Value(node, value.function))]
    if any(isinstance(item, ast.Call) and called_name(item) in ("any", "all") for item in definitions):
        return False
    return is_mask_name(root_name(node)) or any(triangles(Value(node, value.function)))


def _targets(node: ast.AST, function: Function) -> list[ast.expr]:
    """What the statement of an expression assigns to."""
    statement: ast.AST | None = node
    while statement is not None and not isinstance(statement, ast.stmt):
        statement = function.file.parents.get(id(statement))
    return statement.targets if isinstance(statement, ast.Assign) else []


def _is_lowest_float16(constant: float) -> bool:
    return FLOAT16_MIN <= constant <= LARGEST_FLOAT16_CONSTANT


def find_small_values(function: Function) -> Iterator[Match]:
    for node, constant in hidings(function):
        if SMALL < constant < 0 and not _is_lowest_float16(constant):
            yield Match(node, format_number(constant))


def find_finite_values(function: Function) -> Iterator[Match]:
    for node, constant in hidings(function):
        if float("-inf") < constant <= SMALL or _is_lowest_float16(constant):
            spelled = "the lowest number of the dtype" if constant < -1e38 else format_number(constant)
            yield Match(node, spelled)


def find_positive_values(function: Function) -> Iterator[Match]:
    for node, constant in hidings(function):
        if constant >= 1:
            yield Match(node, format_number(constant))


def find_zeroed_scores(function: Function) -> Iterator[Match]:
    """Scores that are multiplied by a mask, or filled with 0, before the softmax."""
    inputs = softmax_inputs(function)
    for fill in fills(function):
        if fill.number == 0 and id(fill.node) in inputs and is_scores(fill.tensor) and _is_mask(fill.mask):
            yield Match(fill.node)
    for node in function.nodes:
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult) or id(node) not in inputs:
            continue
        parent = function.file.parents.get(id(node))
        if isinstance(parent, ast.BinOp | ast.AugAssign) and isinstance(parent.op, ast.Add | ast.Sub):
            continue  # scores * mask - 1e9 * (1 - mask)
        for scores, mask in ((node.left, node.right), (node.right, node.left)):
            if not _is_mask(Value(mask, function)) or is_mask_name(root_name(scores)):
                continue
            if number(Value(scores, function)) is None and is_scores(Value(scores, function)):
                yield Match(node)


# -- the triangle ------------------------------------------------------------------------------


class MaskUse(NamedTuple):
    """A mask where it is applied."""

    mask: Value
    hides_where_true: bool


def mask_uses(function: Function) -> Iterator[MaskUse]:
    inputs = softmax_inputs(function)
    for fill in fills(function):
        keys_first = any(item.key_axis == -2 for item in products(fill.tensor))
        if fill.number < -1 and not keys_first and _fills_scores(fill, inputs):
            yield MaskUse(fill.mask, fill.is_hidden_where_true)
    for call in function.calls:
        if called_name(call) == "scaled_dot_product_attention":
            if (mask := argument(call, 3, "attn_mask")) is not None:
                yield MaskUse(Value(mask, function), hides_where_true=False)
        elif _is_torch_module(call, function):
            for keyword in call.keywords:
                if keyword.arg in TORCH_MASKS:
                    yield MaskUse(Value(keyword.value, function), hides_where_true=True)


def _is_torch_module(call: ast.Call, function: Function) -> bool:
    """Whether self.attn(…) calls nn.MultiheadAttention or one of nn.Transformer's modules."""
    return any(
        called_name(item.node).startswith(TORCH_ATTENTION)
        for item in resolve(Value(call.func, function))
        if isinstance(item.node, ast.Call)
    )


def hidden_triangles(function: Function) -> Iterator[tuple[Triangle, ast.expr]]:
    """What triangular masks hide: key - query on one side of a bound; and the place where they apply."""
    for use in mask_uses(function):
        for triangle in triangles(use.mask):
            if triangle.is_boolean or use.hides_where_true:
                hidden = triangle if use.hides_where_true else triangle.negated()
                if not hidden.intersection and (triangle.filler is None or triangle.filler > 0):
                    yield hidden, use.mask.node
    for node in function.nodes:
        if isinstance(node, ast.Call) and called_name(node) in TRIANGULAR:
            value = Value(node, function)
            for triangle in triangles(value):
                if triangle.filler is not None and triangle.filler < -1:  # it is added to the scores
                    yield from ((item, node) for item in _outermost(node, function, triangle))
                elif _gives_mask_name(node, function):
                    lets_future_through = triangle.bound > 1 if triangle.is_upper else triangle.bound > 0
                    if lets_future_through and triangle.filler == 1:
                        yield (triangle if triangle.is_upper else triangle.negated()), node


def _outermost(node: ast.Call, function: Function, triangle: Triangle) -> Iterator[Triangle]:
    """The triangle as it is added; a transposition around it turns it over."""
    parent = function.file.parents.get(id(node))
    while isinstance(parent, ast.Attribute | ast.Call | ast.Subscript):
        if isinstance(parent, ast.Attribute) and parent.attr in ("T", "mT", "t", "transpose", "mH", "H"):
            triangle = triangle.transposed()
        elif isinstance(parent, ast.Call) and called_name(parent) in TRIANGULAR:
            return
        parent = function.file.parents.get(id(parent))
    yield triangle


def _gives_mask_name(node: ast.Call, function: Function) -> bool:
    """Whether the triangle, as it is, is given a name that says mask."""
    parent = function.file.parents.get(id(node))
    while isinstance(parent, ast.Attribute | ast.Call):
        if isinstance(parent, ast.Attribute) and parent.attr not in ("bool", "to", "type", "float", "view"):
            return False
        parent = function.file.parents.get(id(parent))
    return isinstance(parent, ast.Assign) and any(is_mask_name(root_name(item)) for item in parent.targets)


def find_wrong_diagonals_of_triu(function: Function) -> Iterator[Match]:
    yield from _wrong_diagonals(function, "triu")


def find_wrong_diagonals_of_tril(function: Function) -> Iterator[Match]:
    yield from _wrong_diagonals(function, "tril")


def _wrong_diagonals(function: Function, name: str) -> Iterator[Match]:
    if "lookahead" in function.name or "look_ahead" in function.name:
        return
    for hidden, _ in hidden_triangles(function):
        if hidden.is_upper and hidden.bound != 1 and hidden.function_name == name:
            yield Match(hidden.call, _describe_bound(hidden.bound))


def _describe_bound(bound: int) -> str:
    if bound == 0:
        return "hides each position from itself, and all of the first row"
    if bound < 0:
        return f"hides each position and {-bound} before it"
    return f"lets each position see {bound - 1} later one{'s' if bound > 2 else ''}"


def find_inverted_masks(function: Function) -> Iterator[Match]:
    for hidden, place in hidden_triangles(function):
        if not hidden.is_upper and hidden.bound >= -1:
            yield Match(place)


def find_numeric_masks(function: Function) -> Iterator[Match]:
    """A mask of ones and zeros, as numbers, which attention adds to its scores."""
    for call in function.calls:
        if called_name(call) == "scaled_dot_product_attention":
            mask = argument(call, 3, "attn_mask")
            for triangle in () if mask is None else triangles(Value(mask, function)):
                if not triangle.is_boolean and triangle.filler == 1:
                    yield Match(mask or call)


# -- after the softmax -------------------------------------------------------------------------


def find_masks_after_softmax(function: Function) -> Iterator[Match]:
    """Weights that are multiplied by a mask, or filled with 0, and not divided by their sum."""
    if _renormalises(function):
        return
    calls = {id(softmax.call): softmax for softmax in softmaxes(function)}
    if not calls:
        return
    masked: list[tuple[ast.AST, Value]] = [
        (fill.node, fill.tensor) for fill in fills(function) if fill.number == 0 and _is_mask(fill.mask)
    ]
    for name_values in function.definitions.values():
        masked += [pair for item in name_values for pair in _products_with_mask(item.value, function)]
    for node in function.nodes:
        masked += _products_with_mask(node, function)
    for node, weights in masked:
        for item in trace(weights, earlier_scores):
            softmax = calls.get(id(item.node))
            if softmax is not None and is_scores(softmax.scores) and not _is_masked(softmax.scores):
                yield Match(node)
                break


def _products_with_mask(node: ast.AST, function: Function) -> Iterator[tuple[ast.AST, Value]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        for weights, mask in ((node.left, node.right), (node.right, node.left)):
            if _is_mask(Value(mask, function)):
                yield node, Value(weights, function)
    elif isinstance(node, ast.Call) and called_name(node) in ("mul", "mul_"):
        factors = tensor_argument(node, 0, "input"), tensor_argument(node, 1, "other")
        if factors[0] is not None and factors[1] is not None and _is_mask(Value(factors[1], function)):
            yield node, Value(factors[0], function)


def _is_masked(scores: Value) -> bool:
    """Whether anything before the softmax may have hidden scores already."""
    for item in trace(scores, earlier_scores):
        if product(item) is not None:
            continue
        if isinstance(item.node, ast.Name | ast.Attribute):
            if "mask" in root_name(item.node) or "bias" in root_name(item.node):
                return True
            if isinstance(item.node, ast.Name) and item.node.id in item.function.parameters:
                return True  # the caller may have masked them
        if isinstance(item.node, ast.Call) and called_name(item.node) in (
            "masked_fill",
            "masked_fill_",
            "where",
        ):
            return True
    return False


def _renormalises(function: Function) -> bool:
    """Whether a function divides by a sum, or calls normalize."""
    for node in function.nodes:
        match node:
            case ast.BinOp(op=ast.Div(), right=divisor) | ast.AugAssign(op=ast.Div(), value=divisor):
                if _contains_sum(divisor, function):
                    return True
            case ast.Call() if called_name(node) in ("normalize", "renorm"):
                return True
            case ast.Call(args=[*_, divisor]) if called_name(node) in ("div", "div_", "true_divide"):
                if _contains_sum(divisor, function):
                    return True
    return False


def _contains_sum(node: ast.expr, function: Function) -> bool:
    values = [Value(node, function), *resolve(Value(node, function))]
    return any(
        isinstance(item, ast.Call) and called_name(item) in ("sum", "norm")
        for value in values
        for item in ast.walk(value.node)
    )


def _softmaxed(lines: str) -> str:
    return f"def attend(q, k, v, mask):\n    scores = q @ k.transpose(-2, -1)\n{lines}\n"


RULES = [
    HintRule(
        "mask-value-small",
        "hidden scores get a number such as -100 or -1e4 before the softmax",
        "{value} does not hide a score that is lower still: fill with float('-inf'), or with "
        "torch.finfo(dtype).min",
        _softmaxed("    scores = scores.masked_fill(mask, -1e4)\n    return scores.softmax(-1) @ v"),
        _softmaxed("    scores = scores.masked_fill(mask, float('-inf'))\n    return scores.softmax(-1) @ v"),
        find_small_values,
    ),
    HintRule(
        "mask-value-finite",
        "hidden scores get a large finite number such as -1e9 or `torch.finfo(dtype).min`",
        "with {value} a row that is hidden everywhere gets uniform weights, where -inf would give NaN: check "
        "that nothing reads such rows",
        _softmaxed("    return torch.where(mask, scores, torch.finfo(scores.dtype).min).softmax(-1) @ v"),
        _softmaxed("    return torch.where(mask, scores, -torch.inf).softmax(-1) @ v"),
        find_finite_values,
        level="note",
    ),
    HintRule(
        "mask-value-positive",
        "hidden scores get a positive number before the softmax",
        "{value} makes the masked scores the largest ones, so that attention goes to what should be hidden: "
        "the number must be negative",
        _softmaxed("    scores = scores.masked_fill(mask, 1e9)\n    return scores.softmax(-1) @ v"),
        _softmaxed("    scores = scores.masked_fill(mask, -torch.inf)\n    return scores.softmax(-1) @ v"),
        find_positive_values,
    ),
    HintRule(
        "mask-zeroes-scores",
        "scores are multiplied by a mask, or filled with 0, before the softmax",
        "a score of 0 is not hidden: its weight is exp(0) over the sum; fill with float('-inf') instead",
        _softmaxed("    return (scores * mask).softmax(-1) @ v"),
        _softmaxed("    return (scores * mask - torch.inf * (1 - mask)).softmax(-1) @ v"),
        find_zeroed_scores,
    ),
    HintRule(
        "mask-triu-diagonal",
        "`triu` with a diagonal other than 1 hides scores",
        "this triangle {value}: what a causal mask hides is triu(…, diagonal=1)",
        _softmaxed(
            "    hidden = torch.triu(torch.ones(9, 9)).bool()\n"
            "    return scores.masked_fill(hidden, float('-inf')).softmax(-1) @ v"
        ),
        _softmaxed(
            "    hidden = torch.triu(torch.ones(9, 9), diagonal=1).bool()\n"
            "    return scores.masked_fill(hidden, float('-inf')).softmax(-1) @ v"
        ),
        find_wrong_diagonals_of_triu,
    ),
    HintRule(
        "mask-tril-diagonal",
        "`tril` with a diagonal other than 0 says which scores to keep",
        "this triangle {value}: what a causal mask keeps is tril(…, diagonal=0)",
        _softmaxed(
            "    visible = torch.ones(9, 9).tril(diagonal=1)\n"
            "    return scores.masked_fill(visible == 0, float('-inf')).softmax(-1) @ v"
        ),
        _softmaxed(
            "    visible = torch.ones(9, 9).tril()\n"
            "    return scores.masked_fill(visible == 0, float('-inf')).softmax(-1) @ v"
        ),
        find_wrong_diagonals_of_tril,
    ),
    HintRule(
        "mask-inverted",
        "a triangular mask hides the past and keeps the future",
        "this mask hides earlier positions and keeps later ones: masked_fill, where(mask, number, …) and "
        "nn.MultiheadAttention hide where it is True; scaled_dot_product_attention and where(mask, scores, "
        "…) keep",
        _softmaxed(
            "    future = torch.triu(torch.ones(9, 9), 1)\n"
            "    return scores.masked_fill(future == 0, float('-inf')).softmax(-1) @ v"
        ),
        _softmaxed(
            "    future = torch.triu(torch.ones(9, 9), 1)\n"
            "    return scores.masked_fill(future == 1, float('-inf')).softmax(-1) @ v"
        ),
        find_inverted_masks,
    ),
    HintRule(
        "mask-not-boolean",
        "`scaled_dot_product_attention` gets a mask of ones and zeros that is not boolean",
        "a mask that is not boolean is added to the scores, and ones and zeros hide nothing: convert it with "
        ".bool()",
        "def attend(q, k, v):\n"
        "    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(9, 9).tril())\n",
        "def attend(q, k, v):\n"
        "    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(9, 9).tril().bool())\n",
        find_numeric_masks,
    ),
    HintRule(
        "mask-after-softmax",
        "attention weights are masked after the softmax and not divided by their new sum",
        "hidden positions stay in the denominator of the softmax and so change the other weights: mask the "
        "scores before it, or divide the weights by their sum",
        _softmaxed("    return (scores.softmax(-1) * mask) @ v"),
        _softmaxed(
            "    weights = scores.softmax(-1) * mask\n"
            "    return (weights / weights.sum(-1, keepdim=True)) @ v"
        ),
        find_masks_after_softmax,
    ),
]
