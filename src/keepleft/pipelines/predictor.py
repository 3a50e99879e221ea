"""What models say of texts that are there: a label, a missing word, how likely they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.data.tokenizer import special_tokens
from keepleft.decoding.batch import pad_batch
from keepleft.decoding.generation_config import decoder_start_token, from_model_directory
from keepleft.decoding.score import ScoredToken, score_tokens
from keepleft.models.design import ClassificationHead, MaskedLMHead, PoolingHead
from keepleft.models.heads import Pooler
from keepleft.pipelines.loading import load_for_inference


@dataclass(frozen=True)
class Predictor:
    model: Any
    tokenizer: Any
    source_tokenizer: Any = None

    @property
    def labels(self) -> list[str]:
        id2label = self.model.notes.get("id2label", {})
        return [str(id2label.get(str(n), n)) for n in range(self.model.design.head.labels)]

    def classify(self, texts: Sequence[str]) -> Tensor:
        """(texts, labels) probabilities; texts are cut to what the model reaches."""
        max_positions = self.model.design.max_positions
        rows = [
            row if max_positions is None else row[:max_positions]
            for row in (self.tokenizer.encode(text).ids for text in texts)
        ]
        if empty := [n for n, row in enumerate(rows) if not row]:
            raise ValueError(f"text {empty[0]} is empty: there is nothing to judge")
        return self.probabilities(rows)

    @torch.no_grad()
    def probabilities(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, labels) probabilities for rows of tokens"""
        if not isinstance(self.model.design.head, ClassificationHead):
            raise ValueError("this model has no labels: train one with --task classify")
        tokens, segments = pad_batch(rows, next(self.model.parameters()).device, left=False)
        return self.model(tokens, segments=segments).float().softmax(-1).cpu()

    @torch.no_grad()
    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, dim): what the model makes of each row of tokens as a whole; by its own head, or the mean
        over all tokens.
        """
        model = self.model
        tokens, segments = pad_batch(rows, next(model.parameters()).device, left=False)
        if isinstance(model.design.head, PoolingHead):
            return model(tokens, segments=segments).float().cpu()
        encode = model.encode if model.design.is_encoder_decoder else model.hidden_states
        return (
            Pooler(PoolingHead("mean"), model.design)(
                encode(tokens, segments=segments), model.token, segments
            )
            .float()
            .cpu()
        )

    @torch.no_grad()
    def fill(self, text: str, count: int) -> list[list[tuple[str, float]]]:
        """For each mask in a text the likeliest tokens, with their probabilities."""
        if not isinstance(self.model.design.head, MaskedLMHead):
            raise ValueError("this model does not fill gaps: take a BERT with its masked-language-model head")
        mask_id = special_tokens(self.tokenizer).mask
        if mask_id is None:
            raise ValueError("the tokenizer has no mask: there is no way to say where the gap is")
        mask_token = self.tokenizer.id_to_token(mask_id)
        self.tokenizer.encode_special_tokens = False  # here, and only here, the mask in a text is the mask
        try:
            row = self.tokenizer.encode(text).ids
        finally:
            self.tokenizer.encode_special_tokens = True
        positions = [n for n, token in enumerate(row) if token == mask_id]
        if not positions:
            raise ValueError(f"there is no {mask_token} in {text!r}: write it where the gap is")
        probabilities = (
            self.model(torch.tensor([row], device=next(self.model.parameters()).device))[0, positions]
            .float()
            .softmax(-1)
        )
        top = probabilities.topk(min(count, probabilities.shape[-1]))
        return [
            [
                (self.tokenizer.decode([token]) or self.tokenizer.id_to_token(token), value)
                for token, value in zip(tokens, values, strict=True)
            ]
            for tokens, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]

    def score(self, text: str, source: str | None = None) -> list[ScoredToken]:
        """Each token of a text: after its beginning, or after a source."""
        options, design = from_model_directory(self.model.notes), self.model.design
        if design.decoder is None:
            raise ValueError(
                "this model does not write, so no text is more or less likely to it: take a decoder or a pair"
            )
        if design.is_encoder_decoder:
            if source is None:
                raise ValueError(
                    "this model scores a text for its source: give both, with a tab between them"
                )
            tokens = self.tokenizer.encode(text, add_special_tokens=False).ids + list(options.eos_ids[:1])
            source_tokens = (self.source_tokenizer or self.tokenizer).encode(source).ids
            return score_tokens(self.model, [decoder_start_token(options)], tokens, source=source_tokens)
        tokens = self.tokenizer.encode(text).ids
        bos = options.bos_or_eos
        if bos is not None and tokens[:1] != [bos]:
            return score_tokens(self.model, [bos], tokens)
        return score_tokens(self.model, tokens[:1], tokens[1:])


def load_predictor(model_path: str, *, dtype: str = "float32", device: str | None = None) -> Predictor:
    """A model directory, ready to judge."""
    return Predictor(*load_for_inference(model_path, dtype=dtype, device=device))
