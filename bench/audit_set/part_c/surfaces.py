"""Layouts, codebooks, distributions, losses alone, training steps."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from ..case import case
from ..proofs import feature_maker, future, rows
from .parts import VOCAB, Layer, MixerLM, SelfAttention, heads_last, honest, lower, mixers, own_and_later


class WordModel(nn.Module):
    """nn.TransformerEncoder wants (T, B, D) unless it is told otherwise."""

    def __init__(self, ninp: int = 16) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, ninp), nn.Embedding(128, ninp)
        layer = nn.TransformerEncoderLayer(ninp, 2, 32, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(ninp, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) + self.pos.weight[: tokens.size(1)]
        hidden = ~lower(x.size(0), x)
        return self.decoder(self.encoder(x, mask=hidden))


@case(
    leaks=True,
    kinds=("batch",),
    modules=("encoder", *(f"encoder.layers.{i}{rest}" for i in (0, 1) for rest in ("", ".self_attn"))),
    after="a common mistake: (B, T, D) for an nn.TransformerEncoder without batch_first",
    prove=lambda: rows(attention_over_rows, alone=False),
)
def attention_over_rows() -> dict[str, Any]:
    """Rows read the rows before them, with a causal mask of their number; time is never mixed."""
    torch.manual_seed(0)
    return {"target": WordModel()}


class ChannelsFirstNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.gain


class ConvBlock(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, dilation=dilation)
        self.norm, self.left = ChannelsFirstNorm(channels), 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(F.pad(self.norm(x), (self.left, 0))))


class ConvNeXtLM(nn.Module):
    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, channels)
        self.blocks = nn.Sequential(ConvBlock(channels, 1), ConvBlock(channels, 2))
        self.head = nn.Conv1d(channels, VOCAB, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens).transpose(1, 2)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("blocks.0.norm", "blocks.1.norm"),
    after="a common mistake: a layer norm over the last axis where that is time, in (B, C, T)",
    prove=lambda: future(norm_of_channels_first, lambda m, x: m(x).transpose(1, 2)),
)
def norm_of_channels_first() -> dict[str, Any]:
    """Causal convolutions to (B, V, T); each channel is normalised over all of time."""
    torch.manual_seed(0)
    return {"target": ConvNeXtLM()}


class FlatCodebookLM(nn.Module):
    """All codes in one sequence, as in MusicGen's flattening pattern."""

    def __init__(self, codebooks: int = 3, card: int = 20, dim: int = 16) -> None:
        super().__init__()
        self.codebooks, self.card = codebooks, card
        self.emb, self.place = nn.Embedding(codebooks * card, dim), nn.Embedding(512, dim)
        self.layers = nn.ModuleList(Layer(SelfAttention(dim), dim) for _ in range(2))
        self.linear = nn.Linear(dim, card)

    def flat(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(1, 2)

    def unflat(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.codebooks, -1)).transpose(1, 2)

    def forward(self, codes: Tensor) -> Tensor:
        offset = self.card * torch.arange(self.codebooks, device=codes.device)
        x = self.emb(self.flat(codes + offset))
        x = x + self.place.weight[: x.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.linear(self.unflat(x))


class TimeMajorCodebookLM(FlatCodebookLM):
    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    def unflat(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.codebooks))


def _codes(batch: int, length: int) -> Tensor:
    return torch.randint(0, 20, (batch, length, 3))


@case(
    leaks=True,
    kinds=("future",),
    modules=("", *(f"layers.{i}{rest}" for i in (0, 1) for rest in ("", ".mixer"))),
    after="a common mistake: codes flattened codebook after codebook, the second sees all of the first",
    prove=lambda: future(codebook_after_codebook, inputs=_codes),
)
def codebook_after_codebook() -> dict[str, Any]:
    """Codes (B, T, K) to (B, T, K, V): causal in one long sequence, in which codebooks follow each other."""
    torch.manual_seed(0)
    return {"target": FlatCodebookLM(), "example": _codes(2, 10), "vocab": 20}


@case(
    leaks=False,
    after="MusicGen's flattening pattern, done right: all codes of a time step, then those of the next",
    prove=lambda: honest(codebooks_step_by_step, inputs=_codes),
)
def codebooks_step_by_step() -> dict[str, Any]:
    """Codes (B, T, K) to (B, T, K, V): causal in one long sequence, in which time steps follow each other."""
    torch.manual_seed(0)
    return {"target": TimeMajorCodebookLM(), "example": _codes(2, 10), "vocab": 20}


class AlibiAttention(SelfAttention):
    def bias(self, t: int, like: Tensor) -> Tensor:
        step = torch.arange(t, device=like.device, dtype=like.dtype)
        slopes = 2.0 ** -torch.arange(1, self.heads + 1, device=like.device, dtype=like.dtype)
        return -(step[:, None] - step[None]).abs() * slopes[:, None, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        weights = (q @ k.mT / q.size(-1) ** 0.5 + self.bias(x.size(1), x)).softmax(dim=-1)
        return self.out(heads_last(weights @ v))


class CausalAlibiAttention(AlibiAttention):
    def bias(self, t: int, like: Tensor) -> Tensor:
        return super().bias(t, like).masked_fill(~lower(t, like), -torch.inf)


class AutoregressiveWrapper(nn.Module):
    """Tokens in, a loss out, as in lucidrains' packages."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        given, target = x[:, :-1], x[:, 1:]
        return F.cross_entropy(self.net(given).transpose(1, 2), target)


def _inner(model: Any, tokens: Tensor) -> Tensor:
    return model.net(tokens)


@case(
    leaks=True,
    kinds=("future",),
    modules=tuple(f"net.{name}" for name in mixers(2)),
    after="a common mistake: ALiBi with absolute distances (for encoders) and no mask",
    prove=lambda: future(loss_alone_with_alibi, _inner),
)
def loss_alone_with_alibi() -> dict[str, Any]:
    """A wrapper that takes tokens, shifts them and gives a loss; the net looks both ways."""
    torch.manual_seed(0)
    net = MixerLM(AlibiAttention(), AlibiAttention())
    return {"target": AutoregressiveWrapper(net), "example": torch.randint(VOCAB, (2, 13)), "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: ALiBi and a causal mask in one bias",
    prove=lambda: honest(loss_alone_with_mask, _inner),
)
def loss_alone_with_mask() -> dict[str, Any]:
    """A wrapper that takes tokens, shifts them and gives a loss; the net is causal."""
    torch.manual_seed(0)
    net = MixerLM(CausalAlibiAttention(), CausalAlibiAttention())
    return {"target": AutoregressiveWrapper(net), "example": torch.randint(VOCAB, (2, 13)), "vocab": VOCAB}


class Translator(nn.Module):
    """A Lightning module as it is often written: no forward, only steps."""

    bos = 1

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.encoder, self.decoder = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)
        self.criterion, self.generator = nn.CrossEntropyLoss(ignore_index=0), nn.Linear(dim, VOCAB)

    def decoder_input(self, target: Tensor) -> Tensor:
        return target

    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        _, state = self.encoder(self.embed(source))
        h, _ = self.decoder(self.embed(self.decoder_input(target)), state)
        return self.generator(h)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.logits(batch["source"], batch["labels"])
        return self.criterion(logits.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class ShiftingTranslator(Translator):
    def decoder_input(self, target: Tensor) -> Tensor:
        return torch.cat((torch.full_like(target[:, :1], self.bos), target[:, :-1]), dim=1)


def _translated(model: Any, target: Tensor) -> Tensor:
    return model.logits(torch.arange(2, 9).expand(target.size(0), -1), target)


def _pairs() -> tuple[dict[str, Tensor], int]:
    return {"source": torch.randint(2, VOCAB, (2, 7)), "labels": torch.randint(2, VOCAB, (2, 10))}, 0


@case(
    leaks=True,
    kinds=("future", "labels"),
    modules=("", "decoder", "embed", "generator"),
    after="a common mistake: teacher forcing without a shift, the decoder is fed what it is to predict",
    prove=lambda: future(step_feeds_its_targets, _translated, hidden=own_and_later),
)
def step_feeds_its_targets() -> dict[str, Any]:
    """A training step of source and labels: the decoder reads each label where it is predicted."""
    torch.manual_seed(0)
    return {"target": Translator(), "example": _pairs(), "vocab": VOCAB}


@case(
    leaks=False,
    after="a common mistake, done right: teacher forcing behind a start token",
    prove=lambda: honest(step_feeds_shifted_targets, _translated, hidden=own_and_later),
)
def step_feeds_shifted_targets() -> dict[str, Any]:
    """A training step of source and labels: the decoder reads the labels before."""
    torch.manual_seed(0)
    return {"target": ShiftingTranslator(), "example": _pairs(), "vocab": VOCAB}


class MixtureForecaster(nn.Module):
    def __init__(self, features: int = 3, hidden: int = 16, parts: int = 4) -> None:
        super().__init__()
        self.rnn, self.parts = nn.GRU(2 * features, hidden, batch_first=True), parts
        self.weights = nn.Linear(hidden, parts)
        self.loc, self.width = nn.Linear(hidden, parts * features), nn.Linear(hidden, parts * features)

    def forward(self, series: Tensor) -> MixtureSameFamily:
        high, low = series.cummax(dim=1).values, series.cummin(dim=1).values
        spread = (high - low).clamp(min=1e-2)
        h, _ = self.rnn(torch.cat(((series - low) / spread, spread.log()), dim=-1))
        loc, width = (f(h).unflatten(-1, (self.parts, -1)) for f in (self.loc, self.width))
        loc = loc * spread[..., None, :] + series[..., None, :]
        parts = Independent(Normal(loc, (F.softplus(width) + 1e-2) * spread[..., None, :]), 1)
        return MixtureSameFamily(Categorical(logits=self.weights(h)), parts)


def _mixture(model: Any, series: Tensor) -> Tensor:
    output = model(series)
    inner = output.component_distribution.base_dist
    values = (output.mixture_distribution.logits, inner.loc.flatten(2), inner.scale.flatten(2))
    return torch.cat(values, dim=-1)


@case(
    leaks=False,
    after="a common mistake, done right: minimum and maximum so far, instead of those of the series",
    prove=lambda: honest(mixture_of_the_past, _mixture, inputs=feature_maker(3)),
)
def mixture_of_the_past() -> dict[str, Any]:
    """Features (B, T, 3) to a mixture of normal distributions, scaled by the range so far."""
    torch.manual_seed(0)
    return {"target": MixtureForecaster(), "example": torch.randn(2, 12, 3)}
