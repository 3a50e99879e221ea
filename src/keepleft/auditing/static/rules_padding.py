"""Rules for padding: masks of the other convention, and positions that count padding."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from keepleft.auditing.static.claims import is_language_model
from keepleft.auditing.static.rules import HintRule, Match
from keepleft.auditing.static.syntax import (
    RESHAPING,
    Function,
    Value,
    called_name,
    is_function_of_module,
    number,
    resolve,
    root_name,
    tensor_argument,
)

PADDING_MASKS = re.compile(r"^(\w+_)?key_padding_mask$")
HUGGING_FACE_MASK = re.compile(r"^attention_mask$")
LAYER_INPUT = re.compile(r"hidden|quer|embeds")
PADDING_ID = re.compile(r"(^|_)pad(ding)?(_|$)", re.I)
# positions that the caller may give, and the arguments of a decoder, which is padded on the right
GIVEN = {"position_ids", "positions", "cache_position", "encoder_hidden_states", "memory"}
POSITION_NAME = re.compile(r"^(position(s|_ids)?|pos(_ids)?)$")
MAX_STEPS = 20  # from a mask to where it comes from


def find_inverted_padding_masks(function: Function) -> Iterator[Match]:
    if any(LAYER_INPUT.search(name) for name in function.parameters):
        return  # a layer, whose caller may have negated the mask
    for call in function.calls:
        for keyword in call.keywords:
            takes_mask = keyword.arg is not None and PADDING_MASKS.match(keyword.arg) is not None
            if takes_mask and _is_true_at_tokens(Value(keyword.value, function)):
                yield Match(keyword.value, keyword.arg or "")


def _is_true_at_tokens(value: Value, steps: int = MAX_STEPS) -> bool:
    """Whether a mask is an attention_mask of Hugging Face, or tokens != pad, and was not negated."""
    for _ in range(steps):
        node, function = value
        match node:
            case ast.Compare(left=_, ops=[ast.NotEq()], comparators=[other]):
                return bool(PADDING_ID.search(root_name(other)))
            case ast.Compare(left=left, ops=[ast.Eq() | ast.Gt()], comparators=[right]):
                bound = number(Value(right, function))
                is_identity = bound == 1 if isinstance(node.ops[0], ast.Eq) else bound == 0
                if not is_identity:
                    return False
                value = Value(left, function)
            case ast.Call(args=[*_, other]) if called_name(node) == "ne":
                return bool(PADDING_ID.search(root_name(other)))
            case ast.Call() if called_name(node) in RESHAPING:
                if (source := tensor_argument(node, 0, "input")) is None:
                    return False
                value = Value(source, function)
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                return bool(HUGGING_FACE_MASK.match(name))
            case ast.Subscript(value=inner):
                value = Value(inner, function)
            case ast.Name() | ast.Attribute():
                definitions = resolve(value)
                if len(definitions) == 1:
                    value = definitions[0]
                elif not definitions:
                    name = node.id if isinstance(node, ast.Name) else node.attr
                    return bool(HUGGING_FACE_MASK.match(name))
                else:
                    return False
            case _:
                return False
    return False


def find_positions_that_count_padding(function: Function) -> Iterator[Match]:
    """Positions from arange in a causal model that takes an attention_mask and no position_ids."""
    parameters = set(function.parameters)
    if "attention_mask" not in parameters or parameters & GIVEN:
        return
    if not is_language_model(function) or _counts_tokens(function):
        return
    for name, definitions in function.definitions.items():
        if POSITION_NAME.match(name):
            for definition in definitions:
                arange = _arange(definition.value)
                if arange is not None:
                    yield Match(arange, name)


def _counts_tokens(function: Function) -> bool:
    owner = function.owner
    calls = function.calls if owner is None else list(owner.calls())
    return any(called_name(call) in ("cumsum", "cumsum_", "relative_position_bucket") for call in calls)


def _arange(node: ast.expr) -> ast.Call | None:
    """The call of arange that an expression consists of, apart from its shape and an offset."""
    for _ in range(MAX_STEPS):
        match node:
            case ast.Call() if called_name(node) == "arange":
                return node
            case ast.Call(func=ast.Attribute(value=receiver)) if not is_function_of_module(node):
                node = receiver
            case ast.Subscript(value=inner) | ast.BinOp(left=inner):
                node = inner
            case _:
                return None
    return None


def _encoder(mask: str) -> str:
    return f"def encode(layer, x, attention_mask):\n    return layer(x, src_key_padding_mask={mask})\n"


def _embedding(positions: str) -> str:
    return f"""class GPT(nn.Module):
    def forward(self, tokens, attention_mask):
        positions = {positions}
        return self.blocks(self.token(tokens) + self.position(positions), attention_mask)
"""


RULES = [
    HintRule(
        "padding-mask-inverted",
        "`key_padding_mask` gets an `attention_mask` of Hugging Face, or `tokens != pad`, as it is",
        "{value} of torch.nn is True at padding, and this mask is true at tokens: negate it",
        _encoder("attention_mask.bool()"),
        _encoder("~attention_mask.bool()"),
        find_inverted_padding_masks,
    ),
    HintRule(
        "positions-count-padding",
        "positions from `arange` in a causal model that takes an `attention_mask` but no `position_ids`",
        "{value} from arange count padding on the left too: for such batches take "
        "(attention_mask.cumsum(-1) - 1).clamp(min=0)",
        _embedding("torch.arange(tokens.shape[1])"),
        _embedding("(attention_mask.cumsum(-1) - 1).clamp(min=0)"),
        find_positions_that_count_padding,
        level="note",
    ),
]
