"""Resume a job: options that may change are taken over, any other change is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from keepleft.runs.job import DataConfig, TrainJob
from keepleft.runs.prepare import RESOLVED_FILE, ResolvedJob
from keepleft.runs.save_model import MODEL_FOLDER
from keepleft.training.recipe import CHANGEABLE

CHANGEABLE_OPTIONS = (
    "parallel",
    "device",
    "track",
    "average_last",
    *(f"recipe.{name}" for name in CHANGEABLE),
)


def resume_job(
    stored_job: TrainJob, options: dict[str, Any], explicit_names: Iterable[str], run_folder: Path
) -> TrainJob:
    """The stored job, with those of the new `options` that may change.

    `explicit_names` are the dotted names of the options that the user gave; all others stay as they were. An
    option that was left open is compared with what was resolved. Raises ValueError if anything else has
    changed.
    """
    resolved_path = run_folder / RESOLVED_FILE
    resolved_job = None
    if resolved_path.exists():
        resolved_job = ResolvedJob.from_json(resolved_path.read_text("utf-8"))
    stored_options = {f.name: getattr(stored_job, f.name) for f in fields(stored_job)}
    stored_values = dict(_flatten_options("", stored_options))
    explicit_prefixes = {
        name.removesuffix(".path") if name in ("train.path", "valid.path") else name
        for name in explicit_names
    }
    is_explicit = lambda name: any(f"{name}.".startswith(f"{prefix}.") for prefix in explicit_prefixes)
    changes: list[str] = []
    accepted: dict[str, Any] = {}
    for name, value in _flatten_options("", options):
        if value is None or not is_explicit(name):
            continue
        if name in CHANGEABLE_OPTIONS:
            accepted[name] = value
            continue
        old_value = stored_values.get(name)
        if old_value is None and resolved_job is not None:
            old_value = _resolved_value(resolved_job, name)
        if value != old_value:
            changes.append(
                f"{name} was {'not given' if old_value is None else repr(old_value)} and is {value!r}"
            )
    if changes:
        model_folder = run_folder / MODEL_FOLDER
        hint = (
            f" (with --init-from {model_folder} to train that model further)" if model_folder.exists() else ""
        )
        raise ValueError(
            f"the run in {run_folder} cannot go on, because it has changed: {'; '.join(changes)}. Change it "
            f"back, or start a new run with another --out{hint}"
        )
    recipe_changes = {name.removeprefix("recipe."): value for name, value in accepted.items() if "." in name}
    job_changes = {name: value for name, value in accepted.items() if "." not in name}
    recipe = replace(stored_job.recipe, **recipe_changes)
    return replace(stored_job, **job_changes, recipe=recipe, out=str(run_folder))


def _flatten_options(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every single option under its dotted name; a data path goes by "train" or "valid", without ".path"."""
    if is_dataclass(value):
        parts = {
            "" if isinstance(value, DataConfig) and f.name == "path" else f.name: getattr(value, f.name)
            for f in fields(value)
        }
    elif isinstance(value, dict):
        parts = value
    elif isinstance(value, list) and any(map(is_dataclass, value)):
        parts = {str(n): part for n, part in enumerate(value)}
    else:
        yield name, value
        return
    for key, part in parts.items():
        yield from _flatten_options(".".join(filter(None, (name, key))), part)


def _resolved_value(resolved_job: ResolvedJob, name: str) -> Any:
    """What an option that the job left open was resolved to; None if that is not known."""
    section, _, field = name.partition(".")
    if section == "recipe":
        return getattr(resolved_job.recipe, field)
    if section == "batch":
        return {
            "tokens": resolved_job.micro_tokens * resolved_job.accumulate,
            "micro_tokens": resolved_job.micro_tokens,
            "max_length": resolved_job.max_length,
            "pad_to_multiple_of": resolved_job.pad_to_multiple_of,
            "pack": resolved_job.pack,
        }.get(field)
    if section == "design":
        stack = resolved_job.design.decoder or resolved_job.design.encoder
        feedforward = resolved_job.design.feedforward
        values = {
            "layers": getattr(stack, "layers", None),
            "width": feedforward.width,
            "activation": feedforward.activation,
        }
        return values.get(field, getattr(resolved_job.design, field, None))
    return None
