"""Predictions about a text that is there: its label, its masked tokens, its likelihood, its embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keepleft.data.tokenizer import special_tokens
from keepleft.decoding.batch import pad_batch
from keepleft.decoding.generation_config import decoder_start_token, from_model_directory
from keepleft.decoding.score import ScoredToken, score_tokens
from keepleft.disk.encode_text import encode_text
from keepleft.models.design import ClassificationHead, MaskedLMHead, PoolingHead
from keepleft.models.heads import Pooler
from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder, Model
from keepleft.pipelines.loading import load_for_inference
from keepleft.weights.model_directory import AnyModel

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Predictor:
    model: AnyModel
    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def labels(self) -> list[str]:
        """The names of a classifier's labels. Raises ValueError if the model is none."""
        id2label = self.model.notes.get("id2label", {})
        return [str(id2label.get(str(n), n)) for n in range(self._classification_head().labels)]

    def classify(self, texts: Sequence[str]) -> Tensor:
        """(texts, labels) probabilities; texts are cut to the model's positions and must not be empty."""
        return self.probabilities(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens that the model reads of each text, cut to its positions. Raises ValueError for none."""
        tokenizer = self.source_tokenizer or self.tokenizer
        rows = [encode_text(tokenizer, text)[: self.model.design.max_positions] for text in texts]
        if empty := [n for n, row in enumerate(rows) if not row]:
            raise ValueError(f"text {empty[0]} is empty: there is nothing to read")
        return rows

    def probabilities(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, labels) probabilities of rows of tokens. Raises ValueError if the model is no classifier."""
        self._classification_head()
        return classify_rows(self.model, rows)

    def embed(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """(rows, dim) embeddings of rows of tokens: by the model's pooling head, or the mean hidden state."""
        return embed_rows(self.model, rows)

    @torch.no_grad()
    def fill(self, text: str, count: int) -> list[list[tuple[str, float]]]:
        """The `count` likeliest tokens for each mask in a text, with their probabilities.

        Raises ValueError if the model is no masked language model, or the text has no mask.
        """
        if not isinstance(self.model.design.head, MaskedLMHead):
            raise ValueError("this model does not fill gaps: take a BERT with its masked-language-model head")
        mask_id = special_tokens(self.tokenizer).mask
        if mask_id is None:
            raise ValueError("the tokenizer has no mask: there is no way to say where the gap is")
        self.tokenizer.encode_special_tokens = False  # here, and only here, the mask in a text is the mask
        try:
            row = encode_text(self.tokenizer, text)
        finally:
            self.tokenizer.encode_special_tokens = True
        positions = [n for n, token in enumerate(row) if token == mask_id]
        if not positions:
            mask_token = self.tokenizer.id_to_token(mask_id)
            raise ValueError(f"there is no {mask_token} in {text!r}: write it where the gap is")
        logits = self.model(torch.tensor([row], device=self.device))[0, positions]
        probabilities = logits.float().softmax(-1)
        top = probabilities.topk(min(count, probabilities.shape[-1]))
        return [
            [
                (self.tokenizer.decode([token]) or str(self.tokenizer.id_to_token(token)), value)
                for token, value in zip(tokens, values, strict=True)
            ]
            for tokens, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]

    def score(self, text: str, source: str | None = None) -> list[ScoredToken]:
        """The log-probability of each token of a text, given those before it and an encoder-decoder's source.

        Raises ValueError for an encoder, and for an encoder-decoder without a source.
        """
        context, tokens, source_tokens = self.encode_for_score(text, source)
        return score_tokens(self.model, context, tokens, source=source_tokens or None)

    def split_source(self, line: str, name: str = "the line") -> tuple[str | None, str]:
        """The source and the text of a line, which an encoder-decoder wants with a tab between them.

        Raises ValueError, with the `name` of the line, where there is none. Other models have no source.
        """
        if not self.model.design.is_encoder_decoder:
            return None, line
        source, tab, text = line.partition("\t")
        if not tab:
            raise ValueError(f"{name} has no tab: write source and target with a tab between them")
        return source, text

    def encode_for_score(self, text: str, source: str | None) -> tuple[list[int], list[int], list[int]]:
        """What the model reads before a text, the tokens to score, and the source; errors as `score`."""
        is_encoder_decoder = self.model.design.is_encoder_decoder
        if is_encoder_decoder and source is None:
            raise ValueError("this model scores a text for its source: give both, with a tab between them")
        source_tokenizer = self.source_tokenizer or self.tokenizer
        return self.arrange_for_score(
            encode_text(self.tokenizer, text, add_special_tokens=not is_encoder_decoder),
            [] if source is None else encode_text(source_tokenizer, source),
        )

    def arrange_for_score(
        self, tokens: list[int], source_tokens: list[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """As `encode_for_score`, of tokens; those of an encoder-decoder's text are without special tokens."""
        options = from_model_directory(self.model.notes)
        design = self.model.design
        if design.decoder is None:
            raise ValueError(
                "this model is an encoder, and no text is more or less likely to it: take a decoder or an "
                "encoder-decoder"
            )
        if design.is_encoder_decoder:
            return [decoder_start_token(options)], tokens + list(options.eos_ids[:1]), source_tokens
        bos = options.bos_or_eos
        if bos is not None and tokens[:1] != [bos]:
            return [bos], tokens, []
        return tokens[:1], tokens[1:], []

    def _classification_head(self) -> ClassificationHead:
        head = self.model.design.head
        if not isinstance(head, ClassificationHead):
            raise ValueError("this model has no labels: train one with --task classify")
        return head


@torch.no_grad()
def classify_rows(model: Model, rows: Sequence[Sequence[int]]) -> Tensor:
    """(rows, labels) probabilities of rows of tokens."""
    tokens, segments = pad_batch(rows, model.token.weight.device, left=False)
    return model(tokens, segments=segments).float().softmax(-1).cpu()  # type: ignore[no-any-return]


@torch.no_grad()
def embed_rows(model: Model, rows: Sequence[Sequence[int]]) -> Tensor:
    """(rows, dim) embeddings of rows of tokens; of an encoder-decoder, by its encoder."""
    tokens, segments = pad_batch(rows, model.token.weight.device, left=False)
    if isinstance(model, EncoderDecoder):
        return pool_hidden_states(model, model.encode(tokens, segments=segments), segments)
    assert isinstance(model, Encoder | Decoder)
    return pool_hidden_states(model, model.hidden_states(tokens, segments=segments), segments)


def pool_hidden_states(model: Model, hidden_states: Tensor, segments: Tensor | None) -> Tensor:
    """(B, T, dim) → (B, dim) embeddings: by the model's pooling head, or the mean over all tokens."""
    head = model.head
    if not isinstance(model.design.head, PoolingHead):
        head = Pooler(PoolingHead("mean"), model.design)
    return head(hidden_states, model.token, segments).float().cpu()


def label_probabilities(model: Model, hidden_states: Tensor, segments: Tensor | None) -> Tensor:
    """(B, T, dim) → (B, labels)"""
    return model.head(hidden_states, model.token, segments).float().softmax(-1).cpu()


def load_predictor(model_path: str, *, dtype: str = "float32", device: str | None = None) -> Predictor:
    """Load a model directory for predictions."""
    return Predictor(*load_for_inference(model_path, dtype=dtype, device=device))
