"""Rules for everything over time that is no attention, in classes that claim to be causal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from keepleft.auditing.static.claims import claims_causality, is_language_model
from keepleft.auditing.static.rules import HintRule, Match
from keepleft.auditing.static.syntax import (
    Class,
    Function,
    Value,
    argument,
    axes,
    called_name,
    dotted_name,
    integer,
    is_constant,
    is_function_of_module,
    resolve,
    root_name,
    string,
    subscript_parts,
    tensor_argument,
    trace,
)

OTHER_PART = re.compile(r"enc|audio|mel|patch|image|vision|src|source", re.I)
TRIMMING = re.compile(r"chomp|trim|crop|narrow", re.I)
NO_FEATURES = re.compile(r"mask|real|len|bias|ids|pos|index|indices|kernel|filter|weight|freq", re.I)
STATISTICS = ("mean", "std", "var")


def find_symmetric_convolutions(function: Function) -> Iterator[Match]:
    """nn.Conv1d with padding on both sides and nothing that cuts the end off."""
    if function.owner is None or not claims_causality(function) or _trims(function.owner):
        return
    for call in function.calls:
        if called_name(call) != "Conv1d" or OTHER_PART.search(_assigned_name(call, function)):
            continue
        kernel, padding = argument(call, 2, "kernel_size"), argument(call, 4, "padding")
        size = integer(kernel, function)
        if padding is None or size == 1:
            continue
        amount = integer(padding, function)
        name = _assigned_name(call, function)
        if name.startswith("self.") and not _is_called(name, function.owner):
            continue  # only its weight is used
        if string(padding) == "same":
            yield Match(call, "padding='same'")
        elif amount is not None and amount > 0 and (size is not None or kernel is not None):
            yield Match(call, f"padding={amount}")
        elif amount is None and kernel is not None and _mentions(padding, root_name(kernel), function):
            yield Match(call, "padding computed from the kernel's size")


def _mentions(expression: ast.expr, name: str, function: Function) -> bool:
    values = [Value(expression, function), *resolve(Value(expression, function))]
    return bool(name) and any(
        isinstance(item, ast.Name | ast.Attribute) and root_name(item) == name
        for value in values
        for item in ast.walk(value.node)
    )


def _is_called(name: str, owner: Class) -> bool:
    """Whether a module is used anywhere but for one of its tensors, as in self.conv.weight."""
    attribute = name.removeprefix("self.")
    tensors = ("weight", "bias")
    for function in owner.functions:
        for node in function.nodes:
            if isinstance(node, ast.Attribute) and node.attr == attribute and isinstance(node.ctx, ast.Load):
                parent = function.file.parents.get(id(node))
                if not isinstance(parent, ast.Attribute) or parent.attr not in tensors:
                    return True
    return False


def _trims(owner: Class) -> bool:
    """Whether a class cuts something off the end of an axis: x[..., :length], x[:, :, :-2], Chomp1d."""
    for function in owner.functions:
        for node in function.nodes:
            if isinstance(node, ast.Subscript):
                if any(
                    isinstance(part, ast.Slice) and part.upper is not None for part in subscript_parts(node)
                ):
                    return True
            elif isinstance(node, ast.Call) and TRIMMING.search(called_name(node)):
                return True
    return False


def _assigned_name(call: ast.Call, function: Function) -> str:
    """The name that the statement of a call assigns to."""
    node: ast.AST | None = call
    while node is not None and not isinstance(node, ast.stmt):
        node = function.file.parents.get(id(node))
    return dotted_name(node.targets[0]) if isinstance(node, ast.Assign) else ""


def find_bidirectional_networks(function: Function) -> Iterator[Match]:
    if not is_language_model(function):
        return
    for call in function.calls:
        if (
            called_name(call) in ("LSTM", "GRU", "RNN")
            and not OTHER_PART.search(_assigned_name(call, function))
            and is_constant(argument(call, 99, "bidirectional"), True)
        ):
            yield Match(call, f"nn.{called_name(call)}")


def find_batch_norms(function: Function) -> Iterator[Match]:
    if function.owner is None or not claims_causality(function):
        return
    for call in function.calls:
        is_norm = called_name(call) in ("BatchNorm1d", "InstanceNorm1d")
        if is_norm and not OTHER_PART.search(_assigned_name(call, function)):
            yield Match(call, f"nn.{called_name(call)}")


def find_means_over_time(function: Function) -> Iterator[Match]:
    """x - x.mean(1) and x / x.std(1), in a class without convolutions, whose axis 1 would be the channels."""
    if not claims_causality(function) or "Conv1d" in function.file.called_names:
        return
    for node in function.nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div):
            for item in trace(Value(node.right, function), _summands):
                if isinstance(item.node, ast.Call) and called_name(item.node) in STATISTICS:
                    source = tensor_argument(item.node, 0, "input")
                    dims = axes(tensor_argument(item.node, 1, "dim"), item.function)
                    if source is None or dims is None or not {1, -2} & set(dims):
                        continue
                    if root_name(source) and root_name(source) == root_name(node.left):
                        yield Match(item.node, called_name(item.node))


def _summands(value: Value) -> Iterator[Value]:
    node, function = value
    if isinstance(node, ast.BinOp):
        yield from (Value(node.left, function), Value(node.right, function))
    elif (
        isinstance(node, ast.Call)
        and called_name(node) in ("sqrt", "detach", "clamp", "rsqrt", "unsqueeze")
        and (source := tensor_argument(node, 0, "input")) is not None
    ):
        yield Value(source, function)


def find_flips(function: Function) -> Iterator[Match]:
    if function.owner is None or not claims_causality(function):
        return
    for call in function.calls:
        if called_name(call) == "flip":
            source = tensor_argument(call, 0, "input")
            dims_argument = tensor_argument(call, 1, "dims")
            dims = axes(dims_argument, function)
            if not is_function_of_module(call) and len(call.args) > 1:
                dims = axes(ast.Tuple(list(call.args), ast.Load()), function)
            if source is None or dims is None or not {1, -2} & set(dims):
                continue
            if not NO_FEATURES.search(root_name(source)):
                yield Match(call)


def find_circular_convolutions(function: Function) -> Iterator[Match]:
    """rfft of an input that is not padded, multiplied and transformed back."""
    names = {called_name(call) for call in function.calls}
    is_convolution = "conv" in function.name.lower() or claims_causality(function)
    if not is_convolution or not names & {"irfft", "ifft"} or names & {"pad", "ConstantPad1d"}:
        return
    for call in function.calls:
        if called_name(call) not in ("rfft", "fft"):
            continue
        source, length = argument(call, 0, "input"), argument(call, 1, "n")
        if source is None or NO_FEATURES.search(root_name(source)):
            continue
        if length is None or is_constant(length, None) or _is_plain_length(Value(length, function)):
            yield Match(call)


def _is_plain_length(length: Value) -> bool:
    """x.shape[1], x.size(1) and the like, where 2 * x.shape[1] or more is needed."""
    definitions = resolve(length) or [length]
    return all(
        isinstance(item.node, ast.Subscript | ast.Attribute | ast.Call)
        and (dotted_name(item.node).endswith("shape") or _is_size(item.node))
        for item in definitions
    )


def _is_size(node: ast.expr) -> bool:
    match node:
        case ast.Subscript(value=ast.Attribute(attr="shape")):
            return True
        case ast.Call(func=ast.Attribute(attr="size")):
            return True
    return False


def _causal_module(init: str, forward: str = "return self.layer(x)") -> str:
    return f"""class CausalMixer(nn.Module):
    def __init__(self, dim, kernel_size):
        self.layer = {init}

    def forward(self, x):
        {forward}
"""


RULES = [
    HintRule(
        "conv-padding",
        "`nn.Conv1d` with padding on both sides in a class that claims causality, nothing cut off the end",
        "{value} pads both sides, so that a position sees later ones: pad (kernel_size - 1) * dilation on "
        "the left only, or cut the end off",
        _causal_module("nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2)"),
        _causal_module(
            "nn.Conv1d(dim, dim, kernel_size, padding=kernel_size - 1)",
            "return self.layer(x)[..., :x.shape[-1]]",
        ),
        find_symmetric_convolutions,
    ),
    HintRule(
        "rnn-bidirectional",
        "a bidirectional LSTM, GRU or RNN in such a class",
        "a bidirectional {value} reads the sequence from its end too, in a class that claims to be causal",
        _causal_module("nn.LSTM(dim, dim, bidirectional=True)"),
        _causal_module("nn.LSTM(dim, dim)"),
        find_bidirectional_networks,
    ),
    HintRule(
        "norm-over-time",
        "`nn.BatchNorm1d` or `nn.InstanceNorm1d` in such a class",
        "{value} takes its statistics over all positions in training, so that earlier outputs depend on "
        "later inputs: use a norm over the features, such as LayerNorm or RMSNorm",
        _causal_module("nn.BatchNorm1d(dim)"),
        _causal_module("nn.LayerNorm(dim)"),
        find_batch_norms,
    ),
    HintRule(
        "mean-over-time",
        "`x - x.mean(1)` or `x / x.std(1)` in such a class",
        "this {value} is taken over all positions, the later ones included: take it over the features "
        "(dim=-1) or over the positions so far",
        _causal_module("nn.Linear(dim, dim)", "return self.layer(x - x.mean(dim=1, keepdim=True))"),
        _causal_module("nn.Linear(dim, dim)", "return self.layer(x - x.mean(dim=-1, keepdim=True))"),
        find_means_over_time,
    ),
    HintRule(
        "flip-over-time",
        "`flip` over the time axis in such a class",
        "flip over time puts later positions before earlier ones: check that nothing causal reads them",
        _causal_module("nn.GRU(dim, dim)", "return self.layer(torch.flip(x, dims=[1]))"),
        _causal_module("nn.GRU(dim, dim)", "return self.layer(torch.flip(x, dims=[-1]))"),
        find_flips,
    ),
    HintRule(
        "fft-wraps",
        "a convolution by FFT whose input is not padded to twice its length",
        "a product of Fourier transforms is a circular convolution: without n = 2 * length, the end of the "
        "sequence wraps around to its beginning",
        _causal_module(
            "nn.Linear(dim, dim)", "return torch.fft.irfft(torch.fft.rfft(x, dim=1) * self.kernel_f, dim=1)"
        ),
        _causal_module(
            "nn.Linear(dim, dim)",
            "return torch.fft.irfft(torch.fft.rfft(x, n=2 * x.shape[1], dim=1) * self.kernel_f, dim=1)",
        ),
        find_circular_convolutions,
    ),
]
