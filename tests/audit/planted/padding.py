"""Outputs of real tokens that depend on padding, or on how much of it there is."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from audit.planted.case import Planted, seeded
from audit.planted.parts import (
    VOCAB,
    WIDTH,
    CapacityExperts,
    MaskedAttention,
    causal_mask,
    masked_softmax,
    random_tokens,
    sinusoidal_positions,
)


def all_real(tokens):
    """(B, T): all tokens are real."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


class Decoder(nn.Module):
    """Correct for padding on either side: causal, padding hidden, positions count real tokens only."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers or [MaskedAttention(), MaskedAttention()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def positions(self, real):
        return (real.long().cumsum(1) - 1).clamp(min=0)

    def seen(self, layer, real):
        """(B, 1, T, T): where the layer of this index may attend; padding at least to itself."""
        eye = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
        return real[:, None, None, :] & causal_mask(real.shape[1], real.device) | eye

    def forward(self, input_ids, attention_mask=None):
        real = all_real(input_ids) if attention_mask is None else attention_mask.bool()
        x = self.embed(input_ids)
        x = x + sinusoidal_positions(self.positions(real), WIDTH).to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = x + layer(x, self.seen(number, real))
        return self.head(self.norm(x))


class SecondLayerIgnores(Decoder):
    """The second layer gets the causal mask without the padding mask."""

    def seen(self, layer, real):
        return super().seen(layer, all_real(real) if layer == 1 else real)


class PositionsFromPadding(Decoder):
    """Padding is hidden, but positions count it."""

    def positions(self, real):
        return torch.arange(real.shape[1], device=real.device).expand(real.shape)


class SingleRowIgnores(Decoder):
    """A batch of one is taken for unpadded."""

    def seen(self, layer, real):
        return super().seen(layer, all_real(real) if len(real) == 1 else real)


class TrainingIgnores(Decoder):
    """Padding is hidden in eval mode only."""

    def seen(self, layer, real):
        return super().seen(layer, all_real(real) if self.training else real)


class FirstRowDecides(Decoder):
    """Where the first row has no padding, no row's padding is hidden."""

    def seen(self, layer, real):
        return super().seen(layer, all_real(real) if real[0].all() else real)


class Sink(Decoder):
    """The first column is an attention sink for every query, even where it is padding."""

    def seen(self, layer, real):
        seen = super().seen(layer, real).clone()
        if layer == 1:
            seen[..., 0] = True
        return seen


class MinusFive(MaskedAttention):
    """Padded keys get -5 instead of -inf."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) - 5.0 * (~seen[:, :, -1:, :]).to(x.dtype)
        y = masked_softmax(scores, causal_mask(length, x.device)) @ v
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class MaskAfterSoftmax(MaskedAttention):
    """Padded keys are zeroed after the softmax: they stay in the denominator."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = masked_softmax(
            q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), causal_mask(length, x.device)
        )
        y = (weights * seen[:, :, -1:, :].to(x.dtype)) @ v
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class CausalConv(nn.Module):
    """A causal convolution over (B, T, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x):
        return self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)


class ConvDecoder(nn.Module):
    """Convolutions with padding set to zero first, in every layer or in some."""

    def __init__(self, *zeroed: bool) -> None:
        super().__init__()
        self.zeroed = zeroed
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.convs = nn.ModuleList([CausalConv() for _ in zeroed])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        real = (all_real(input_ids) if attention_mask is None else attention_mask).to(self.head.weight.dtype)[
            ..., None
        ]
        x = self.embed(input_ids)
        for zeroed, conv in zip(self.zeroed, self.convs, strict=True):
            x = x + torch.tanh(conv(x * real if zeroed else x))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent network whose state is updated by padding on the left."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.rnn = nn.LSTM(11, 13, batch_first=True)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        x, _ = self.rnn(self.embed(input_ids))
        if attention_mask is not None:
            x = x * attention_mask[..., None].to(x.dtype)
        return self.head(x)


class Retention(nn.Module):
    """Linear attention that sums the values of padding too."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        k = torch.exp(self.k(x))
        return (k * self.v(x)).cumsum(1) / k.cumsum(1)


class TokenShift(nn.Module):
    """Reads the previous token, which is padding for the first real one."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, seen):
        return self.value(torch.cat([x, F.pad(x, (0, 0, 1, -1))], -1))


class Encoder(nn.Module):
    """Bidirectional over real tokens, without positions; `padding_mask` is True for padding."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([MaskedAttention(), MaskedAttention()])
        self.extra = extra[0] if extra else None
        self.head = nn.Linear(WIDTH, 3)

    def seen(self, layer, real):
        return real[:, None, None, :]

    def encode(self, tokens, real):
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            x = x + layer(x, self.seen(number, real))
            if number == 0 and self.extra is not None:
                x = self.extra(x * real[..., None].to(x.dtype))
        return self.head(x)

    def forward(self, tokens, padding_mask=None):
        return self.encode(tokens, all_real(tokens) if padding_mask is None else ~padding_mask)


class MeanPool(nn.Module):
    """The mean over all columns, padding included."""

    def forward(self, x):
        return x + x.mean(1, keepdim=True)


class MaxPool(nn.Module):
    """The maximum over all columns, where the zero of padding may be the largest."""

    def forward(self, x):
        return x + x.amax(1, keepdim=True)


class TimeNorm(nn.Module):
    """Mean and deviation over all columns, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class ColumnCountScale(nn.Module):
    """Scales by the number of columns."""

    def forward(self, x):
        return x * (4 / math.sqrt(x.shape[1]))


class WideConv(nn.Module):
    """A symmetric convolution; padding starts as zeros, but the bias of each layer fills it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x.transpose(1, 2)))).transpose(1, 2)


class Inverted(Encoder):
    """key_padding_mask is True for padding, but read as True for real tokens."""

    def forward(self, tokens, key_padding_mask=None):
        return self.encode(tokens, all_real(tokens) if key_padding_mask is None else key_padding_mask)


class LengthsOneTooLong(Encoder):
    """Lengths, read one too long."""

    def forward(self, tokens, lengths=None):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.encode(tokens, all_real(tokens) if lengths is None else at[None, :] <= lengths[:, None])


class Unpacked(nn.Module):
    """A bidirectional recurrent network whose backward direction starts in the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.rnn = nn.GRU(11, 7, batch_first=True, bidirectional=True)
        self.head = nn.Linear(14, 5)

    def forward(self, tokens, lengths=None):
        x, _ = self.rnn(self.embed(tokens))
        if lengths is not None:
            at = torch.arange(tokens.shape[1], device=tokens.device)
            x = x * (at[None, :] < lengths[:, None])[..., None].to(x.dtype)
        return self.head(x)


class Cross(nn.Module):
    """Cross-attention to the real tokens, `real` (B, K), of another sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, memory, real):
        scores = self.q(x) @ self.k(memory).transpose(1, 2) / math.sqrt(x.shape[-1])
        return masked_softmax(scores, real[:, None, :]) @ self.v(memory)


class Translator(nn.Module):
    """An encoder-decoder; the source's padding is hidden in the encoder, in cross-attention, or in both."""

    def __init__(self, encoder: bool, cross: bool) -> None:
        super().__init__()
        self.hide_encoder = encoder
        self.hide_cross = cross
        self.source = nn.Embedding(19, WIDTH)
        self.target = nn.Embedding(29, WIDTH)
        self.encoder = MaskedAttention()
        self.decoder = MaskedAttention()
        self.cross = Cross(WIDTH)
        self.head = nn.Linear(WIDTH, 29)

    def forward(self, src, tgt, src_key_padding_mask=None):
        x = self.source(src)
        y = self.target(tgt)
        all_of_it = all_real(src)
        real = all_of_it if src_key_padding_mask is None else ~src_key_padding_mask
        memory = x + self.encoder(x, (real if self.hide_encoder else all_of_it)[:, None, None, :])
        y = y + self.decoder(y, causal_mask(y.shape[1], y.device))
        return self.head(y + self.cross(y, memory, real if self.hide_cross else all_of_it))


def source_and_target():
    """A source without padding, and a target."""
    return {
        "src": random_tokens(2, 7, 19),
        "tgt": random_tokens(2, 11, 29),
        "src_key_padding_mask": torch.zeros(2, 7, dtype=torch.bool),
    }


def decoder(name, module, model=Decoder, *layers, also=()):
    return Planted(name, seeded(lambda: model(*[layer() for layer in layers])), "padding", module, also=also)


def encoder(name, module, model=Encoder, *extra):
    return Planted(name, seeded(lambda: model(*[part() for part in extra])), "padding", module, claim=kl.full)


PLANTED = [
    decoder("pads seen in the second layer", "layers.1", SecondLayerIgnores),
    decoder("positions counted from the pad", "", PositionsFromPadding),
    decoder("mask skipped for one row", "layers.0", SingleRowIgnores),
    decoder("pads hidden in eval only", "layers.0", TrainingIgnores),
    decoder("first row decides for all", "layers.0", FirstRowDecides, also=("batch",)),
    decoder("a pad as attention sink", "layers.1", Sink),
    decoder("pads at minus five", "layers.1", Decoder, MaskedAttention, MinusFive),
    decoder("pads in the denominator", "layers.0", Decoder, MaskAfterSoftmax, MaskedAttention),
    decoder("linear attention over pads", "layers.1", Decoder, MaskedAttention, Retention, MaskedAttention),
    decoder("token shift out of the pads", "layers.0", Decoder, TokenShift, MaskedAttention),
    decoder(
        "pads take the experts' places",
        "layers.1",
        Decoder,
        MaskedAttention,
        CapacityExperts,
        MaskedAttention,
    ),
    Planted("convolution over pads", seeded(lambda: ConvDecoder(False, True)), "padding", "convs.0"),
    Planted(
        "pads zeroed before the first convolution only",
        seeded(lambda: ConvDecoder(True, True, False)),
        "padding",
        "convs.2",
    ),
    Planted("state runs through left pads", seeded(Recurrent), "padding", "rnn"),
    encoder("mean over pads", "extra", Encoder, MeanPool),
    encoder("maximum over zeroed pads", "extra", Encoder, MaxPool),
    encoder("group norm over pads", "extra.norm", Encoder, TimeNorm),
    encoder("scale by the padded length", "extra", Encoder, ColumnCountScale),
    encoder("bias of a convolution in the pads", "extra.second", Encoder, WideConv),
    encoder("padding mask inverted", "layers.0", Inverted),
    encoder("lengths one too long", "layers.0", LengthsOneTooLong),
    encoder("bidirectional GRU from the pads", "rnn", Unpacked),
    Planted(
        "source pads seen in cross-attention",
        seeded(lambda: Translator(True, False), source_and_target),
        "padding",
        "cross",
    ),
    Planted(
        "source pads seen in the encoder",
        seeded(lambda: Translator(False, True), source_and_target),
        "padding",
        "encoder",
    ),
]
