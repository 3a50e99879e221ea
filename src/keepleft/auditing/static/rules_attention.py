"""Rules for attention: the axis of the softmax, is_causal, and calls without a mask in causal classes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from keepleft.auditing.static.claims import is_language_model
from keepleft.auditing.static.rules import HintRule, Match
from keepleft.auditing.static.scores import Product, products, softmaxes
from keepleft.auditing.static.syntax import (
    Function,
    Value,
    argument,
    called_name,
    dotted_name,
    has_hidden_arguments,
    integer,
    is_constant,
    resolve,
    root_name,
    subscript_parts,
    trace,
)

SDPA = "scaled_dot_product_attention"
CACHE_NAME = re.compile(r"cache|past", re.I)
OTHER_SEQUENCE = re.compile(
    r"cross|memory|context|encoder|enc_|source|src|cond|latent|media|image|audio", re.I
)
ONE_STEP = re.compile(r"step|decode|incremental|one_token|next", re.I)
STEP_CONDITION = re.compile(
    r"cache|past|causal|mask|len|size|shape|cross|prefill|incremental|decod|step", re.I
)
SLOTS = re.compile(r"slot|cluster|routing|capsule", re.I)

ENCODER_DECODERS = ("Transformer", "TransformerDecoder", "TransformerDecoderLayer")
# the arguments that may hold a mask, with their positions, by the module of torch.nn
TORCH_MASKS = {
    "MultiheadAttention": {"attn_mask": 5},
    "TransformerEncoder": {"mask": 1},
    "TransformerEncoderLayer": {"src_mask": 1},
    "TransformerDecoder": {"tgt_mask": 2},
    "TransformerDecoderLayer": {"tgt_mask": 2},
    "Transformer": {"tgt_mask": 3},
}


def find_wrong_axes(function: Function) -> Iterator[Match]:
    owner = function.owner.name if function.owner else ""
    if SLOTS.search(function.name) or SLOTS.search(owner):
        return
    for softmax in softmaxes(function):
        for item in products(softmax.scores):
            if softmax.dim is None:
                yield Match(softmax.call, "no dim, which takes axis 1 of a tensor with four axes")
                break
            if (dim := integer(softmax.dim, function)) is not None and _is_wrong_axis(dim, item):
                yield Match(softmax.call, f"dim={dim}")
                break


def _is_wrong_axis(dim: int, item: Product) -> bool:
    if dim < 0:
        return dim != item.key_axis
    if item.rank is not None:
        return dim != item.rank + item.key_axis
    return dim < item.min_rank + item.key_axis


# -- scaled_dot_product_attention --------------------------------------------------------------


def find_is_causal_with_cache(function: Function) -> Iterator[Match]:
    for call in _sdpa_calls(function):
        if not is_constant(argument(call, 5, "is_causal"), True) or _is_conditional(call, function):
            continue
        queries, keys = argument(call, 0, "query"), argument(call, 1, "key")
        if keys is not None and _holds_cached_keys(Value(keys, function)):
            yield Match(call)
        elif queries is not None and keys is not None:
            is_last = [_is_last_query(Value(item, function)) for item in (queries, keys)]
            if is_last == [True, False]:
                yield Match(call)


def _holds_cached_keys(keys: Value) -> bool:
    """Whether keys are concatenated with earlier ones, or come out of a cache."""
    for item in trace(keys, _inputs):
        node = item.node
        if not isinstance(node, ast.Call):
            continue
        if called_name(node) in ("cat", "concat", "concatenate") and node.args:
            parts = node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else []
            if any(CACHE_NAME.search(root_name(part)) for part in parts):
                return True
        if called_name(node) in ("update", "append") and CACHE_NAME.search(dotted_name(node.func)):
            return True
    return False


def _inputs(value: Value) -> Iterator[Value]:
    """What a method that changes the shape of a tensor is called on."""
    node = value.node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield Value(node.func.value, value.function)
    elif isinstance(node, ast.Subscript):
        yield Value(node.value, value.function)


def _is_last_query(queries: Value) -> bool:
    """q[:, :, -1:], which has fewer positions than the keys."""
    for item in trace(queries, lambda value: ()):
        if isinstance(item.node, ast.Subscript):
            for part in subscript_parts(item.node):
                if isinstance(part, ast.Slice) and part.upper is None:
                    start = integer(part.lower, item.function)
                    if start is not None and start < 0:
                        return True
    return False


def find_is_causal_with_mask(function: Function) -> Iterator[Match]:
    for call in _sdpa_calls(function):
        mask = argument(call, 3, "attn_mask")
        if mask is None or is_constant(mask, None) or not is_constant(argument(call, 5, "is_causal"), True):
            continue
        definitions = resolve(Value(mask, function))
        if not definitions or not all(is_constant(item.node, None) for item in definitions):
            yield Match(call)


def find_unmasked_attention(function: Function) -> Iterator[Match]:
    if not is_language_model(function) or ONE_STEP.search(function.name):
        return
    if OTHER_SEQUENCE.search(function.name):
        return
    for call in _sdpa_calls(function):
        mask, is_causal = argument(call, 3, "attn_mask"), argument(call, 5, "is_causal")
        has_mask = mask is not None and not is_constant(mask, None)
        is_causal_given = is_causal is not None and not is_constant(is_causal, False)
        if has_mask or is_causal_given or has_hidden_arguments(call) or _is_conditional(call, function):
            continue
        keys = argument(call, 1, "key")
        if keys is None or not _is_of_other_sequence(Value(keys, function)):
            yield Match(call)


def _sdpa_calls(function: Function) -> Iterator[ast.Call]:
    return (call for call in function.calls if called_name(call) == SDPA)


def _is_conditional(call: ast.Call, function: Function) -> bool:
    """Whether the call is made only where a condition on the lengths, the cache or the mask holds."""
    return any(
        STEP_CONDITION.search(name) is not None
        for test in function.enclosing_tests(call)
        for name in _names(test)
    )


def _names(node: ast.expr) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Name):
            yield item.id
        elif isinstance(item, ast.Attribute):
            yield item.attr


def _is_of_other_sequence(keys: Value) -> bool:
    """Whether keys are computed from something called memory, context, encoder_hidden_states, …"""
    return any(OTHER_SEQUENCE.search(root_name(item.node)) for item in trace(keys, _all_inputs))


def _all_inputs(value: Value) -> Iterator[Value]:
    yield from _inputs(value)
    if isinstance(value.node, ast.Call):
        yield from (Value(item, value.function) for item in value.node.args)


# -- modules of torch.nn -----------------------------------------------------------------------


def find_unmasked_modules(function: Function) -> Iterator[Match]:
    """self.attn(x, x, x) without attn_mask and the like, in a class that claims causality."""
    owner = function.owner
    if owner is None or ONE_STEP.search(function.name) or OTHER_SEQUENCE.search(function.name):
        return
    is_causal = is_language_model(function)
    embeds_tokens = any(called_name(call) == "Embedding" for call in owner.calls())
    makes_decoder = any(called_name(call).startswith("TransformerDecoder") for call in owner.calls())
    for call in function.calls:
        kind = _torch_module(call, function)
        claims = is_causal or (embeds_tokens and kind in ENCODER_DECODERS)
        is_encoder = kind.startswith("TransformerEncoder") and makes_decoder
        if not kind or not claims or is_encoder or has_hidden_arguments(call):
            continue
        if kind == "MultiheadAttention" and not _is_self_attention(call):
            continue
        masks = [argument(call, position, name) for name, position in TORCH_MASKS[kind].items()]
        flags = [keyword.value for keyword in call.keywords if keyword.arg in ("is_causal", "tgt_is_causal")]
        is_unmasked = all(
            item is None or is_constant(item, None) or is_constant(item, False) for item in masks + flags
        )
        if is_unmasked and not _is_conditional(call, function):
            yield Match(call, f"nn.{kind}")


def _torch_module(call: ast.Call, function: Function) -> str:
    """MultiheadAttention where self.attn is one and is called; also for `layer` of self.layers."""
    if not isinstance(call.func, ast.Name) and not dotted_name(call.func).startswith("self."):
        return ""
    if isinstance(call.func, ast.Name) and not function.definitions_before(call.func.id, call.func):
        return ""
    for item in trace(Value(call.func, function), _module_parts):
        if isinstance(item.node, ast.Call) and called_name(item.node) in TORCH_MASKS:
            return called_name(item.node)
    return ""


def _module_parts(value: Value) -> Iterator[Value]:
    """What is in nn.ModuleList([…]), nn.ModuleList(… for …), enumerate(…) and zip(…)."""
    match value.node:
        case ast.Call(args=args) if called_name(value.node) in (
            "ModuleList",
            "Sequential",
            "enumerate",
            "zip",
            "reversed",
        ):
            yield from (Value(item, value.function) for item in args)
        case ast.List(elts=elts) | ast.Tuple(elts=elts):
            yield from (Value(item, value.function) for item in elts)
        case ast.Starred(value=item) | ast.Subscript(value=item):
            yield Value(item, value.function)
        case ast.ListComp(elt=item) | ast.GeneratorExp(elt=item):
            yield Value(item, value.function)


def _is_self_attention(call: ast.Call) -> bool:
    queries, keys = argument(call, 0, "query"), argument(call, 1, "key")
    return queries is not None and keys is not None and ast.dump(queries) == ast.dump(keys)


def _causal_class(lines: str, init: str = "pass") -> str:
    return f"""class CausalSelfAttention(nn.Module):
    def __init__(self):
        {init}

    def forward(self, x, past_k=None):
        q, k, v = self.qkv(x).chunk(3, -1)
        {lines}
"""


_MODULE = "self.attn = nn.MultiheadAttention(8, 2)"

RULES = [
    HintRule(
        "softmax-axis",
        "softmax of attention scores over another axis than that of the keys",
        "softmax of attention scores with {value}: the weights of a query must add up to 1 over the keys, "
        "the last axis of q @ kᵀ",
        "def attend(q, k, v):\n    return F.softmax(q @ k.transpose(1, 2), dim=1) @ v\n",
        "def attend(q, k, v):\n    return F.softmax(q @ k.transpose(1, 2), dim=-1) @ v\n",
        find_wrong_axes,
    ),
    HintRule(
        "is-causal-with-cache",
        "`is_causal=True` where keys include earlier ones from a cache, or queries are fewer",
        "is_causal=True aligns the first query with the first key, so with a cache a query misses the latest "
        "keys: pass a mask for the offset, or is_causal only where there are as many queries as keys",
        _causal_class(
            "k = torch.cat([past_k, k], dim=1)\n"
            "        return F.scaled_dot_product_attention(q, k, v, is_causal=True)"
        ),
        _causal_class(
            "k = torch.cat([past_k, k], dim=1)\n"
            "        return F.scaled_dot_product_attention(q, k, v, is_causal=past_k is None)"
        ),
        find_is_causal_with_cache,
    ),
    HintRule(
        "is-causal-with-mask",
        "`scaled_dot_product_attention` with both `is_causal=True` and `attn_mask`",
        "attn_mask and is_causal=True exclude each other: combine both in attn_mask",
        _causal_class("return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=True)"),
        _causal_class("return F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True)"),
        find_is_causal_with_mask,
    ),
    HintRule(
        "attention-unmasked",
        "`scaled_dot_product_attention` without a mask in a class that claims causality",
        "neither attn_mask nor is_causal=True, in a class that claims to be causal: every position sees the "
        "later ones",
        _causal_class("return F.scaled_dot_product_attention(q, k, v)"),
        _causal_class("return F.scaled_dot_product_attention(q, k, v, is_causal=True)"),
        find_unmasked_attention,
    ),
    HintRule(
        "module-unmasked",
        "`nn.MultiheadAttention` or a module of `nn.Transformer` called without a mask in such a class, or "
        "in one that embeds tokens for an `nn.TransformerDecoder`",
        "{value} is not causal by itself: pass a mask (attn_mask, tgt_mask, …) that hides later positions",
        _causal_class("return self.attn(x, x, x)[0]", _MODULE),
        _causal_class("return self.attn(x, x, x, attn_mask=self.hidden)[0]", _MODULE),
        find_unmasked_modules,
    ),
]
