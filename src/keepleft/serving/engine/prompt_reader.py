"""A prompt request being served: it reads its tokens chunk by chunk, as a prompt is prefilled."""

from __future__ import annotations

import torch
from torch import Tensor

from keepleft.decoding.score import ScoredToken, score_logits
from keepleft.models.design import ClassificationHead, Design
from keepleft.models.transformer import Model
from keepleft.pipelines.predictor import label_probabilities, pool_hidden_states
from keepleft.serving.engine.request import FinishEvent, PromptRequest, PromptResult, RequestHandle
from keepleft.serving.engine.scheduled_request import ScheduledRequest


class PromptReader(ScheduledRequest):
    """One row, no sampling: it has finished once its tokens are read."""

    uses_prefix_cache = False  # what is cached has keys and values, but no hidden states

    def __init__(self, handle: RequestHandle, model: Model) -> None:
        request = handle.request
        assert isinstance(request, PromptRequest)
        self.request = request
        self.model = model
        tokens = list(request.tokens)
        if request.task == "score":
            inputs, source = tokens[:-1], list(request.source)
        elif model.design.is_encoder_decoder:
            inputs, source = [], tokens
        else:
            inputs, source = tokens, []
        super().__init__(handle, inputs=inputs, source=source, max_slots=len(inputs))
        self.hidden_states: list[Tensor] = []  # of each chunk, (n, dim)
        self.scored_tokens: list[ScoredToken] = []

    @property
    def wants_encoder_output(self) -> bool:
        """The encoder's output is all that it needs."""
        return bool(self.source) and not self.inputs and self.request.task != "score"

    def add_chunk(self, start: int, hidden_states: Tensor) -> None:
        """Take the (n, dim) hidden states of the tokens from `start` on."""
        request = self.request
        if request.task != "score":
            self.hidden_states.append(hidden_states)
            return
        skipped = max(0, request.num_context - 1 - start)  # what they predict is not asked for
        targets = list(request.tokens[start + skipped + 1 : start + len(hidden_states) + 1])
        if targets:
            logits = self.model.head(hidden_states[None, skipped:], self.model.token)[0]
            self.scored_tokens += score_logits(logits, targets, request.top_logprobs)

    def finish(self) -> FinishEvent:
        return FinishEvent(0, "stop", last=True, result=self._result())

    @torch.no_grad()
    def _result(self) -> PromptResult:
        if self.request.task == "score":
            return self.scored_tokens
        summarize = label_probabilities if self.request.task == "classify" else pool_hidden_states
        return summarize(self.model, torch.cat(self.hidden_states)[None], None)[0]

    def preempt(self) -> None:
        self.hidden_states = []
        self.scored_tokens = []


def check_prompt_request(request: PromptRequest, design: Design) -> None:
    """Raise ValueError for a request without tokens, and for labels that the model does not have."""
    if not request.tokens:
        raise ValueError("there are no tokens: give at least one")
    if request.task == "classify" and not isinstance(design.head, ClassificationHead):
        raise ValueError("this model has no labels: train one with --task classify")
