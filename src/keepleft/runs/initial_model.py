"""The model that a job begins with: a new one, or one that is there already."""

from __future__ import annotations

from typing import Any

import torch

from keepleft.models.build import build
from keepleft.models.design import ClassificationHead, Design
from keepleft.runs.job import TrainJob
from keepleft.weights.model_directory import load


def initial_model(job: TrainJob, design: Design, labels: list[str], seed: int) -> Any:
    torch.manual_seed(seed)
    model = (
        _load_initial_model(job, labels)
        if job.init_from
        else build(design, generator=torch.Generator().manual_seed(seed))
    )
    if job.lora:
        from keepleft.training.lora import add_lora

        add_lora(model, rank=job.lora, modules_to_save=("head",) if job.task == "classify" else ())
    return model


def initial_design(job: TrainJob, labels: list[str]) -> Design:
    """The plan of the model that a job starts from."""
    return _design_with_head(load(str(job.init_from), device="meta")[0], job, labels)


def _design_with_head(pretrained: Any, job: TrainJob, labels: list[str]) -> Design:
    """A classifier gets a new head where the labels are new."""
    design: Design = pretrained.design
    model_labels = list(pretrained.notes.get("id2label", {}).values())
    if job.task != "classify" or (isinstance(design.head, ClassificationHead) and model_labels == labels):
        return design
    return design.but(head=ClassificationHead(len(labels), "tanh" if design.decoder is None else "last"))


def _load_initial_model(job: TrainJob, labels: list[str]) -> Any:
    pretrained, _ = load(str(job.init_from))
    design = _design_with_head(pretrained, job, labels)
    if design is pretrained.design:
        return pretrained
    model = build(design)
    state = model.state_dict()
    model.load_state_dict(
        {
            **state,
            **{
                name: tensor
                for name, tensor in pretrained.state_dict().items()
                if name in state and state[name].shape == tensor.shape and not name.startswith("head.")
            },
        }
    )
    model.notes = {"model_type": pretrained.notes.get("model_type")}
    return model
