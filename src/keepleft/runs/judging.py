"""What models say of texts that are there: a label, a missing word, how likely they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.data.tokenizer import marks
from keepleft.decoding.generate import padded
from keepleft.decoding.options import of_model, start_of
from keepleft.decoding.rescore import Thought, rescored
from keepleft.models.design import Classes, Masked, Pooled
from keepleft.models.heads import Pool
from keepleft.runs.opened import opened


@dataclass(frozen=True)
class Judge:
    model: Any
    tokenizer: Any
    source_tokenizer: Any = None

    @property
    def labels(self) -> list[str]:
        known = self.model.notes.get("id2label", {})
        return [str(known.get(str(n), n)) for n in range(self.model.design.head.labels)]

    def classify(self, texts: Sequence[str]) -> Tensor:
        """(texts, labels) probabilities; texts are cut to what the model reaches."""
        reach = self.model.design.longest
        rows = [row if reach is None else row[:reach] for row in (self.tokenizer.encode(text).ids for text in texts)]
        if empty := [n for n, row in enumerate(rows) if not row]:
            raise ValueError(f"text {empty[0]} is empty: there is nothing to judge")
        return self.chances(rows)

    @torch.no_grad()
    def chances(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, labels) probabilities for rows of tokens"""
        if not isinstance(self.model.design.head, Classes):
            raise ValueError("this model has no labels: train one with --task classify")
        tokens, segments = padded(rows, next(self.model.parameters()).device, left=False)
        return self.model(tokens, segments=segments).float().softmax(-1).cpu()

    @torch.no_grad()
    def vectors(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, dim): what the model makes of each row of tokens as a whole; by its own head, or the mean over all tokens."""
        model = self.model
        tokens, segments = padded(rows, next(model.parameters()).device, left=False)
        if isinstance(model.design.head, Pooled):
            return model(tokens, segments=segments).float().cpu()
        read = model.encode if model.design.encoder is not None and model.design.decoder is not None else model.states
        return Pool(Pooled("mean"), model.design)(read(tokens, segments=segments), model.token, segments).float().cpu()

    @torch.no_grad()
    def fill(self, text: str, count: int) -> list[list[tuple[str, float]]]:
        """For each mask in a text the likeliest tokens, with their probabilities."""
        if not isinstance(self.model.design.head, Masked):
            raise ValueError("this model does not fill gaps: take a BERT with its masked-language-model head")
        mask = marks(self.tokenizer).mask
        if mask is None:
            raise ValueError("the tokenizer has no mask: there is no way to say where the gap is")
        word = self.tokenizer.id_to_token(mask)
        self.tokenizer.encode_special_tokens = False  # here, and only here, the mask in a text is the mask
        try:
            row = self.tokenizer.encode(text).ids
        finally:
            self.tokenizer.encode_special_tokens = True
        places = [n for n, token in enumerate(row) if token == mask]
        if not places:
            raise ValueError(f"there is no {word} in {text!r}: write it where the gap is")
        chances = self.model(torch.tensor([row], device=next(self.model.parameters()).device))[0, places].float().softmax(-1)
        best = chances.topk(min(count, chances.shape[-1]))
        return [[(self.tokenizer.decode([token]) or self.tokenizer.id_to_token(token), value)
                 for token, value in zip(tokens, values, strict=True)]
                for tokens, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)]

    def score(self, text: str, source: str | None = None) -> list[Thought]:
        """Each token of a text: after its beginning, or after a source."""
        options, design = of_model(self.model.notes), self.model.design
        if design.decoder is None:
            raise ValueError("this model does not write, so no text is more or less likely to it: take a decoder or a pair")
        if design.encoder is not None:
            if source is None:
                raise ValueError("this model scores a text for its source: give both, with a tab between them")
            tokens = self.tokenizer.encode(text, add_special_tokens=False).ids + list(options.end[:1])
            read = (self.source_tokenizer or self.tokenizer).encode(source).ids
            return rescored(self.model, [start_of(options)], tokens, source=read)
        tokens = self.tokenizer.encode(text).ids
        first = options.first
        if first is not None and tokens[:1] != [first]:
            return rescored(self.model, [first], tokens)
        return rescored(self.model, tokens[:1], tokens[1:])


def judge(place: str, *, dtype: str = "float32", device: str | None = None) -> Judge:
    """A model directory, ready to judge."""
    return Judge(*opened(place, dtype=dtype, device=device))
