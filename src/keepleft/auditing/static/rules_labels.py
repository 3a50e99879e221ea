"""Rules for the loss of a causal language model: labels shifted once, and padding that is ignored."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from keepleft.auditing.static.claims import CAUSAL_NAME, claims_causality
from keepleft.auditing.static.rules import HintRule, Match
from keepleft.auditing.static.syntax import (
    MAX_TRACED_VALUES,
    RESHAPING,
    Function,
    Value,
    argument,
    called_name,
    integer,
    resolve,
    root_name,
    string,
    subscript_parts,
    tensor_argument,
    trace,
)

TOKENS_NAME = re.compile(r"^(input_ids|tokens|token_ids|idx)$")
OTHER_TASK = re.compile(r"classif|num_labels|masked|mlm|bert|seq2seq|conditional|diffus|denois", re.I)
HUGGING_FACE_MODEL = re.compile(r"ForCausalLM$|LMHeadModel$")
PADDING_ID = re.compile(r"(^|_)pad(ding)?(_|$)", re.I)
TARGETS_NAME = re.compile(r"^(labels?|targets?|tgt\w*|trg\w*|y)$")


def losses(function: Function) -> Iterator[tuple[ast.Call, Value, Value]]:
    """F.cross_entropy(logits, labels), nn.CrossEntropyLoss()(logits, labels), self.loss(logits, labels)."""
    for call in function.calls:
        if len(call.args) + len(call.keywords) < 2:
            continue
        if called_name(call) != "cross_entropy" and _loss_module(call, function) is None:
            continue
        logits, labels = argument(call, 0, "input"), argument(call, 1, "target")
        if logits is not None and labels is not None:
            yield call, Value(logits, function), Value(labels, function)


def _loss_module(call: ast.Call, function: Function) -> ast.Call | None:
    candidates = [Value(call.func, function), *resolve(Value(call.func, function))]
    for item in candidates:
        if isinstance(item.node, ast.Call) and called_name(item.node) == "CrossEntropyLoss":
            return item.node
    return None


def _reshaped(value: Value) -> Iterator[Value]:
    """What a reshaping was applied to."""
    node, function = value
    if isinstance(node, ast.Call) and called_name(node) in RESHAPING | {"flatten", "transpose"}:
        source = tensor_argument(node, 0, "input")
        yield from () if source is None else (Value(source, function),)


def _is_slice_of(node: ast.AST, function: Function, *, lower: int | None, upper: int | None) -> bool:
    """x[..., 1:] for lower=1, x[:, :-1] for upper=-1."""
    if not isinstance(node, ast.Subscript):
        return False
    return any(
        isinstance(part, ast.Slice)
        and integer(part.lower, function) == lower
        and integer(part.upper, function) == upper
        for part in subscript_parts(node)
    )


def _shifts(labels: Value) -> int:
    """How often labels were moved by one position on one way to the loss: by [..., 1:] or roll(-1)."""
    most = 0
    queue = [(labels, 0)]
    seen: set[tuple[int, int]] = set()
    while queue and len(seen) < MAX_TRACED_VALUES:
        item, count = queue.pop()
        if (id(item.node), count) in seen:
            continue
        seen.add((id(item.node), count))
        if _is_slice_of(item.node, item.function, lower=1, upper=None):
            count += 1
        elif isinstance(item.node, ast.Call) and called_name(item.node) == "roll":
            count += integer(tensor_argument(item.node, 1, "shifts"), item.function) == -1
        most = max(most, count)
        queue += [(source, count) for source in (*resolve(item), *_shift_sources(item))]
    return most


def _shift_sources(value: Value) -> Iterator[Value]:
    yield from _reshaped(value)
    if isinstance(value.node, ast.Subscript):
        yield Value(value.node.value, value.function)
    elif (
        isinstance(value.node, ast.Call)
        and called_name(value.node) in ("pad", "roll", "cat", "masked_fill")
        and (source := tensor_argument(value.node, 0, "input")) is not None
    ):
        yield Value(source, value.function)


def find_labels_not_shifted(function: Function) -> Iterator[Match]:
    """A causal model's own labels, or its input, compared with all logits."""
    if not _is_causal_code(function) or _mentions_shift(function):
        return
    for call, logits, labels in losses(function):
        values = list(trace(labels, _reshaped))
        name = root_name(values[-1].node) if values else ""
        is_input = any(_names_tokens(item.node) for item in values)
        is_parameter = name == "labels" and function.owner is not None and "labels" in function.parameters
        if not (is_input or is_parameter):
            continue
        if not _is_cut(labels) and not _is_cut(logits):
            yield Match(call, "input" if is_input else "labels")


def _names_tokens(node: ast.expr) -> bool:
    """Whether an expression is input_ids, batch["input_ids"] or batch.input_ids."""
    is_plain = isinstance(node, ast.Name | ast.Attribute) or (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    )
    return is_plain and TOKENS_NAME.match(root_name(node) or getattr(node, "attr", "")) is not None


def _is_causal_code(function: Function) -> bool:
    owner = function.owner.name if function.owner else ""
    if OTHER_TASK.search(owner) or OTHER_TASK.search(function.name) or "num_labels" in function.names:
        return False
    if function.owner is not None:
        return claims_causality(function)
    return any(CAUSAL_NAME.search(name) for name in function.file.names)


def _mentions_shift(function: Function) -> bool:
    """Whether anything in a function, or its class, shifts: by name, by slice, by roll or by pad."""
    functions = function.owner.functions if function.owner else [function]
    for item in functions:
        if any("shift" in name.lower() for name in (*item.names, item.name)):
            return True
        if any(called_name(call) in ("roll", "pad") for call in item.calls):
            return True
    return any(
        _is_slice_of(node, function, lower=1, upper=None)
        or _is_slice_of(node, function, lower=None, upper=-1)
        for node in function.nodes
    )


def _is_cut(value: Value) -> bool:
    """Whether a tensor was indexed on its way to the loss, by positions or by a mask."""
    return any(
        isinstance(item.node, ast.Subscript) and not string(item.node.slice)
        for item in trace(value, _reshaped)
    )


def find_labels_shifted_twice(function: Function) -> Iterator[Match]:
    for call, logits, labels in losses(function):
        cuts_logits = any(
            _is_slice_of(item.node, item.function, lower=None, upper=-1) for item in trace(logits, _reshaped)
        )
        shifts = _shifts(labels)
        if shifts > 1:
            yield Match(call, "labels are moved by one position twice here")
        elif shifts == 1 and cuts_logits and _data_is_shifted(function):
            yield Match(call, "labels are shifted here, and by the data set in this file")
    for call in function.calls:
        given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        if "labels" in given and _is_slice_of(given["labels"], function, lower=1, upper=None):
            tokens = given.get("input_ids") or next(iter(call.args), None)
            is_cut = tokens is not None and _is_slice_of(tokens, function, lower=None, upper=-1)
            if is_cut and any(HUGGING_FACE_MODEL.search(name) for name in function.file.names):
                yield Match(call, "a causal model of transformers shifts its labels itself")


def _data_is_shifted(function: Function) -> bool:
    """Whether another function of the file makes x = data[i : i + n] and y = data[i + 1 : i + 1 + n]."""
    for other in function.file.functions:
        if other is function or not re.search(r"batch|getitem|sample|collate|dataset", other.name):
            continue
        pairs = [node for node in other.nodes if isinstance(node, ast.Subscript)]
        starts = [
            part.lower for node in pairs for part in subscript_parts(node) if isinstance(part, ast.Slice)
        ]
        if any(_adds_one(start, other) or integer(start, other) == 1 for start in starts):
            return True
    return False


def _adds_one(node: ast.expr | None, function: Function) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return integer(left, function) == 1 or integer(right, function) == 1
    return False


def find_losses_of_padding(function: Function) -> Iterator[Match]:
    """A loss over flattened positions, in code that knows a padding id and says nowhere to ignore it."""
    names = function.names | frozenset(
        name for item in (function.owner.functions if function.owner else []) for name in item.names
    )
    if not any(PADDING_ID.search(name) for name in names) or any("mask" in name.lower() for name in names):
        return
    if "ignore_index" in function.file.text or "-100" in function.file.text:
        return
    for call, logits, labels in losses(function):
        sources = [item.node for item in trace(labels, _shift_sources)]
        is_flat = any(
            isinstance(item, ast.Call) and called_name(item) in ("view", "reshape", "flatten")
            for item in sources
        )
        if (
            is_flat
            and any(TARGETS_NAME.match(root_name(item)) for item in sources if isinstance(item, ast.expr))
            and any(isinstance(item.node, ast.Call) for item in trace(logits, _reshaped))
        ):
            yield Match(call)


def _language_model(loss: str) -> str:
    return f"""class CausalLM(nn.Module):
    def forward(self, input_ids, labels):
        logits = self.head(self.model(input_ids))
        {loss}
"""


def _step(loss: str) -> str:
    return f"def loss(model, batch, pad_id, targets):\n    logits = model(batch, pad_id)\n    return {loss}\n"


RULES = [
    HintRule(
        "labels-not-shifted",
        "the loss of a causal model compares the logits of a position with its own token",
        "the logits of a position are compared with the {value} of that position, which the model has read: "
        "compare logits[:, :-1] with labels[:, 1:], unless the caller has shifted them",
        _language_model("return F.cross_entropy(logits.view(-1, self.vocab), labels.view(-1))"),
        _language_model(
            "return F.cross_entropy(logits[:, :-1].reshape(-1, self.vocab), labels[:, 1:].reshape(-1))"
        ),
        find_labels_not_shifted,
    ),
    HintRule(
        "labels-shifted-twice",
        "labels are shifted twice: in two places, or by the data set or the model too",
        "{value}, so that a position learns the token after the next",
        _language_model(
            "labels = labels[:, 1:]\n"
            "        return F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 1:].flatten())"
        ),
        _language_model(
            "labels = labels[:, 1:]\n"
            "        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())"
        ),
        find_labels_shifted_twice,
    ),
    HintRule(
        "loss-counts-padding",
        "cross entropy without `ignore_index` in code that knows a padding id",
        "padding counts in this loss unless its labels are -100: pass ignore_index=…, or fill them with -100",
        _step("F.cross_entropy(logits.view(-1, 9), targets.view(-1))"),
        _step("F.cross_entropy(logits.view(-1, 9), targets.view(-1), ignore_index=pad_id)"),
        find_losses_of_padding,
        level="note",
    ),
]
