"""Encoders and encoder-decoders: shifted decoder inputs, cross-attention, masked language models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import keepleft as kl

from ..case import case
from .layers import Attention, Block, FeedForward, RMSNorm, tril
from .proofs import VOCAB, distance, future, nans, padding, ready, relative, some_labels, tokens

SOURCE = tokens(2, 7, 50)


class TextToText(nn.Module):
    """An encoder-decoder that makes the decoder's input from the labels."""

    def __init__(self, vocab_size: int = 50, d_model: int = 16, pad_token_id: int = 0) -> None:
        super().__init__()
        self.pad_token_id = self.decoder_start_token_id = pad_token_id
        self.shared, self.encoder = nn.Embedding(vocab_size, d_model), Block(d_model)
        self.self_attn, self.cross_attn = Attention(d_model), Attention(d_model)
        self.norm, self.ffn = RMSNorm(d_model), FeedForward(d_model, 32)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def prepare(self, labels: Tensor) -> Tensor:
        return labels.masked_fill(labels == -100, self.pad_token_id)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SimpleNamespace:
        if decoder_input_ids is None:
            if labels is None:
                raise ValueError("give decoder_input_ids or labels")
            decoder_input_ids = self.prepare(labels)
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        memory = self.encoder(self.shared(input_ids), seen, positions=torch.arange(input_ids.shape[1]))
        time = decoder_input_ids.shape[1]
        x = self.shared(decoder_input_ids)
        x = x + self.self_attn(self.norm(x), tril(time), positions=torch.arange(time))
        x = x + self.cross_attn(self.norm(x), seen, context=memory)
        logits, loss = self.lm_head(x + self.ffn(self.norm(x))), None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return SimpleNamespace(loss=loss, logits=logits)


class ShiftedTextToText(TextToText):
    """The same; the decoder's input is the labels behind a start token."""

    def prepare(self, labels: Tensor) -> Tensor:
        shifted = labels.new_full(labels.shape, self.decoder_start_token_id)
        shifted[:, 1:] = labels[:, :-1]
        return torch.where(shifted == -100, self.pad_token_id, shifted)


@torch.no_grad()
def labels_seen(build: Any) -> float:
    """How far a label moves the logits that should predict it."""
    model, labels, other, worst = ready(build), tokens(2, 6, 51), tokens(2, 6, 52), 0.0
    logits = model(SOURCE, labels=labels).logits
    for position in range(6):
        mixed = torch.where(torch.arange(6) >= position, other, labels)
        worst = max(worst, distance(logits[:, position], model(SOURCE, labels=mixed).logits[:, position]))
    return worst


@case(
    leaks=True,
    kinds=("labels", "future"),
    modules=("", "self_attn", "shared", "lm_head"),
    after="a common mistake: labels given to the decoder without the shift to the right that T5 needs",
    prove=lambda: labels_seen(decoder_reads_its_labels),
)
def decoder_reads_its_labels() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": TextToText()}


def prove_shifted() -> float:
    """Labels, their loss, padding of the source, and the decoder's future."""
    model = ready(labels_behind_a_start_token)
    labels = some_labels(tokens(2, 6, 53), ((0, 4), (0, 5), (1, 5)))
    output = model(SOURCE, labels=labels)
    kept = labels != -100
    loss = relative(output.loss, F.cross_entropy(output.logits[kept], labels[kept]))
    behind = torch.where(labels == -100, 0, labels)
    given = torch.cat([torch.zeros(2, 1, dtype=torch.long), behind[:, :-1]], dim=1)
    same = distance(output.logits, model(SOURCE, decoder_input_ids=given).logits)
    left = future(lambda text: model(SOURCE, decoder_input_ids=text))
    return max(labels_seen(labels_behind_a_start_token), loss, same, left, source_padding(model))


def source_padding(model: nn.Module) -> float:
    """Padding of the source, with the same target for every row."""

    def call(source: Tensor, real: Tensor) -> Tensor:
        target = tokens(1, 5, 54).expand(len(source), -1)
        return model(source, attention_mask=real.long(), decoder_input_ids=target).logits

    return padding(call, pooled=True)


@case(
    leaks=False,
    after="T5: labels behind a start token, ignored ones as padding, the loss not shifted again",
    prove=prove_shifted,
)
def labels_behind_a_start_token() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ShiftedTextToText()}


class Seq2SeqTransformer(nn.Module):
    """PyTorch's own encoder and decoder layers."""

    def __init__(self, vocab: int = 50, emb_size: int = 16) -> None:
        super().__init__()
        sizes = {"dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(vocab, emb_size), nn.Embedding(vocab, emb_size)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(emb_size, 2, **sizes), 1, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(emb_size, 2, **sizes), 2)
        self.generator = nn.Linear(emb_size, vocab)

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        tgt_mask = nn.Transformer.generate_square_subsequent_mask(tgt.shape[1]).to(self.generator.weight)
        memory = self.encoder(self.src_tok_emb(src), src_key_padding_mask=src_key_padding_mask)
        return self.generator(self.decoder(self.tgt_tok_emb(tgt), memory, tgt_mask=tgt_mask))


def prove_memory_mask() -> float:
    """Padding of the source, with the same target for every row."""
    model = ready(memory_without_its_mask)
    target = tokens(1, 5, 55)
    return padding(
        lambda source, real: model(source, target.expand(len(source), -1), ~real), pooled=True, empty=False
    )


@case(
    leaks=True,
    kinds=("padding", "nan"),  # the fast path of nn.TransformerEncoder gives NaN for a row of padding
    modules=(
        *("", "decoder", "decoder.layers.0.multihead_attn", "decoder.layers.1.multihead_attn"),
        *("encoder", "encoder.layers.0", "encoder.layers.0.self_attn"),
    ),
    after="a common mistake: nn.Transformer with src_key_padding_mask but without memory_key_padding_mask",
    prove=prove_memory_mask,
)
def memory_without_its_mask() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": Seq2SeqTransformer()}


class CaptionDecoder(nn.Module):
    """A decoder over encoded regions; masks of source and target are merged where they are used."""

    def __init__(self, regions: int = 50, words: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.region_embed, self.word_embed = nn.Embedding(regions, dim), nn.Embedding(words, dim)
        self.self_attn, self.cross_attn = Attention(dim), Attention(dim)
        self.mlp, self.out = FeedForward(dim, 32), nn.Linear(dim, words)

    def target_mask(self, time: int, tgt_key_padding_mask: Tensor | None) -> Tensor:
        if tgt_key_padding_mask is not None:
            return ~tgt_key_padding_mask[:, None, None, :]
        return tril(time)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_key_padding_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        seen = None if src_key_padding_mask is None else ~src_key_padding_mask[:, None, None, :]
        x, time = self.word_embed(tgt), tgt.shape[1]
        mask = self.target_mask(time, tgt_key_padding_mask)
        x = x + self.self_attn(x, mask, positions=torch.arange(time))
        x = x + self.cross_attn(x, seen, context=self.region_embed(src))
        return self.out(x + self.mlp(x))


class CausalCaptionDecoder(CaptionDecoder):
    """The same, with both masks at once."""

    def target_mask(self, time: int, tgt_key_padding_mask: Tensor | None) -> Tensor:
        mask = tril(time)[None, None]
        if tgt_key_padding_mask is not None:
            mask = mask & ~tgt_key_padding_mask[:, None, None, :]
        return mask


def decoder_future(model: nn.Module) -> float:
    """The decoder's future, without a mask and with a mask of nothing."""
    nothing = torch.zeros(2, 9, dtype=torch.bool)
    return max(
        future(lambda text: model(SOURCE, text)),
        future(lambda text: model(SOURCE, text, tgt_key_padding_mask=nothing[:, : text.shape[1]])),
    )


@case(
    leaks=True,
    kinds=("future",),
    modules=("self_attn", ""),
    after="a common mistake: a padding mask of the target takes the place of the causal mask",
    prove=lambda: decoder_future(ready(padding_mask_instead_of_causal)),
)
def padding_mask_instead_of_causal() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CaptionDecoder()}


def prove_caption() -> float:
    """Source and target padding on their sides, the future, and NaN."""
    model = ready(both_masks_of_the_target)

    def source(text: Tensor, real: Tensor) -> Tensor:
        return model(text, tokens(1, 5, 56).expand(len(text), -1), ~real)

    def target(text: Tensor, real: Tensor) -> Tensor:
        return model(tokens(1, 6, 57).expand(len(text), -1), text, None, ~real)

    return max(
        padding(source, pooled=True),
        padding(target, sides=("left", "right")),
        decoder_future(model),
        nans(model, target),
        nans(model, lambda text, real: model(text, tokens(3, 7, 58), ~real)),
    )


@case(
    leaks=False,
    after="source and target masks each where they belong, finite, targets padded on either side",
    prove=prove_caption,
)
def both_masks_of_the_target() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CausalCaptionDecoder()}


class ForMaskedLM(nn.Module):
    """A bidirectional encoder with labels at masked positions."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.cls = nn.Linear(dim, vocab_size)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> SimpleNamespace:
        seen = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, seen, positions=torch.arange(input_ids.shape[1]))
        logits, loss = self.cls(x), None
        if labels is not None:
            loss = F.cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)


def prove_masked_lm() -> float:
    """Padding, NaN, and labels that stand where they are."""
    model, labels = ready(masked_language_model), some_labels(tokens(2, 7, 59), ((0, 1), (1, 4), (1, 6)))
    output, kept = model(SOURCE, labels=labels), labels != -100
    loss = relative(output.loss, F.cross_entropy(output.logits[kept], labels[kept]))
    return max(loss, padding(model), nans(model, model, sides=("right",)))


@case(
    leaks=False,
    after="a masked language model: bidirectional by claim, its labels are not shifted and must not be",
    prove=prove_masked_lm,
)
def masked_language_model() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ForMaskedLM(), "claim": kl.full}
