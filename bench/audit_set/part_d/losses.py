"""Losses: shifts across rows and around the end, chunks, several tokens ahead; and a merged decoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..case import case
from ..part_b.layers import Attention, Block, FeedForward, RMSNorm, tril
from ..part_b.proofs import (
    batch,
    distance,
    future,
    nans,
    next_token,
    padding,
    ready,
    relative,
    some_labels,
    tokens,
)

TEXT = tokens(3, 10, 60)
LABELS = some_labels(TEXT)


class LabelledLM(nn.Module):
    """A decoder that shifts its labels itself."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.vocab_size, self.embed_tokens = vocab_size, nn.Embedding(vocab_size, dim)
        self.layers, self.norm = nn.ModuleList(Block(dim) for _ in range(2)), RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def hidden(self, input_ids: Tensor) -> Tensor:
        x, time = self.embed_tokens(input_ids), input_ids.shape[1]
        for layer in self.layers:
            x = layer(x, tril(time), positions=torch.arange(time))
        return self.norm(x)

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = self.lm_head(self.hidden(input_ids))
        return SimpleNamespace(loss=None if labels is None else self.loss_of(logits, labels), logits=logits)


def by_definition(build: Any) -> float:
    """The loss with and without ignored labels, in a batch and for one row."""
    model, sizes = ready(build), []
    for text, labels in ((TEXT, TEXT), (TEXT, LABELS), (TEXT[1:2], LABELS[1:2])):
        sizes.append(relative(model(text, labels=labels).loss, next_token(model(text).logits, labels)))
        other = torch.cat([(labels[:, :1] + 7) % 50, labels[:, 1:]], dim=1)  # no position predicts the first
        sizes.append(relative(model(text, labels=other).loss, model(text, labels=labels).loss))
    return max(sizes)


class FlatShiftLM(LabelledLM):
    """Flattened, then shifted."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.reshape(-1, self.vocab_size)[:-1], labels.reshape(-1)[1:])


@case(
    leaks=True,
    kinds=("labels", "batch"),
    modules=("", "lm_head"),
    after="a common mistake: flattened before the shift: a row's end predicts the next row's start",
    prove=lambda: by_definition(flattened_before_the_shift),
)
def flattened_before_the_shift() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": FlatShiftLM()}


class RolledLM(LabelledLM):
    """Labels are rolled."""

    def loss_of(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.transpose(1, 2), labels.roll(-1, dims=1))


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "lm_head"),
    after="a common mistake: labels shifted by torch.roll: the last position predicts the first token",
    prove=lambda: by_definition(labels_rolled_around),
)
def labels_rolled_around() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RolledLM()}


class ChunkedHeadLM(LabelledLM):
    """With labels, logits exist for a few positions at a time, and only the loss is returned."""

    size = 6

    def pieces(self, count: int) -> int:
        return max(1, count // self.size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        hidden = self.hidden(input_ids)
        if labels is None:
            return SimpleNamespace(loss=None, logits=self.lm_head(hidden))
        flat, goals = hidden[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total, count = flat.new_zeros(()), 0
        for i in range(self.pieces(len(goals))):
            piece = slice(i * self.size, (i + 1) * self.size)
            total = total + F.cross_entropy(self.lm_head(flat[piece]), goals[piece], reduction="sum")
            count = count + (goals[piece] != -100).sum()
        return SimpleNamespace(loss=total / torch.as_tensor(count).clamp(min=1), logits=None)


class WholeChunkedHeadLM(ChunkedHeadLM):
    """The same, with the remainder."""

    def pieces(self, count: int) -> int:
        return -(-count // self.size)


@case(
    leaks=True,
    kinds=("labels",),
    modules=("", "lm_head"),
    after="a common mistake in chunked losses: the number of chunks is rounded down",
    prove=lambda: by_definition(remainder_of_the_chunks_lost),
)
def remainder_of_the_chunks_lost() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ChunkedHeadLM()}


@case(
    leaks=False,
    after="a chunked loss, done right: rounded up, and no logits where there are labels",
    prove=lambda: max(
        by_definition(remainder_of_the_chunks_counted),
        future(ready(remainder_of_the_chunks_counted)),
        batch(ready(remainder_of_the_chunks_counted)),
    ),
)
def remainder_of_the_chunks_counted() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": WholeChunkedHeadLM()}


class NextButOneLM(LabelledLM):
    """Multi-token prediction with a module of its own that is told the next token, as in DeepSeek-V3."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__(vocab_size, dim)
        self.mtp_proj, self.mtp_block = nn.Linear(2 * dim, dim), Block(dim)

    def told(self, embedded: Tensor) -> Tensor:
        return embedded[:, 2:]

    def further(self, hidden: Tensor, input_ids: Tensor) -> Tensor:
        told = self.told(self.embed_tokens(input_ids))
        x = self.mtp_proj(torch.cat([hidden[:, :-2], told], dim=-1))
        return self.lm_head(self.mtp_block(x, tril(x.shape[1]), positions=torch.arange(x.shape[1])))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        hidden = self.hidden(input_ids)
        logits, loss = self.lm_head(hidden), None
        if labels is not None:
            loss = self.loss_of(logits, labels)
            if input_ids.shape[1] > 2:
                goals = labels[:, 2:].flatten()
                extra = F.cross_entropy(self.further(hidden, input_ids).flatten(0, 1), goals, reduction="sum")
                loss = loss + 0.3 * extra / (goals != -100).sum().clamp(min=1)
        return SimpleNamespace(loss=loss, logits=logits)


class ToldNextLM(NextButOneLM):
    """The same; it is told the token before its target."""

    def told(self, embedded: Tensor) -> Tensor:
        return embedded[:, 1:-1]


@torch.no_grad()
def target_seen(build: Any) -> float:
    """How far tokens from its target on move a prediction of the next token but one."""
    model, worst = ready(build), 0.0
    other = tokens(3, 10, 61)
    first = model.further(model.hidden(TEXT), TEXT)
    for position in range(8):
        text = torch.where(torch.arange(10) >= position + 2, other, TEXT)
        second = model.further(model.hidden(text), text)
        worst = max(worst, distance(first[:, position], second[:, position]))
    return worst


@case(
    leaks=True,
    kinds=("labels", "future"),
    modules=("", "mtp_proj", "mtp_block", "mtp_block.attn", "lm_head", "embed_tokens"),
    after="a common mistake in multi-token prediction: the module is told the token to predict",
    prove=lambda: target_seen(told_the_token_to_predict),
)
def told_the_token_to_predict() -> dict[str, Any]:
    torch.manual_seed(0)
    model = NextButOneLM()
    nn.init.normal_(model.mtp_proj.weight, std=0.5)  # as after training
    return {"target": model}


def prove_told_next() -> float:
    """The module sees no target, and the loss is the sum of both by definition."""
    model = ready(told_the_token_before)
    hidden = model.hidden(TEXT)
    further = F.pad(model.further(hidden, TEXT), (0, 0, 0, 2))
    sizes = [target_seen(told_the_token_before), future(model), batch(model)]
    for labels in (TEXT, LABELS):
        expected = next_token(model.lm_head(hidden), labels) + 0.3 * next_token(further, labels, ahead=2)
        sizes.append(relative(model(TEXT, labels=labels).loss, expected))
    return max(sizes)


@case(
    leaks=False,
    after="DeepSeek-V3's multi-token prediction, done right: told the next token, it predicts the one after",
    prove=prove_told_next,
)
def told_the_token_before() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": ToldNextLM()}


class SmoothedSumLM(LabelledLM):
    """Label smoothing, and the number of labels of a step where it is known."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, num_items_in_batch: int | None = None
    ) -> SimpleNamespace:
        output = super().forward(input_ids)
        if labels is not None:
            goals = F.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
            loss = F.cross_entropy(output.logits.flatten(0, 1), goals, reduction="sum", label_smoothing=0.1)
            output.loss = loss / (num_items_in_batch or (goals != -100).sum().clamp(min=1))
        return output


@torch.no_grad()
def prove_smoothed_sum() -> float:
    """By definition, and in micro-batches."""
    model = ready(smoothing_of_a_step)
    items = int((LABELS[:, 1:] != -100).sum())
    log_p, kept = model(TEXT).logits.log_softmax(-1)[:, :-1], LABELS[:, 1:] != -100
    picked = log_p.gather(-1, LABELS[:, 1:].clamp(min=0)[..., None])[..., 0]
    expected = -(0.9 * picked + 0.1 * log_p.mean(-1))[kept].mean()
    rows = [model(x[None], y[None], items).loss for x, y in zip(TEXT, LABELS, strict=True)]
    sizes = relative(model(TEXT, labels=LABELS).loss, expected), relative(sum(rows), expected)
    return max(*sizes, future(model), batch(model))


@case(
    leaks=False,
    after="label smoothing over labels that count, as a sum over the micro-batch by num_items_in_batch",
    prove=prove_smoothed_sum,
)
def smoothing_of_a_step() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SmoothedSumLM()}


class MergedAttentionModel(nn.Module):
    """An encoder-decoder whose decoder attends to source and target at once, as in T5Gemma 2."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.shared, self.pos = nn.Embedding(vocab_size, dim), nn.Embedding(128, dim)
        self.encoder = Block(dim)
        self.merged = nn.ModuleList(Attention(dim) for _ in range(2))
        self.norm, self.mlp, self.lm_head = RMSNorm(dim), FeedForward(dim, 32), nn.Linear(dim, vocab_size)

    def target_mask(self, layer: int, time: int) -> Tensor:
        return tril(time) if layer == 0 else torch.ones(time, time, dtype=torch.bool)

    def forward(
        self, input_ids: Tensor, decoder_input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> SimpleNamespace:
        time, length = decoder_input_ids.shape[1], input_ids.shape[1]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        seen = real.bool()[:, None, None, :]
        memory = self.encoder(self.shared(input_ids) + self.pos(torch.arange(length)), seen)
        x = self.shared(decoder_input_ids) + self.pos(torch.arange(time))
        for i, attention in enumerate(self.merged):
            own = self.target_mask(i, time).expand(len(x), 1, time, time)
            mask = torch.cat([seen.expand(len(x), 1, time, length), own], dim=-1)
            y = self.norm(x)
            x = x + attention(y, mask, context=torch.cat([memory, y], dim=1))
        return SimpleNamespace(logits=self.lm_head(x + self.mlp(x)))


class CausalMergedModel(MergedAttentionModel):
    """The same, causal in every layer."""

    def target_mask(self, layer: int, time: int) -> Tensor:
        return tril(time)


SOURCE = tokens(2, 6, 62)


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "merged.0", "merged.1"),
    after="a common mistake in merged attention: the target's mask is all ones in the second layer",
    prove=lambda: future(lambda text: ready(merged_attention_looks_ahead)(SOURCE, text)),
)
def merged_attention_looks_ahead() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MergedAttentionModel()}


def prove_merged() -> float:
    """The decoder's future, padding of the source, other rows, NaN."""
    model = ready(merged_attention_in_order)

    def source(text: Tensor, real: Tensor) -> Tensor:
        return model(text, tokens(1, 7, 63).expand(len(text), -1), real.long()).logits

    return max(
        future(lambda text: model(SOURCE, text)),
        padding(source, pooled=True),
        batch(lambda text: model(text.flip(1), text)),
        nans(model, source, sides=("right",)),
    )


@case(
    leaks=False,
    after="merged attention to source and target, done right: a source mask beside a causal one",
    prove=prove_merged,
)
def merged_attention_in_order() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CausalMergedModel()}
