"""How a foreign tensor becomes a part of one of ours, and back. A family is a list of such rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

CHUNK = 1 << 22  # numbers moved at a time: loading needs little more memory than the weights themselves


@dataclass(frozen=True)
class Op:
    """Ours seen as theirs: a view that can be written to, or read from. `rowwise` views fill row by row."""

    name: str
    view: Callable[[Tensor], Tensor]
    rowwise: bool = True


same = Op("same", lambda ours: ours)
transpose = Op("transpose", lambda ours: ours.T)
row = Op("row", lambda ours: ours[None])  # (n,) kept as (1, n)


def interleave(heads: int) -> Op:
    """Rotary pairs (i, i + width/2) kept side by side, as GGUF files do."""
    def view(ours: Tensor) -> Tensor:
        return ours.view(heads, 2, -1, *ours.shape[1:]).transpose(1, 2)
    return Op("interleave", view, rowwise=False)


@dataclass(frozen=True)
class Rule:
    theirs: str                          # "h.{i}.attn.c_attn.weight"; {i} stands for the layer's number in both
    ours: str | None = None              # None: dropped on purpose
    rows: tuple[int, int] | None = None  # which rows of ours; None: all
    op: Op = same
    head: bool = False                   # theirs lies outside the base model, so it never takes its prefix
    twin: bool = False                   # a second copy of what another rule names: checked, never written
    made: Callable[[], Tensor] | None = None  # a formula that they keep as a tensor: written, not read


def drop(theirs: str, *, head: bool = False) -> Rule:
    return Rule(theirs, None, head=head)


def linear(theirs: str, ours: str, op: Op = same, *, head: bool = False) -> list[Rule]:
    """A matrix and its bias. Where there is no bias, its rule finds nothing to do."""
    return [Rule(f"{theirs}.weight", f"{ours}.weight", op=op, head=head), Rule(f"{theirs}.bias", f"{ours}.bias", head=head)]


def joined(theirs: str, names: tuple[str, ...], ours: str, sizes: tuple[int, ...]) -> list[Rule]:
    """Several matrices that are one of ours, one below the other: `theirs` has a {} for each name in turn."""
    out, begin = [], 0
    for name, size in zip(names, sizes, strict=True):
        for part in ("weight", "bias"):
            out.append(Rule(f"{theirs.replace('{}', name)}.{part}", f"{ours}.{part}", (begin, begin + size)))
        begin += size
    return out


class Source(Protocol):
    """Where foreign tensors come from, a few rows at a time."""

    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def rows(self, name: str, begin: int, end: int) -> Tensor: ...


class Held:
    """Tensors already in memory."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def names(self) -> list[str]:
        return list(self.state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        return self.state[name][begin:end]


Match = tuple[str, Rule, str]  # the name of one of theirs, the rule that knows it, and the name of ours


@torch.no_grad()
def take(rules: list[Rule], source: Source, ours: Mapping[str, Tensor], *, prefix: str = "") -> None:
    """Fill our tensors from theirs. A tensor without a rule, or one of ours left unfilled, is an error that names it."""
    found = match(rules, source, ours, prefix=prefix)
    for name, rule, where in found:
        if not rule.twin:
            _move(source, name, _part(ours[where], rule), rule)
    for name, rule, where in found:
        if rule.twin:
            _compare(source, name, _part(ours[where], rule))


def match(rules: list[Rule], source: Source, ours: Mapping[str, Tensor], *, prefix: str = "") -> list[Match]:
    """Which of theirs goes where: all names and shapes are looked at, no number is. Ours may lie on device 'meta'."""
    found: list[Match] = []
    here: set[tuple[str, tuple[int, int] | None]] = set()  # the parts of ours that are spoken for
    for name in source.names():
        rule, layer = _find(rules, name, prefix)
        if rule.ours is None:
            continue
        where = rule.ours.replace("{i}", layer)
        if where not in ours:
            raise ValueError(f"the tensor {name!r} has no place in a model of this design (it would be {where})")
        shape, wanted = source.shape(name), _shape(_part(ours[where], rule), rule)
        if shape != wanted:
            raise ValueError(f"the tensor {name!r} has shape {shape}, the configuration asks for {wanted}")
        if not rule.twin:
            if (where, rule.rows) in here:
                raise ValueError(f"{where} is set twice, the second time by {name!r}")
            here.add((where, rule.rows))
        found.append((name, rule, where))
    every = list(_all(rules, ours, prefix))
    missing = [theirs for theirs, rule, where in every if (where, rule.rows) not in here]
    missing += sorted(ours.keys() - {where for _, _, where in every})
    if missing:
        raise ValueError(f"the file lacks {len(missing)} tensors that the configuration asks for: {', '.join(missing[:5])}"
                         f"{' …' if len(missing) > 5 else ''}")
    return found


def give(rules: list[Rule], ours: Mapping[str, Tensor], *, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Our tensors under their names, one by one. A tensor of ours without a rule is an error that names it."""
    named: dict[str, int] = dict.fromkeys(ours, 0)
    every = list(_all(rules, ours, prefix))
    for _, rule, where in every:
        named[where] += _part(ours[where], rule).numel()
    wrong = [name for name, count in named.items() if count != ours[name].numel()]
    if wrong:
        raise ValueError(f"no rule, or not just one, writes {', '.join(wrong[:5])}")
    for theirs, rule, where in every:
        view = _part(ours[where], rule)
        yield theirs, view.reshape(_shape(view, rule)).contiguous()
    for rule in rules:
        if rule.made is not None:
            yield prefix + rule.theirs, rule.made()


def _all(rules: list[Rule], ours: Mapping[str, Tensor], prefix: str) -> Iterator[Match]:
    """Every tensor that a file of these rules holds."""
    for rule in rules:
        if rule.ours is None or rule.twin:
            continue
        pattern = _pattern(rule.ours)
        for name in ours:
            if match := pattern.fullmatch(name):
                theirs = rule.theirs.replace("{i}", match.group(1) if match.groups() else "")
                yield theirs if rule.head else prefix + theirs, rule, name


def _find(rules: list[Rule], name: str, prefix: str) -> tuple[Rule, str]:
    for rule in rules:
        for theirs in {name, name if rule.head else name.removeprefix(prefix)}:
            if match := _pattern(rule.theirs).fullmatch(theirs):
                return rule, match.group(1) if match.groups() else ""
    raise ValueError(f"no rule names the tensor {name!r}: is this another architecture than its configuration says?")


@lru_cache(maxsize=4096)
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{i\}", r"(\d+)"))


def _part(ours: Tensor, rule: Rule) -> Tensor:
    return rule.op.view(ours if rule.rows is None else ours[slice(*rule.rows)])


def _shape(view: Tensor, rule: Rule) -> tuple[int, ...]:
    """The shape in which theirs is kept: that of the view, with what an op took apart put together again."""
    if rule.op.rowwise:
        return tuple(view.shape)
    return (view.shape[0] * view.shape[1] * view.shape[2], *view.shape[3:])


def _move(source: Source, name: str, view: Tensor, rule: Rule) -> None:
    count = source.shape(name)[0] if source.shape(name) else 1
    if not rule.op.rowwise:
        view.copy_(_rows(source, name, 0, count).reshape(view.shape))
        return
    step = max(1, CHUNK // max(1, view.numel() // max(1, count)))
    for begin in range(0, count, step):
        view[begin:begin + step].copy_(_rows(source, name, begin, min(count, begin + step)))


def _rows(source: Source, name: str, begin: int, end: int) -> Tensor:
    rows = source.rows(name, begin, end)
    if not rows.is_floating_point():
        raise ValueError(f"the tensor {name!r} holds {rows.dtype}, not floats: is it quantised? Save it in float16 or wider")
    return rows


def _compare(source: Source, name: str, view: Tensor) -> None:
    step = max(1, CHUNK // max(1, view[0].numel()))
    for begin in range(0, len(view), step):
        part = view[begin:begin + step]
        if not torch.equal(_rows(source, name, begin, min(len(view), begin + step)).to(part), part):
            raise ValueError(f"the configuration ties {name!r} to the embedding, but the file holds two different ones: "
                             'set "tie_word_embeddings" to what is meant')
