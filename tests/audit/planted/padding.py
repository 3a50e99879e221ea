"""Pads, or how many there are, move the outputs of real tokens."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

import keepleft as kl
from audit.planted.case import Planted, seeded
from audit.planted.parts import VOCAB, WIDTH, Crowded, Masked, ids, lower, soft, waves


def everything(tokens):
    """A mask that says all tokens (B, T) are real."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)


class Decoder(nn.Module):
    """Causal, right for pads on either side: they are hidden, and positions count real tokens only."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers or [Masked(), Masked()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def positions(self, real):
        return (real.long().cumsum(1) - 1).clamp(min=0)

    def seen(self, layer, real):
        """What the layer of this number may look at (B, 1, T, T); a pad sees at least itself."""
        eye = torch.eye(real.shape[1], dtype=torch.bool, device=real.device)
        return real[:, None, None, :] & lower(real.shape[1], real.device) | eye

    def forward(self, input_ids, attention_mask=None):
        real = everything(input_ids) if attention_mask is None else attention_mask.bool()
        x = self.embed(input_ids)
        x = x + waves(self.positions(real), WIDTH).to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = x + layer(x, self.seen(number, real))
        return self.head(self.norm(x))


class SecondLayerOpen(Decoder):
    """The second layer gets the triangle without the pads."""

    def seen(self, layer, real):
        return super().seen(layer, everything(real) if layer == 1 else real)


class FromThePad(Decoder):
    """Pads are hidden, but positions are counted from the first pad."""

    def positions(self, real):
        return torch.arange(real.shape[1], device=real.device).expand(real.shape)


class AloneOpen(Decoder):
    """A batch of one is taken for unpadded."""

    def seen(self, layer, real):
        return super().seen(layer, everything(real) if len(real) == 1 else real)


class TrainingOpen(Decoder):
    """Pads are hidden in eval() only."""

    def seen(self, layer, real):
        return super().seen(layer, everything(real) if self.training else real)


class FirstRowDecides(Decoder):
    """If the first row has no pads, nobody's are hidden."""

    def seen(self, layer, real):
        return super().seen(layer, everything(real) if real[0].all() else real)


class Sink(Decoder):
    """The first column is a sink that everyone sees, even where it is a pad."""

    def seen(self, layer, real):
        seen = super().seen(layer, real).clone()
        if layer == 1:
            seen[..., 0] = True
        return seen


class Faint(Masked):
    """Pads get minus five instead of minus infinity."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) - 5.0 * (~seen[:, :, -1:, :]).to(x.dtype)
        y = soft(scores, lower(length, x.device)) @ v
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class LateMask(Masked):
    """Pads are multiplied away after the softmax: they stay in the denominator."""

    def forward(self, x, seen):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = soft(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), lower(length, x.device))
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
    """Convolutions for which pads are made zero, in every layer or in some."""

    def __init__(self, *zeroed: bool) -> None:
        super().__init__()
        self.zeroed = zeroed
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.convs = nn.ModuleList([CausalConv() for _ in zeroed])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, attention_mask=None):
        real = (everything(input_ids) if attention_mask is None else attention_mask).to(
            self.head.weight.dtype
        )[..., None]
        x = self.embed(input_ids)
        for zeroed, conv in zip(self.zeroed, self.convs, strict=True):
            x = x + torch.tanh(conv(x * real if zeroed else x))
        return self.head(x)


class Recurrent(nn.Module):
    """A recurrent network whose state runs through the pads on the left."""

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
    """Linear attention that adds up the pads' values too."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(WIDTH, WIDTH)
        self.v = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        k = torch.exp(self.k(x))
        return (k * self.v(x)).cumsum(1) / k.cumsum(1)


class TokenShift(nn.Module):
    """Reads the token before, which is a pad for the first real one."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, seen):
        return self.value(torch.cat([x, F.pad(x, (0, 0, 1, -1))], -1))


class Encoder(nn.Module):
    """Everyone sees every real token; `padding_mask` is True for pads. No positions."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Masked(), Masked()])
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
        return self.encode(tokens, everything(tokens) if padding_mask is None else ~padding_mask)


class MeanPool(nn.Module):
    """The mean over all columns, pads included."""

    def forward(self, x):
        return x + x.mean(1, keepdim=True)


class MaxPool(nn.Module):
    """The maximum over all columns, where a pad's zero may win."""

    def forward(self, x):
        return x + x.amax(1, keepdim=True)


class TimeNorm(nn.Module):
    """Mean and deviation over all columns, pads included."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Spread(nn.Module):
    """A scale that knows how many columns there are."""

    def forward(self, x):
        return x * (4 / math.sqrt(x.shape[1]))


class WideConv(nn.Module):
    """Looks at both neighbours; the pads' zeros are honest, but then its own bias fills them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))

    def forward(self, x):
        return x + self.second(torch.relu(self.first(x.transpose(1, 2)))).transpose(1, 2)


class Inverted(Encoder):
    """key_padding_mask is True for pads, and is read as True for real."""

    def forward(self, tokens, key_padding_mask=None):
        return self.encode(tokens, everything(tokens) if key_padding_mask is None else key_padding_mask)


class OneTooMany(Encoder):
    """Lengths, read one too long."""

    def forward(self, tokens, lengths=None):
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.encode(tokens, everything(tokens) if lengths is None else at[None, :] <= lengths[:, None])


class Unpacked(nn.Module):
    """A recurrent network from both ends; the way back starts in the pads."""

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
    """Attention from one text to another, over what `real` (B, K) says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x, memory, real):
        scores = self.q(x) @ self.k(memory).transpose(1, 2) / math.sqrt(x.shape[-1])
        return soft(scores, real[:, None, :]) @ self.v(memory)


class Translator(nn.Module):
    """Encoder and decoder; the source's pads are hidden in the encoder, in cross-attention or in both."""

    def __init__(self, encoder: bool, cross: bool) -> None:
        super().__init__()
        self.hide_encoder = encoder
        self.hide_cross = cross
        self.source = nn.Embedding(19, WIDTH)
        self.target = nn.Embedding(29, WIDTH)
        self.encoder = Masked()
        self.decoder = Masked()
        self.cross = Cross(WIDTH)
        self.head = nn.Linear(WIDTH, 29)

    def forward(self, src, tgt, src_key_padding_mask=None):
        x = self.source(src)
        y = self.target(tgt)
        all_of_it = everything(src)
        real = all_of_it if src_key_padding_mask is None else ~src_key_padding_mask
        memory = x + self.encoder(x, (real if self.hide_encoder else all_of_it)[:, None, None, :])
        y = y + self.decoder(y, lower(y.shape[1], y.device))
        return self.head(y + self.cross(y, memory, real if self.hide_cross else all_of_it))


def texts():
    """A source without pads, and a target."""
    return {
        "src": ids(2, 7, 19),
        "tgt": ids(2, 11, 29),
        "src_key_padding_mask": torch.zeros(2, 7, dtype=torch.bool),
    }


def decoder(name, module, model=Decoder, *layers, also=()):
    return Planted(name, seeded(lambda: model(*[layer() for layer in layers])), "padding", module, also=also)


def encoder(name, module, model=Encoder, *extra):
    return Planted(name, seeded(lambda: model(*[part() for part in extra])), "padding", module, claim=kl.full)


PLANTED = [
    decoder("pads seen in the second layer", "layers.1", SecondLayerOpen),
    decoder("positions counted from the pad", "", FromThePad),
    decoder("mask skipped for one row", "layers.0", AloneOpen),
    decoder("pads hidden in eval only", "layers.0", TrainingOpen),
    decoder("first row decides for all", "layers.0", FirstRowDecides, also=("batch",)),
    decoder("a pad as attention sink", "layers.1", Sink),
    decoder("pads at minus five", "layers.1", Decoder, Masked, Faint),
    decoder("pads in the denominator", "layers.0", Decoder, LateMask, Masked),
    decoder("linear attention over pads", "layers.1", Decoder, Masked, Retention, Masked),
    decoder("token shift out of the pads", "layers.0", Decoder, TokenShift, Masked),
    decoder("pads take the experts' places", "layers.1", Decoder, Masked, Crowded, Masked),
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
    encoder("scale by the padded length", "extra", Encoder, Spread),
    encoder("bias of a convolution in the pads", "extra.second", Encoder, WideConv),
    encoder("padding mask inverted", "layers.0", Inverted),
    encoder("lengths one too long", "layers.0", OneTooMany),
    encoder("bidirectional GRU from the pads", "rnn", Unpacked),
    Planted(
        "source pads seen in cross-attention",
        seeded(lambda: Translator(True, False), texts),
        "padding",
        "cross",
    ),
    Planted(
        "source pads seen in the encoder",
        seeded(lambda: Translator(False, True), texts),
        "padding",
        "encoder",
    ),
]
