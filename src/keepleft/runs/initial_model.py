"""The initial model of a job: new, or loaded from a model directory; with LoRA if asked for."""

from __future__ import annotations

import torch

from keepleft.models.build import build
from keepleft.models.design import ClassificationHead, Design
from keepleft.runs.job import TrainJob
from keepleft.weights.model_directory import AnyModel, load


def initial_model(job: TrainJob, design: Design, labels: list[str], seed: int) -> AnyModel:
    torch.manual_seed(seed)
    if job.init_from:
        model = _load_initial_model(job, labels)
    else:
        model = build(design, generator=torch.Generator().manual_seed(seed))
    if job.lora:
        from keepleft.training.lora import add_lora

        add_lora(model, rank=job.lora, modules_to_save=("head",) if job.task == "classify" else ())
    return model


def initial_design(job: TrainJob, labels: list[str]) -> Design:
    """The design of the model in `job.init_from`, without loading its weights."""
    return _design_with_head(load(str(job.init_from), device="meta")[0], job, labels)


def _design_with_head(pretrained: AnyModel, job: TrainJob, labels: list[str]) -> Design:
    """The design of a pretrained model; to classify other labels than it knows, with a new head."""
    design = pretrained.design
    model_labels = list(pretrained.notes.get("id2label", {}).values())
    if job.task != "classify" or (isinstance(design.head, ClassificationHead) and model_labels == labels):
        return design
    return design.but(head=ClassificationHead(len(labels), "tanh" if design.decoder is None else "last"))


def _load_initial_model(job: TrainJob, labels: list[str]) -> AnyModel:
    pretrained, _ = load(str(job.init_from))
    design = _design_with_head(pretrained, job, labels)
    if design is pretrained.design:
        return pretrained
    model = build(design)
    state = model.state_dict()
    for name, tensor in pretrained.state_dict().items():
        if name in state and state[name].shape == tensor.shape and not name.startswith("head."):
            state[name] = tensor
    model.load_state_dict(state)
    model.notes = {"model_type": pretrained.notes.get("model_type")}
    return model
