"""Engine of an encoder, which generates nothing: embeddings and labels in batches, layer by layer.

The rows that wait when a batch is done become the next one, fairly between tenants. A step runs one layer, so
that a cancelled request is noticed, and another tenant's turn comes, before a long batch is through.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keepleft.decoding.batch import pad_batch
from keepleft.models.transformer import Encoder
from keepleft.pipelines.predictor import label_probabilities, pool_hidden_states
from keepleft.serving.engine.activity import KeyActivity, count_activity
from keepleft.serving.engine.fair_queue import FairQueue
from keepleft.serving.engine.prompt_reader import check_prompt_request
from keepleft.serving.engine.request import (
    Events,
    FinishEvent,
    PromptRequest,
    Request,
    RequestHandle,
    failure,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH_TOKENS = 4096  # of a batch, padding included


class EncoderEngine:
    """`batch_tokens`: the tokens of one batch, padding included; `weights`: the shares of API keys."""

    def __init__(
        self,
        model: Encoder,
        tokenizer: Tokenizer | None = None,
        *,
        batch_tokens: int = BATCH_TOKENS,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self.model = model.eval()
        self.batch_tokens = batch_tokens
        self.weights = weights
        self.waiting: FairQueue[RequestHandle] = FairQueue(weights)
        self.batch: list[RequestHandle] = []
        self.layers: Generator[None, None, tuple[Tensor, Tensor | None]] | None = None
        self.prompt_tokens: Counter[str] = Counter()  # by API key
        self.generation_tokens: Counter[str] = Counter()
        self.num_batches = 0

    @property
    def busy(self) -> bool:
        return bool(self.batch or len(self.waiting))

    def validate(self, request: Request) -> None:
        design = self.model.design
        if not isinstance(request, PromptRequest) or request.task == "score":
            raise ValueError("this model is an encoder and writes no text: ask for embeddings or labels")
        check_prompt_request(request, design)
        num_tokens = len(request.tokens)
        if design.max_positions is not None and num_tokens > design.max_positions:
            raise ValueError(
                f"the text has {num_tokens} tokens, and the model reads {design.max_positions}: shorten it"
            )

    def submit(self, handle: RequestHandle) -> None:
        self.waiting.push(handle.request.tenant, handle)

    def clear(self) -> None:
        self.waiting = FairQueue(self.weights)
        self.batch = []
        self.layers = None

    def stats(self) -> dict[str, float]:
        return {
            "running": len(self.batch),
            "waiting": len(self.waiting),
            "prompt_tokens": self.prompt_tokens.total(),
            "generation_tokens": 0,
        }

    def activity(self) -> dict[str, KeyActivity]:
        running = [(handle.request.tenant, 1) for handle in self.batch]
        return count_activity(running, [], self.waiting.items(), time.monotonic())

    def step(self) -> Events:
        """One layer of a batch."""
        events = self._drop_cancelled()
        if not self.batch:
            self._start_batch()
        if not self.batch:
            return events
        batch = self.batch
        try:
            assert self.layers is not None
            next(self.layers)
            return events
        except StopIteration as finished:
            results = self._results(batch, *finished.value)
        except Exception as error:
            results = self._one_by_one(batch, error)
        self.batch = []
        self.layers = None
        return [*events, *((handle, event) for handle, event in zip(batch, results, strict=True))]

    def _drop_cancelled(self) -> Events:
        cancelled = [handle for handle in self.waiting.items() if handle.cancelled]
        self.waiting.remove(set(cancelled))
        if self.batch and all(handle.cancelled for handle in self.batch):
            cancelled += self.batch
            self.batch = []
            self.layers = None
        return [(handle, FinishEvent(0, "cancelled", last=True)) for handle in cancelled]

    def _start_batch(self) -> None:
        max_length = 0
        while (handle := self.waiting.peek()) is not None:
            num_tokens = len(handle.request.tokens)
            max_length = max(max_length, num_tokens)
            if self.batch and max_length * (len(self.batch) + 1) > self.batch_tokens:
                break
            self.waiting.pop()
            self.waiting.charge(handle.request.tenant, num_tokens)
            handle.started_at = time.monotonic()
            self.prompt_tokens[handle.request.tenant.key] += num_tokens
            self.batch.append(handle)
        if self.batch:
            self.num_batches += 1
            self.layers = self._encode_by_layer([handle.request.tokens for handle in self.batch])

    @torch.no_grad()
    def _encode_by_layer(
        self, rows: Sequence[Sequence[int]]
    ) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Yields after each layer; returns the hidden states (B, T, dim) and the segments."""
        model = self.model
        tokens, segments = pad_batch(rows, model.token.weight.device, left=False)
        positions, grid = model.layout("tokens", tokens, None, segments)
        x = model.embed(model.token, tokens, positions)
        encoder = model.encoder
        return (yield from encoder.layer_by_layer(x, positions, [grid] * len(encoder.masks))), segments

    @torch.no_grad()
    def _results(
        self, batch: list[RequestHandle], hidden_states: Tensor, segments: Tensor | None
    ) -> list[FinishEvent]:
        summaries = {
            task: summarize(self.model, hidden_states, segments)
            for task, summarize in (("embed", pool_hidden_states), ("classify", label_probabilities))
            if any(handle.request.task == task for handle in batch)  # type: ignore[union-attr]
        }
        return [
            FinishEvent(0, "stop", last=True, result=summaries[handle.request.task][n])  # type: ignore[union-attr]
            for n, handle in enumerate(batch)
        ]

    def _one_by_one(self, batch: list[RequestHandle], error: Exception) -> list[FinishEvent]:
        """After a failure: the results of those that are not at fault."""
        if len(batch) == 1:
            return [failure(error)]
        return [event for handle in batch for event in self._read_alone(handle)]

    def _read_alone(self, handle: RequestHandle) -> list[FinishEvent]:
        try:
            layers = self._encode_by_layer([handle.request.tokens])
            while True:
                next(layers)
        except StopIteration as finished:
            return self._results([handle], *finished.value)
        except Exception as error:
            return [failure(error)]
