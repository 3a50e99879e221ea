"""A source file as a syntax tree: its classes and functions, and where the value of a name comes from.

Nothing is imported or executed. Every walk is bounded, so that no file takes long, however it is written.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from typing import NamedTuple

MAX_TRACED_VALUES = 200  # of one question
MAX_DEFINITIONS = 20  # of one name, looked at from where it is used
MAX_CONSTANT_DEPTH = 8
MODULE_ALIASES = frozenset({"torch", "F", "nn", "functional", "np", "numpy", "jnp", "math", "fft", "special"})
FINFO_MAX = 3.4e38
# methods and functions that keep the numbers of a tensor, as far as a mask is concerned
RESHAPING = frozenset(
    "to type type_as float half double bfloat16 bool int long byte contiguous clone detach expand expand_as "
    "view view_as reshape squeeze unsqueeze repeat broadcast_to cuda cpu requires_grad_ as_tensor Parameter "
    "Buffer".split()
)

MAKING_TENSORS = frozenset(
    "zeros zeros_like ones ones_like full full_like empty arange linspace eye tensor rand randn".split()
)

Branch = tuple[int, int]  # a statement that branches, and which of its branches
Block = tuple[Branch, ...]  # from the outside in


class Definition(NamedTuple):
    """A value that a name is given."""

    value: ast.expr
    position: tuple[int, int]
    block: Block


class Value(NamedTuple):
    """An expression, with the function whose names it uses."""

    node: ast.expr
    function: Function


@dataclass(eq=False)
class Class:
    """A class of the file."""

    node: ast.ClassDef
    functions: list[Function] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.node.name

    @cached_property
    def attributes(self) -> dict[str, list[Value]]:
        """The values that attributes of self are given in any method; buffers and parameters included."""
        out: dict[str, list[Value]] = defaultdict(list)
        for function in self.functions:
            for name, definitions in function.definitions.items():
                if name.startswith("self."):
                    out[name] += [Value(definition.value, function) for definition in definitions]
            for call in function.calls:
                if called_name(call) in ("register_buffer", "register_parameter", "add_module"):
                    name = string(argument(call, 0, "name"))
                    value = argument(call, 1, "tensor") or argument(call, 1, "module")
                    if name and value is not None:
                        out[f"self.{name}"].append(Value(value, function))
        return out

    def calls(self) -> Iterator[ast.Call]:
        for function in self.functions:
            yield from function.calls


@dataclass(eq=False)
class Function:
    """A function of the file, or the code of the file outside of functions (then node is an ast.Module)."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
    file: SourceFile
    parent: Function | None = None
    owner: Class | None = None
    nodes: list[ast.AST] = field(default_factory=list)  # without those of the functions inside
    blocks: dict[int, Block] = field(default_factory=dict)  # by the id of a node
    positions: dict[int, tuple[int, int]] = field(default_factory=dict)  # of the statement of a node

    @property
    def name(self) -> str:
        return "" if isinstance(self.node, ast.Module) else self.node.name

    @cached_property
    def parameters(self) -> list[str]:
        if isinstance(self.node, ast.Module):
            return []
        arguments = self.node.args
        return [item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]

    @cached_property
    def calls(self) -> list[ast.Call]:
        return [node for node in self.nodes if isinstance(node, ast.Call)]

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name and attribute that the function uses, and its parameters."""
        used = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        used |= {node.attr for node in self.nodes if isinstance(node, ast.Attribute)}
        return frozenset(used | set(self.parameters))

    @cached_property
    def definitions(self) -> dict[str, list[Definition]]:
        """What each name, or attribute of self, is given, in the order of the file."""
        out: dict[str, list[Definition]] = defaultdict(list)
        for node in self.nodes:
            for target, value in _assignments(node):
                name = dotted_name(target)
                if name and (name.count(".") == 0 or name.startswith("self.")):
                    out[name].append(Definition(value, self.positions[id(node)], self.blocks[id(node)]))
        for definitions in out.values():
            definitions.sort(key=lambda definition: definition.position)
        return out

    @cached_property
    def returned(self) -> list[ast.expr]:
        return [node.value for node in self.nodes if isinstance(node, ast.Return) and node.value is not None]

    def enclosing_tests(self, node: ast.AST) -> Iterator[ast.expr]:
        """The conditions that decide whether a node is reached: of if, while and conditional expressions."""
        current = self.file.parents.get(id(node))
        child: ast.AST = node
        while current is not None and current is not self.node:
            if isinstance(current, ast.If | ast.IfExp | ast.While) and child is not current.test:
                yield current.test
            child, current = current, self.file.parents.get(id(current))

    def definitions_before(self, name: str, use: ast.AST) -> list[Value]:
        """What a name can hold where it is used: its last value, and those that a branch may have left."""
        if (position := self.positions.get(id(use))) is None:
            candidates = self.definitions.get(name, [])[-MAX_DEFINITIONS:]
            return [Value(definition.value, self) for definition in candidates]
        block = self.blocks[id(use)]
        values: list[Value] = []
        definitions = self.definitions.get(name, [])
        end = bisect_left(definitions, position, key=lambda definition: definition.position)
        for definition in reversed(definitions[max(0, end - MAX_DEFINITIONS) : end]):
            if _exclude_each_other(definition.block, block):
                continue
            values.append(Value(definition.value, self))
            if definition.block == block[: len(definition.block)]:
                return values
        return values


@dataclass(eq=False)
class SourceFile:
    """A parsed file."""

    text: str
    tree: ast.Module
    functions: list[Function] = field(default_factory=list)
    classes: dict[str, Class] = field(default_factory=dict)
    parents: dict[int, ast.AST] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> SourceFile:
        """The file with this text. Raises SyntaxError, ValueError, RecursionError or MemoryError."""
        file = cls(text, ast.parse(text))
        file._collect()
        return file

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name that the file uses or defines."""
        return frozenset().union(*(function.names for function in self.functions), self.classes)

    @cached_property
    def called_names(self) -> frozenset[str]:
        return frozenset(called_name(call) for function in self.functions for call in function.calls)

    @cached_property
    def module_functions(self) -> dict[str, Function]:
        return {function.name: function for function in self.functions if function.owner is None}

    def _collect(self) -> None:
        module = Function(self.tree, self)
        self.functions.append(module)
        stack: list[tuple[ast.AST, Function, Class | None, Block, tuple[int, int]]] = [
            (child, module, None, (), (0, 0)) for child in self.tree.body
        ]
        self.parents |= {id(child): self.tree for child in self.tree.body}
        while stack:
            node, function, owner, block, position = stack.pop()
            if isinstance(node, ast.stmt):
                position = (node.lineno, node.col_offset)
            function.nodes.append(node)
            function.blocks[id(node)] = block
            function.positions[id(node)] = position
            inner, inner_owner = function, owner
            if isinstance(node, ast.ClassDef):
                inner_owner = self.classes.setdefault(node.name, Class(node))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = Function(node, self, function, owner)
                self.functions.append(inner)
                if owner is not None:
                    owner.functions.append(inner)
                block = ()
            branches = _branches(node)
            for child in ast.iter_child_nodes(node):
                self.parents[id(child)] = node
                branch = branches.get(id(child))
                child_block = block if branch is None else (*block, (id(node), branch))
                stack.append((child, inner, inner_owner, child_block, position))
        for function in self.functions:
            function.nodes.sort(key=_position)
        self.functions.sort(key=lambda function: _position(function.node))


# -- parts of an expression --------------------------------------------------------------------


def dotted_name(node: ast.AST | None) -> str:
    """torch.nn.functional for the expression of that spelling; "" for anything but names and attributes."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def called_name(call: ast.Call) -> str:
    """The last part of what is called: softmax for F.softmax(x) and x.softmax(-1)."""
    function = call.func
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else ""
    )


def is_function_of_module(call: ast.Call) -> bool:
    """torch.triu(x) or triu(x), and not x.triu()."""
    if isinstance(call.func, ast.Name):
        return True
    path = dotted_name(call.func).split(".")[:-1]
    return bool(path) and path[-1] in MODULE_ALIASES


def argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """The argument of this name, or at this position; None where it is not given, or behind *args."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    before = call.args[: position + 1]
    if len(before) <= position or any(isinstance(item, ast.Starred) for item in before):
        return None
    return before[position]


def tensor_argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    """An argument of what is both a method and a function, counted from the tensor, which is 0."""
    if is_function_of_module(call):
        return argument(call, position, "input" if position == 0 else name)
    if position == 0:
        return call.func.value if isinstance(call.func, ast.Attribute) else None
    return argument(call, position - 1, name)


def has_hidden_arguments(call: ast.Call) -> bool:
    """Whether *args or **kwargs may hold an argument that the call does not name."""
    return any(isinstance(item, ast.Starred) for item in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def string(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def root_name(node: ast.expr) -> str:
    """The name that an expression is about: q for q.transpose(1, 2)[:, 0] / 8 and for self.q(x)."""
    while True:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                return name
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                return name
            case ast.Call(func=ast.Attribute(value=value) as function) as call:
                if dotted_name(value) in ("self", "cls"):
                    return function.attr
                if is_function_of_module(call):
                    if not call.args or function.attr in MAKING_TENSORS:
                        return ""
                    node = call.args[0]
                else:
                    node = value
            case ast.Call(func=ast.Name(id=name)):
                return name
            case ast.Attribute(value=value) | ast.Subscript(value=value):
                node = value
            case ast.BinOp(left=left):
                node = left
            case ast.UnaryOp(operand=operand):
                node = operand
            case _:
                return ""


def subscript_parts(node: ast.Subscript) -> list[ast.expr]:
    """The index of each axis."""
    return list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]


# -- where values come from --------------------------------------------------------------------


def resolve(value: Value) -> list[Value]:
    """What a name, an attribute of self or a call of a function of this file stands for; [] if unknown."""
    node, function = value
    match node:
        case ast.Name(id=name):
            if found := function.definitions_before(name, node):
                return found
            scope = function.parent
            while scope is not None and name not in function.parameters:
                if definitions := scope.definitions.get(name):
                    return [Value(item.value, scope) for item in definitions[-MAX_DEFINITIONS:]]
                scope = scope.parent
            return []
        case ast.Attribute(value=ast.Name(id="self")):
            name = dotted_name(node)
            local = function.definitions_before(name, node)
            if local or function.owner is None:
                return local
            return function.owner.attributes.get(name, [])[-MAX_DEFINITIONS:]
        case ast.Call(func=ast.Name(id=name)) if name in function.file.module_functions:
            return _returned(function.file.module_functions[name])
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)) if function.owner is not None:
            methods = [method for method in function.owner.functions if method.name == name]
            return _returned(methods[0]) if len(methods) == 1 else []
    return []


def trace(value: Value, follow: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """The value, and all that `follow` and the definitions of names lead to, each once."""
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < MAX_TRACED_VALUES:
        current = queue.pop()
        if id(current.node) in seen:
            continue
        seen.add(id(current.node))
        yield current
        queue += resolve(current)
        queue += follow(current)


def number(value: Value | None, depth: int = MAX_CONSTANT_DEPTH) -> float | None:
    """The number that an expression stands for: a literal, float("-inf"), torch.finfo(…).min, a constant."""
    if value is None or depth == 0:
        return None
    node, function = value
    part = lambda item: number(Value(item, function), depth - 1)
    try:
        match node:
            case ast.Constant(value=bool()):
                return None
            case ast.Constant(value=int() | float() as constant):
                return float(constant)  # of a long integer: OverflowError
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return None if (inner := part(operand)) is None else -inner
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value=str(text))]):
                return None if isnan(float(text)) else float(text)
            case ast.Attribute(attr="inf" | "Inf" | "Infinity"):
                return float("inf")
            case ast.Attribute(value=ast.Call() as call, attr="min" | "max" as limit):
                if called_name(call) == "finfo":
                    return FINFO_MAX if limit == "max" else -FINFO_MAX
            case ast.BinOp(left=left, op=op, right=right):
                if (a := part(left)) is not None and (b := part(right)) is not None:
                    result = _arithmetic(a, op, b)
                    return None if result is None or isnan(result) else result
            case ast.Name() | ast.Attribute():
                definitions = resolve(value)
                return number(definitions[0], depth - 1) if len(definitions) == 1 else None
            case ast.Call(args=[only], keywords=_) if called_name(node) in ("tensor", "as_tensor"):
                return part(only)
    except (OverflowError, ValueError, ZeroDivisionError):
        return None
    return None


def integer(node: ast.expr | None, function: Function) -> int | None:
    constant = None if node is None else number(Value(node, function))
    return int(constant) if constant is not None and constant == constant // 1 else None


def axes(node: ast.expr | None, function: Function) -> list[int] | None:
    """A dim argument: one integer or several; None if it is unknown or not given."""
    if isinstance(node, ast.Tuple | ast.List):
        found = [integer(item, function) for item in node.elts]
        return None if None in found else [item for item in found if item is not None]
    return None if (axis := integer(node, function)) is None else [axis]


def _arithmetic(a: float, op: ast.operator, b: float) -> float | None:
    match op:
        case ast.Add():
            return a + b
        case ast.Sub():
            return a - b
        case ast.Mult():
            return a * b
        case ast.Div():
            return a / b
        case ast.FloorDiv():
            return a // b
        case ast.Pow():
            power = a**b
            return power if isinstance(power, float) else None
    return None


def _returned(function: Function) -> list[Value]:
    return [Value(node, function) for node in function.returned] if len(function.returned) == 1 else []


def _exclude_each_other(a: Block, b: Block) -> bool:
    """Whether two places lie in different branches of one statement."""
    branches = dict(a)
    return any(branches.get(statement, branch) != branch for statement, branch in b)


def _branches(node: ast.AST) -> dict[int, int]:
    """The children of a statement that are reached only sometimes → the number of their branch."""
    match node:
        case ast.If() | ast.For() | ast.AsyncFor() | ast.While():
            parts = [node.body, node.orelse]
        case ast.Try() | ast.TryStar():
            parts = [node.body, *(handler.body for handler in node.handlers)]
        case ast.Match():
            return {id(case): n for n, case in enumerate(node.cases)}
        case _:
            return {}
    return {id(child): n for n, part in enumerate(parts) for child in part}


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The targets of a statement with their values, tuples taken apart.

    x += y counts as x = x + y, x.add_(y) as x = x.add_(y), and x[mask] = y as x = x.masked_fill(mask, y).
    """
    match node:
        case ast.Assign(targets=[ast.Subscript() as target], value=value) if _is_mask_index(target):
            fill = ast.Attribute(target.value, "masked_fill", ast.Load())
            yield target.value, ast.copy_location(ast.Call(fill, [target.slice, value], []), node)
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _pairs(target, value)
        case (
            ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
        ):
            yield target, value
        case ast.AugAssign(target=target, op=op, value=value):
            yield target, ast.copy_location(ast.BinOp(target, op, value), value)
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            yield from _pairs(target, value)
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr=name)) as call):
            if name.endswith("_") and not name.startswith("_"):
                yield target, call


def _is_mask_index(target: ast.Subscript) -> bool:
    return isinstance(target.slice, ast.Name | ast.Compare | ast.UnaryOp | ast.BinOp | ast.Call)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple | ast.List):
        values = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        if len(values) != len(target.elts):
            values = [value] * len(target.elts)
        for item, part in zip(target.elts, values, strict=True):
            yield from _pairs(item.value if isinstance(item, ast.Starred) else item, part)
    else:
        yield target, value


def _position(node: ast.AST) -> tuple[int, int]:
    return (getattr(node, "lineno", 0), getattr(node, "col_offset", 0))
