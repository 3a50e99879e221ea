"""What is done beside the engine: questions of the explorer page, and attention maps."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from keepleft.models.build import share_weights
from keepleft.models.watch import watch
from keepleft.weights.model_directory import AnyModel

TaskName = Literal["question", "attention_maps"]
Tasks = Mapping[str, Callable[..., Any]]  # each takes keywords and returns JSON data
MAX_ANSWER_BYTES = 32 << 20


class ExplorerProtocol(Protocol):
    """Answers the questions of the explorer page."""

    def ask(self, question: str, params: Any, tenant: str) -> Any: ...


def make_tasks(model: AnyModel, explorer: ExplorerProtocol | None) -> Tasks:
    tasks: dict[str, Callable[..., Any]] = {"attention_maps": AttentionMaps(model)}
    if explorer is not None:
        tasks["question"] = explorer.ask
    return tasks


class AttentionMaps:
    """Attention weights of each layer, rounded, [heads][queries][keys].

    The model may be in use elsewhere at this moment: a twin of it is watched, by one caller at a time.
    """

    def __init__(self, model: AnyModel) -> None:
        self.model = model
        self.lock = threading.Lock()

    @cached_property
    def twin(self) -> AnyModel:
        return share_weights(self.model).eval()

    @torch.no_grad()
    def __call__(
        self, tokens: list[int], source: list[int] | None, layers: list[str], heads: list[int] | None
    ) -> dict[str, list[list[list[float]]]]:
        device = next(self.model.parameters()).device
        inputs = [torch.tensor([row], device=device) for row in (source, tokens) if row is not None]
        with self.lock, watch(self.twin, layers, heads=heads) as maps:
            self.twin.hidden_states(*inputs)
        return {name: _round(weights[0]) for name, weights in maps.items()}


def _round(weights: Tensor) -> list[list[list[float]]]:
    return [[[round(value, 5) for value in row] for row in head] for head in weights.float().tolist()]


def run_task(tasks: Tasks, name: str, params: Mapping[str, Any]) -> bytes:
    """The result of a task as JSON. Raises what the task raises, and ValueError for a result too large."""
    body = json.dumps(tasks[name](**params), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    payload = body.encode()
    if len(payload) > MAX_ANSWER_BYTES:
        raise ValueError(
            f"the answer has {len(payload):,} bytes, and at most {MAX_ANSWER_BYTES:,} are sent: ask for "
            "less, or give a shorter text"
        )
    return payload
