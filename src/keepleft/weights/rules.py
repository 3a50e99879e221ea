"""Tensor names as a table read both ways: each rule maps a tensor of a checkpoint to rows of a parameter."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22  # copied at a time: loading needs little more memory than the weights themselves


@dataclass(frozen=True)
class Op:
    """A view of a parameter in the checkpoint's layout; `rowwise` ones can be filled a few rows at a time."""

    name: str
    view: Callable[[Tensor], Tensor]
    rowwise: bool = True


identity = Op("identity", lambda param: param)
transpose = Op("transpose", lambda param: param.T)
unsqueeze = Op("unsqueeze", lambda param: param[None])  # (n,) stored as (1, n)


def interleave(heads: int) -> Op:
    """Rotary pairs (i, i + head_dim / 2) stored next to each other, as in GGUF files."""

    def view(param: Tensor) -> Tensor:
        return param.view(heads, 2, -1, *param.shape[1:]).transpose(1, 2)

    return Op("interleave", view, rowwise=False)


@dataclass(frozen=True)
class Rule:
    checkpoint_name: str  # "h.{i}.attn.c_attn.weight"; {i} is the layer's number in both names
    param_name: str | None = None  # None: not read
    rows: tuple[int, int] | None = None  # of the parameter; None: all
    op: Op = identity
    head: bool = False  # outside the base model, so without its prefix
    tied: bool = False  # a second copy of what another rule names: checked, never written
    compute: Callable[[], Tensor] | None = None  # a formula that the checkpoint stores: written, not read


def drop(checkpoint_name: str, *, head: bool = False) -> Rule:
    """A tensor that is not needed."""
    return Rule(checkpoint_name, None, head=head)


def linear(checkpoint_name: str, param_name: str, op: Op = identity, *, head: bool = False) -> list[Rule]:
    """A matrix and its bias. Where there is no bias, its rule matches nothing."""
    return [
        Rule(f"{checkpoint_name}.weight", f"{param_name}.weight", op=op, head=head),
        Rule(f"{checkpoint_name}.bias", f"{param_name}.bias", head=head),
    ]


def concat_rules(
    checkpoint_name: str, names: tuple[str, ...], param_name: str, sizes: tuple[int, ...]
) -> list[Rule]:
    """Several matrices concatenated in one of ours; {} in `checkpoint_name` stands for each name in turn."""
    out, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        full_name = checkpoint_name.replace("{}", name)
        for part in ("weight", "bias"):
            out.append(Rule(f"{full_name}.{part}", f"{param_name}.{part}", (start, start + size)))
        start += size
    return out


class TensorSource(Protocol):
    """The tensors of a checkpoint, read a few rows at a time."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def rows(self, name: str, begin: int, end: int) -> Tensor: ...


class InMemorySource:
    """A checkpoint in memory."""

    def __init__(self, state_dict: Mapping[str, Tensor]) -> None:
        self.state_dict = state_dict

    def names(self) -> list[str]:
        return list(self.state_dict)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state_dict[name].shape)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self.state_dict[name][begin:end]


TensorMatch = tuple[str, Rule, str]  # name in the checkpoint, its rule, name of the parameter


@torch.no_grad()
def load_tensors(
    rules: list[Rule], source: TensorSource, state_dict: Mapping[str, Tensor], *, prefix: str = ""
) -> None:
    """Fill the parameters in `state_dict` from a checkpoint.

    A tensor without a rule, or a parameter left unfilled, is an error that names it.
    """
    matches = match_tensors(rules, source, state_dict, prefix=prefix)
    for name, rule, param_name in matches:
        if not rule.tied:
            _copy_tensor(source, name, _param_view(state_dict[param_name], rule), rule)
    for name, rule, param_name in matches:
        if rule.tied:
            _check_tied(source, name, _param_view(state_dict[param_name], rule))


def match_tensors(
    rules: list[Rule], source: TensorSource, state_dict: Mapping[str, Tensor], *, prefix: str = ""
) -> list[TensorMatch]:
    """Check all names and shapes, without reading data; parameters may be on device 'meta'."""
    matches: list[TensorMatch] = []
    assigned: set[tuple[str, tuple[int, int] | None]] = set()  # parameters and rows
    for name in source.names():
        rule, layer = _find_rule(rules, name, prefix)
        if rule.param_name is None:
            continue
        param_name = rule.param_name.replace("{i}", layer)
        if param_name not in state_dict:
            raise ValueError(
                f"the tensor {name!r} has no place in a model of this design (it would be {param_name})"
            )
        shape = source.shape(name)
        expected_shape = _checkpoint_shape(_param_view(state_dict[param_name], rule), rule)
        if shape != expected_shape:
            raise ValueError(
                f"the tensor {name!r} has shape {shape}, the configuration asks for {expected_shape}"
            )
        if not rule.tied:
            if (param_name, rule.rows) in assigned:
                raise ValueError(f"{param_name} is set twice, the second time by {name!r}")
            assigned.add((param_name, rule.rows))
        matches.append((name, rule, param_name))
    all_matches = list(_all_matches(rules, state_dict, prefix))
    missing = [
        checkpoint_name
        for checkpoint_name, rule, param_name in all_matches
        if (param_name, rule.rows) not in assigned
    ]
    missing += sorted(state_dict.keys() - {param_name for _, _, param_name in all_matches})
    if missing:
        raise ValueError(
            f"the file lacks {len(missing)} tensors that the configuration asks for: {', '.join(missing[:5])}"
            f"{' …' if len(missing) > 5 else ''}"
        )
    return matches


def export_tensors(
    rules: list[Rule], state_dict: Mapping[str, Tensor], *, prefix: str = ""
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint, one by one. A parameter without a rule is an error that names it."""
    written_counts: dict[str, int] = dict.fromkeys(state_dict, 0)
    matches = list(_all_matches(rules, state_dict, prefix))
    for _, rule, param_name in matches:
        written_counts[param_name] += _param_view(state_dict[param_name], rule).numel()
    uncovered = [name for name, count in written_counts.items() if count != state_dict[name].numel()]
    if uncovered:
        raise ValueError(f"no rule, or not just one, writes {', '.join(uncovered[:5])}")
    for checkpoint_name, rule, param_name in matches:
        view = _param_view(state_dict[param_name], rule)
        yield checkpoint_name, view.reshape(_checkpoint_shape(view, rule)).contiguous()
    for rule in rules:
        if rule.compute is not None:
            yield prefix + rule.checkpoint_name, rule.compute()


def _all_matches(rules: list[Rule], state_dict: Mapping[str, Tensor], prefix: str) -> Iterator[TensorMatch]:
    """Every tensor that a checkpoint must hold."""
    for rule in rules:
        if rule.param_name is None or rule.tied:
            continue
        pattern = _pattern(rule.param_name)
        for name in state_dict:
            if match := pattern.fullmatch(name):
                layer = match.group(1) if match.groups() else ""
                checkpoint_name = rule.checkpoint_name.replace("{i}", layer)
                yield checkpoint_name if rule.head else prefix + checkpoint_name, rule, name


def _find_rule(rules: list[Rule], name: str, prefix: str) -> tuple[Rule, str]:
    """The rule of a tensor, and the number of its layer."""
    for rule in rules:
        for candidate in {name, name if rule.head else name.removeprefix(prefix)}:
            if match := _pattern(rule.checkpoint_name).fullmatch(candidate):
                return rule, match.group(1) if match.groups() else ""
    raise ValueError(
        f"no rule names the tensor {name!r}: is this another architecture than its configuration says?"
    )


@lru_cache(maxsize=4096)
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{i\}", r"(\d+)"))


def _param_view(param: Tensor, rule: Rule) -> Tensor:
    return rule.op.view(param if rule.rows is None else param[slice(*rule.rows)])


def _checkpoint_shape(view: Tensor, rule: Rule) -> tuple[int, ...]:
    """The shape in the checkpoint: that of the view, with the dimensions that an op split merged again."""
    if rule.op.rowwise:
        return tuple(view.shape)
    return (view.shape[0] * view.shape[1] * view.shape[2], *view.shape[3:])


def _copy_tensor(source: TensorSource, name: str, view: Tensor, rule: Rule) -> None:
    num_rows = source.shape(name)[0] if source.shape(name) else 1
    if not rule.op.rowwise:
        view.copy_(_read_rows(source, name, 0, num_rows).reshape(view.shape))
        return
    chunk_rows = max(1, CHUNK_ELEMENTS // max(1, view.numel() // max(1, num_rows)))
    for begin in range(0, num_rows, chunk_rows):
        end = min(num_rows, begin + chunk_rows)
        view[begin:end].copy_(_read_rows(source, name, begin, end))


def _read_rows(source: TensorSource, name: str, begin: int, end: int) -> Tensor:
    rows = source.rows(name, begin, end)
    if not rows.is_floating_point():
        raise ValueError(
            f"the tensor {name!r} holds {rows.dtype}, not floats: is it quantised? Save it in float16 or "
            "wider"
        )
    return rows


def _check_tied(source: TensorSource, name: str, view: Tensor) -> None:
    """A tied tensor must equal the parameter."""
    chunk_rows = max(1, CHUNK_ELEMENTS // max(1, view[0].numel()))
    for begin in range(0, len(view), chunk_rows):
        chunk = view[begin : begin + chunk_rows]
        rows = _read_rows(source, name, begin, begin + len(chunk))
        if not torch.equal(rows.to(chunk), chunk):
            raise ValueError(
                f"the configuration ties {name!r} to the embedding, but the file holds two different ones: "
                'set "tie_word_embeddings" to what is meant'
            )
