"""The model that a job begins with: a new one, or one that is there already."""

from __future__ import annotations

from typing import Any

import torch

from keepleft.models.build import build
from keepleft.models.design import Classes, Design
from keepleft.runs.job import Job
from keepleft.weights.files import load


def model(job: Job, plan: Design, labels: list[str], seed: int) -> Any:
    torch.manual_seed(seed)
    out = _loaded(job, labels) if job.start else build(plan, generator=torch.Generator().manual_seed(seed))
    if job.lora:
        from keepleft.training.lora import adapt
        adapt(out, rank=job.lora, also=("head",) if job.task == "classify" else ())
    return out


def design(job: Job, labels: list[str]) -> Design:
    """The plan of the model that a job starts from."""
    return _headed(load(str(job.start), device="meta")[0], job, labels)


def _headed(found: Any, job: Job, labels: list[str]) -> Design:
    """A classifier gets a new head where the labels are new."""
    plan: Design = found.design
    known = list(found.notes.get("id2label", {}).values())
    if job.task != "classify" or (isinstance(plan.head, Classes) and known == labels):
        return plan
    return plan.but(head=Classes(len(labels), "tanh" if plan.decoder is None else "last"))


def _loaded(job: Job, labels: list[str]) -> Any:
    found, _ = load(str(job.start))
    plan = _headed(found, job, labels)
    if plan is found.design:
        return found
    fresh = build(plan)
    state = fresh.state_dict()
    fresh.load_state_dict({**state, **{name: tensor for name, tensor in found.state_dict().items()
                                      if name in state and state[name].shape == tensor.shape and not name.startswith("head.")}})
    fresh.notes = {"model_type": found.notes.get("model_type")}
    return fresh
