"""A run that goes on goes on as it was: what may change is taken, anything else that differs is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from keepleft.runs.finish import MODEL
from keepleft.runs.job import Job, Texts
from keepleft.runs.settle import SETTLED, Settled
from keepleft.training.recipe import FREE

FREELY = ("parallel", "device", "board", "last", *(f"recipe.{name}" for name in FREE))


def resumed(old: Job, given: dict[str, Any], said: Iterable[str], place: Path) -> Job:
    """The stored job, with what may change. `said` are the dotted names of what was given: all else is as it was."""
    settled = Settled.read((place / SETTLED).read_text("utf-8")) if (place / SETTLED).exists() else None
    before = dict(_leaves("", {f.name: getattr(old, f.name) for f in fields(old)}))
    asked = {name.removesuffix(".path") if name in ("train.path", "valid.path") else name for name in said}
    changed, taken = [], {}
    for name, value in _leaves("", given):
        if value is None or not any(name == one or name.startswith(f"{one}.") for one in asked):
            continue
        if name in FREELY:
            taken[name] = value
            continue
        was = before.get(name)
        if was is None and settled is not None:
            was = _chosen(settled, name)
        if value != was:
            changed.append(f"{name} was {'not given' if was is None else repr(was)} and is {value!r}")
    if changed:
        further = f" (with --start {place / MODEL} to train that model further)" if (place / MODEL).exists() else ""
        raise ValueError(f"the run in {place} cannot go on, because it has changed: {'; '.join(changed)}. Change it back, or "
                         f"start a new run with another --out{further}")
    recipe = replace(old.recipe, **{name.removeprefix("recipe."): value for name, value in taken.items() if "." in name})
    return replace(old, **{name: value for name, value in taken.items() if "." not in name}, recipe=recipe, out=str(place))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every single choice under its dotted name; the one file of some texts goes by the name of the texts."""
    if is_dataclass(value):
        parts = {"" if isinstance(value, Texts) and f.name == "path" else f.name: getattr(value, f.name) for f in fields(value)}
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, list) and any(map(is_dataclass, value)):
        parts = {str(n): part for n, part in enumerate(value)}
    else:
        yield name, value
        return
    for key, part in parts.items():
        yield from _leaves(".".join(filter(None, (name, key))), part)


def _chosen(settled: Settled, name: str) -> Any:
    """What was chosen where the job left it open; None where that is not known."""
    room, _, field = name.partition(".")
    if room == "recipe":
        return getattr(settled.recipe, field)
    if room == "batch":
        return {"tokens": settled.budget * settled.accumulate, "micro": settled.budget, "longest": settled.longest,
                "multiple": settled.multiple, "pack": settled.pack}.get(field)
    if room == "design":
        stack, inner = settled.design.decoder or settled.design.encoder, settled.design.feedforward
        known = {"layers": getattr(stack, "layers", None), "width": inner.width, "activation": inner.activation}
        return known.get(field, getattr(settled.design, field, None))
    return None
