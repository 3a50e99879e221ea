"""Padding: code paths without the mask, pooled vectors, counts, states, and losses beside padding."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import keepleft as kl

from ..case import case
from ..part_b.layers import Block, FeedForward, RMSNorm, merge, rotate, split, tril
from ..part_b.proofs import batch, distance, future, nans, next_token, padding, ready, relative, tokens


class EmbedsDecoder(nn.Module):
    """A decoder that also takes embeddings, as for soft prompts."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.lm_head = RMSNorm(dim), nn.Linear(dim, vocab_size)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> SimpleNamespace:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        time = inputs_embeds.shape[1]
        mask = tril(time)
        if input_ids is not None and attention_mask is not None:
            mask = mask & attention_mask.bool()[:, None, None, :]
        x = inputs_embeds
        for layer in self.layers:
            x = layer(x, mask, positions=torch.arange(time))
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))


def prove_embeds() -> float:
    """Embeddings padded on the left."""
    model = ready(embeds_path_without_mask)
    return padding(
        lambda text, real: model(inputs_embeds=model.embed_tokens(text), attention_mask=real.long()),
        sides=("left",),
    )


@case(
    leaks=True,
    kinds=("padding",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attn"))),
    after="a common mistake: the padding mask is merged with input_ids only, not with inputs_embeds",
    prove=prove_embeds,
)
def embeds_path_without_mask() -> dict[str, Any]:
    torch.manual_seed(0)
    example = {"inputs_embeds": torch.randn(2, 9, 16), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    return {"target": EmbedsDecoder(), "example": example}


class TextClassifier(nn.Module):
    """A classifier over one vector of each text."""

    def __init__(self, vocab_size: int = 50, dim: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.encoder = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.classifier = RMSNorm(dim), nn.Linear(dim, classes)

    def pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        last = attention_mask.long().sum(1).clamp(max=hidden.shape[1] - 1)
        return hidden[torch.arange(len(hidden)), last]

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden, seen = self.embeddings(input_ids), attention_mask.bool()[:, None, None, :]
        for layer in self.encoder:
            hidden = layer(hidden, seen, positions=torch.arange(input_ids.shape[1]))
        return self.classifier(self.pool(self.norm(hidden), attention_mask))


class MeanClassifier(TextClassifier):
    """The same, with the mean of the real positions, and zeros for none."""

    def pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask.to(hidden.dtype)
        return torch.einsum("bt,btd->bd", weight / weight.sum(1, keepdim=True).clamp(min=1.0), hidden)


@case(
    leaks=True,
    kinds=("padding",),
    modules=("", "classifier", "norm"),
    after="a common mistake: last-token pooling at mask.sum(1), one too far, clamped to the row",
    prove=lambda: padding(ready(last_token_one_too_far), pooled=True, empty=False),
)
def last_token_one_too_far() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": TextClassifier(), "claim": kl.full}


def prove_mean_pooling() -> float:
    """Padding on both sides, other rows, NaN."""
    model = ready(mean_of_real_positions)
    return max(padding(model, pooled=True, sides=("right", "left")), batch(model), nans(model, model))


@case(
    leaks=False,
    after="sentence vectors as the mean of the real tokens, with a count of at least one",
    prove=prove_mean_pooling,
)
def mean_of_real_positions() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MeanClassifier(), "claim": kl.full}


class ContextGate(nn.Module):
    """Squeeze and excitation over the utterance, padding set to zero."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(channels, channels // 2), nn.Linear(channels // 2, channels)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        mean = (x * keep).mean(dim=1, keepdim=True)
        return x * torch.sigmoid(self.excite(F.silu(self.squeeze(mean))))


class ContextNet(nn.Module):
    """Convolutions with a gate from the whole utterance."""

    def __init__(self, units: int = 50, channels: int = 16) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(units, channels), nn.Conv1d(channels, channels, 3, padding=1)
        self.se, self.out = ContextGate(channels), nn.Linear(channels, units)

    def forward(self, tokens: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full((len(tokens),), tokens.shape[1])
        x = self.embed(tokens)
        keep = (torch.arange(tokens.shape[1])[None] < lengths[:, None]).unsqueeze(-1).to(x.dtype)
        x = x + F.relu(self.conv((x * keep).mT).mT)
        return self.out(self.se(x, keep))


@case(
    leaks=True,
    kinds=("padding",),
    modules=("se", "se.squeeze", "se.excite", ""),
    after="a common mistake: squeeze and excitation sums real frames only, but divides by the padded length",
    prove=lambda: padding(lambda text, real: ready(squeeze_divides_by_padded_length)(text, real.sum(1))),
)
def squeeze_divides_by_padded_length() -> dict[str, Any]:
    torch.manual_seed(0)
    model = ContextNet()
    nn.init.normal_(model.se.squeeze.weight)  # as far from even as after training
    nn.init.normal_(model.se.excite.weight)
    return {"target": model, "claim": kl.full}


class TwoPathAttention(nn.Module):
    """The fused kernel in training, weights by hand otherwise."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.in_proj, self.out_proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, pad: Tensor | None) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.in_proj(x).chunk(3, dim=-1))
        if self.training:
            return self.out_proj(merge(F.scaled_dot_product_attention(q, k, v)))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if pad is not None:
            scores = scores.masked_fill(pad[:, None, None, :], -1e4)
        return self.out_proj(merge(scores.softmax(-1) @ v))


class TwoPathEncoder(nn.Module):
    """An encoder of two such layers."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(128, dim)
        self.attn = nn.ModuleList(TwoPathAttention(dim) for _ in range(2))
        self.ln, self.head = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2)), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1]))
        for ln, attn in zip(self.ln, self.attn, strict=True):
            x = x + attn(ln(x), key_padding_mask)
        return self.head(x)


@case(
    leaks=True,
    kinds=("padding",),
    modules=("attn.0", "attn.1", ""),
    after="a common mistake: the fused path, taken in training only, is called without the padding mask",
    prove=lambda: padding(
        lambda text, real: ready(padding_mask_lost_in_training).train()(text, ~real), empty=False
    ),
)
def padding_mask_lost_in_training() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": TwoPathEncoder(), "claim": kl.full}


class LengthsDecoder(nn.Module):
    """A decoder whose kernel takes lengths, made from the mask."""

    def __init__(self, vocab_size: int = 50, hidden_size: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(Block(hidden_size) for _ in range(2))
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        time, mask = input_ids.shape[1], tril(input_ids.shape[1])
        if attention_mask is not None:
            seqlens = attention_mask.sum(dim=-1)
            mask = mask & (torch.arange(time)[None] < seqlens[:, None])[:, None, None, :]
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, positions=torch.arange(time))
        return {"logits": self.lm_head(hidden)}


@case(
    leaks=True,
    kinds=("padding",),
    modules=("", *(f"layers.{i}{part}" for i in (0, 1) for part in ("", ".attn"))),
    after="a common mistake: a mask is turned into lengths, which is wrong for padding on the left",
    prove=lambda: padding(ready(mask_turned_into_lengths), sides=("left",)),
)
def mask_turned_into_lengths() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LengthsDecoder()}


class LuongModel(nn.Module):
    """A recurrent encoder-decoder with attention; the decoder starts from the encoder's final state."""

    def __init__(self, vocab: int = 50, hidden: int = 16) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, hidden), nn.Embedding(vocab, hidden)
        self.encoder = nn.GRU(hidden, hidden, batch_first=True)
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.align, self.generator = nn.Linear(hidden, hidden), nn.Linear(2 * hidden, vocab)

    def encode(self, src: Tensor, pad: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(self.src_embed(src))

    def forward(self, src: Tensor, tgt: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        pad = (
            torch.zeros_like(src, dtype=torch.bool) if src_key_padding_mask is None else src_key_padding_mask
        )
        memory, state = self.encode(src, pad)
        out, _ = self.decoder(self.tgt_embed(tgt), state)
        scores = (self.align(out) @ memory.mT).masked_fill(pad[:, None, :], torch.finfo(out.dtype).min)
        return self.generator(torch.cat([out, scores.softmax(-1) @ memory], dim=-1))


class PackedLuongModel(LuongModel):
    """The same with a packed source."""

    def encode(self, src: Tensor, pad: Tensor) -> tuple[Tensor, Tensor]:
        lengths = (~pad).sum(1).clamp(min=1).cpu()
        packed = pack_padded_sequence(self.src_embed(src), lengths, batch_first=True, enforce_sorted=False)
        out, state = self.encoder(packed)
        return pad_packed_sequence(out, batch_first=True, total_length=src.shape[1])[0], state


def source(build: Any) -> float:
    """Padding of the source, with one target for all rows."""
    model = ready(build)
    return padding(lambda text, real: model(text, tokens(1, 5, 70).expand(len(text), -1), ~real), pooled=True)


@case(
    leaks=True,
    kinds=("padding",),
    modules=("encoder", "decoder", ""),
    after="a common mistake: the final state of an encoder that was not packed has read the padding",
    prove=lambda: source(final_state_after_the_padding),
)
def final_state_after_the_padding() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LuongModel()}


def prove_packed_source() -> float:
    """Source padding, the decoder's future, NaN."""
    model, text = ready(final_state_of_a_packed_source), tokens(2, 6, 71)
    empty = nans(model, lambda src, real: model(src, tokens(3, 7, 72), ~real), sides=("right",))
    return max(source(final_state_of_a_packed_source), future(lambda tgt: model(text, tgt)), empty)


@case(
    leaks=False,
    after="a common mistake, done right: a packed source, whose final state stands at its last token",
    prove=prove_packed_source,
)
def final_state_of_a_packed_source() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PackedLuongModel()}


class MambaMixer(nn.Module):
    """Convolution and recurrence; padding is set to zero before the convolution."""

    def __init__(self, dim: int, taps: int = 3) -> None:
        super().__init__()
        self.taps, self.in_proj, self.conv1d = (
            taps,
            nn.Linear(dim, dim),
            nn.Conv1d(dim, dim, taps, groups=dim),
        )
        self.gate, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def after_conv(self, u: Tensor, keep: Tensor) -> Tensor:
        return u

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        u = self.in_proj(x) * keep
        u = F.silu(self.conv1d(F.pad(u.mT, (self.taps - 1, 0))).mT)
        u = self.after_conv(u, keep)
        decay, state, states = torch.sigmoid(self.gate(u) + 2.0), torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            state = decay[:, t] * state + u[:, t]
            states.append(state)
        return self.out_proj(torch.stack(states, dim=1))


class TwiceMaskedMixer(MambaMixer):
    """The same; the bias of the convolution is set to zero at padding, too."""

    def after_conv(self, u: Tensor, keep: Tensor) -> Tensor:
        return u * keep


class MambaLM(nn.Module):
    """Two mixers."""

    def __init__(self, mixer: type[MambaMixer], vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, dim)
        self.mixers = nn.ModuleList(mixer(dim) for _ in range(2))
        self.norms = nn.ModuleList(RMSNorm(dim) for _ in range(2))
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SimpleNamespace:
        x = self.embeddings(input_ids)
        keep = (
            torch.ones_like(x[..., :1]) if attention_mask is None else attention_mask[..., None].to(x.dtype)
        )
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x), keep)
        return SimpleNamespace(logits=self.lm_head(x))


@case(
    leaks=True,
    kinds=("padding",),
    modules=("", *(f"mixers.{i}{part}" for i in (0, 1) for part in ("", ".conv1d", ".gate"))),
    after="after reports on Mamba and left padding: a convolution's bias fills the state at padding",
    prove=lambda: padding(ready(bias_of_padding_in_the_state), sides=("left",)),
)
def bias_of_padding_in_the_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MambaLM(MambaMixer)}


def prove_both_sides(build: Any) -> float:
    """Both sides, the future, other rows, NaN."""
    model = ready(build)
    return max(padding(model, sides=("left", "right")), future(model), batch(model), nans(model, model))


@case(
    leaks=False,
    after="Mamba with left padding, done right: masked before the convolution and again after it",
    prove=lambda: prove_both_sides(state_masked_twice),
)
def state_masked_twice() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MambaLM(TwiceMaskedMixer)}


class WeightedLossLM(nn.Module):
    """A decoder whose loss is weighted by the attention mask."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens, self.layer = nn.Embedding(vocab_size, dim), Block(dim)
        self.lm_head = nn.Linear(dim, vocab_size)

    def reduce(self, losses: Tensor, kept: Tensor, padded: bool) -> Tensor:
        count = losses.new_tensor(kept.numel()) if padded else kept.sum().clamp(min=1)
        return (losses * kept).sum() / count

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None
    ) -> SimpleNamespace:
        time, real = input_ids.shape[1], torch.ones_like(input_ids, dtype=torch.bool)
        real = real if attention_mask is None else attention_mask.bool()
        x = self.embed_tokens(input_ids)
        x = self.layer(x, tril(time) & real[:, None, None, :], positions=torch.arange(time))
        logits, loss = self.lm_head(x), None
        if labels is not None:
            losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
            kept = real[:, :-1] & real[:, 1:] & (labels[:, 1:] != -100)
            loss = self.reduce(losses, kept, attention_mask is not None)
        return SimpleNamespace(loss=loss, logits=logits)


class CountedLossLM(WeightedLossLM):
    """The same, divided by what is counted."""

    def reduce(self, losses: Tensor, kept: Tensor, padded: bool) -> Tensor:
        return (losses * kept).sum() / kept.sum().clamp(min=1)


def padded_loss(build: Any) -> float:
    """The loss of a padded batch, with the tokens or -100 as labels at padding, by definition."""
    model, text, worst = ready(build), tokens(3, 9, 73), 0.0
    for lengths in ((9, 9, 9), (9, 4, 2)):
        real = torch.arange(9)[None] < torch.tensor(lengths)[:, None]
        goals = text.masked_fill(~real, -100)
        for labels in (text, goals):
            output = model(text, attention_mask=real.long(), labels=labels)
            worst = max(worst, relative(output.loss, next_token(output.logits, goals)))
    return worst


@case(
    leaks=True,
    kinds=("padding", "labels"),
    modules=("", "lm_head"),
    after="a common mistake: the loss is weighted by the attention mask, but divided by all positions",
    prove=lambda: padded_loss(loss_over_padded_count),
)
def loss_over_padded_count() -> dict[str, Any]:
    torch.manual_seed(0)
    text = torch.randint(1, 50, (3, 9))
    mask = (torch.arange(9)[None] < torch.tensor([9, 6, 4])[:, None]).long()
    labels = text.masked_fill(mask == 0, -100)
    example = {"input_ids": text, "attention_mask": mask, "labels": labels}
    return {"target": WeightedLossLM(), "example": example}


@case(
    leaks=False,
    after="a common mistake, done right: the weighted loss is divided by the positions that count",
    prove=lambda: max(padded_loss(loss_over_real_count), prove_both_sides(loss_over_real_count)),
)
def loss_over_real_count() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CountedLossLM()}


class LeftPaddedLlama(nn.Module):
    """Rotary positions of each row, a boolean mask whose diagonal is always open."""

    def __init__(self, vocab_size: int = 50, dim: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.embed_tokens = heads, nn.Embedding(vocab_size, dim)
        self.qkv = nn.ModuleList(nn.Linear(dim, 3 * dim, bias=False) for _ in range(2))
        self.o = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.norms, self.mlp = nn.ModuleList(RMSNorm(dim) for _ in range(2)), FeedForward(dim, 32)
        self.lm_head = nn.Linear(dim, vocab_size)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> SimpleNamespace:
        time = input_ids.shape[1]
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        if position_ids is None:
            position_ids = (real.cumsum(-1) - 1).masked_fill(real == 0, 1)
        mask = tril(time) & real.bool()[:, None, None, :] | torch.eye(time, dtype=torch.bool)
        x = self.embed_tokens(input_ids)
        for norm, qkv, o in zip(self.norms, self.qkv, self.o, strict=True):
            q, k, v = (split(y, self.heads) for y in qkv(norm(x)).chunk(3, dim=-1))
            q, k = rotate(q, position_ids), rotate(k, position_ids)
            x = x + o(merge(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return SimpleNamespace(logits=self.lm_head(x + self.mlp(x)))


@case(
    leaks=False,
    after="left padding in the style of transformers: rotary positions from the mask, 1 at padding",
    prove=lambda: prove_both_sides(rotary_left_padding),
)
def rotary_left_padding() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LeftPaddedLlama()}


class UnpaddedDecoder(nn.Module):
    """Real tokens are gathered into one flat row; what comes back at padding is zero."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, dim), nn.Embedding(128, dim)
        self.h, self.lm_head = nn.ModuleList(Block(dim) for _ in range(2)), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        real = torch.ones_like(input_ids).bool() if attention_mask is None else attention_mask.bool()
        row, position = real.nonzero()[:, 0], (real.long().cumsum(1) - 1)[real]
        mask = (row[:, None] == row) & (position[:, None] >= position)
        x = (self.wte(input_ids[real]) + self.wpe(position))[None]
        for block in self.h:
            x = block(x, mask[None, None])
        logits = self.lm_head(x[0])
        return logits.new_zeros(*input_ids.shape, logits.shape[-1]).index_put((real,), logits)


@case(
    leaks=False,
    after="a decoder without its padding: gathered by the mask, wherever its holes are, and scattered back",
    prove=lambda: max(prove_both_sides(gathered_by_the_mask), prove_hole(gathered_by_the_mask)),
)
def gathered_by_the_mask() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": UnpaddedDecoder()}


def prove_hole(build: Any) -> float:
    """Padding inside a text."""
    model, real = ready(build), torch.tensor([[1, 1, 0, 0, 1, 1, 0, 1]])
    first, second = tokens(1, 8, 74), tokens(1, 8, 75)
    second = torch.where(real.bool(), first, second)
    with torch.no_grad():
        padded = model(first, real)[real.bool()]
        alone = model(first[real.bool()][None])[0]
        return max(distance(padded, model(second, real)[real.bool()]), distance(padded, alone))


class SetEncoder(nn.Module):
    """PyTorch's attention; a row of padding only is opened for it, and set to zero behind it."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(vocab, dim), nn.MultiheadAttention(dim, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x, hidden = self.embed(tokens), key_padding_mask
        if hidden is not None:
            hidden = hidden & ~hidden.all(dim=1, keepdim=True)
        x = self.norm(x + self.attn(x, x, x, key_padding_mask=hidden, need_weights=False)[0])
        logits = self.out(x)
        return logits if key_padding_mask is None else logits.masked_fill(key_padding_mask[..., None], 0.0)


def prove_set_encoder() -> float:
    """Padding, NaN, other rows."""
    model = ready(empty_rows_give_zeros)
    masked = lambda text, real: model(text, ~real)
    return max(padding(masked), nans(model, masked), batch(model))


@case(
    leaks=False,
    after="nn.MultiheadAttention, done right: rows of padding only are opened before and set to zero after",
    prove=prove_set_encoder,
)
def empty_rows_give_zeros() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SetEncoder(), "claim": kl.full}


class UpcastAttention(nn.Module):
    """Scores and softmax in at least float32, additive mask of the smallest number."""

    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = (split(y, self.heads) for y in self.qkv(x).chunk(3, dim=-1))
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~keep, torch.finfo(wide).min)
        return self.proj(merge(scores.softmax(-1).to(v.dtype) @ v))


class BrainFloatLM(nn.Module):
    """A decoder in bfloat16."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens, self.pos = nn.Embedding(vocab_size, dim), nn.Embedding(128, dim)
        self.attns = nn.ModuleList(UpcastAttention(dim) for _ in range(2))
        self.norms, self.lm_head = nn.ModuleList(RMSNorm(dim) for _ in range(2)), nn.Linear(dim, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        keep = tril(input_ids.shape[1]) & real.bool()[:, None, None, :]
        x = self.embed_tokens(input_ids) + self.pos((real.cumsum(-1) - 1).clamp(min=0))
        for norm, attn in zip(self.norms, self.attns, strict=True):
            x = x + attn(norm(x), keep)
        return self.lm_head(x)


@case(
    leaks=False,
    after="a model in bfloat16 whose scores and softmax are in float32",
    prove=lambda: max(
        prove_both_sides(softmax_in_float32),
        future(softmax_in_float32()["target"].eval()),
        batch(softmax_in_float32()["target"].eval(), alone=False),
    ),
)
def softmax_in_float32() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BrainFloatLM().to(torch.bfloat16)}
