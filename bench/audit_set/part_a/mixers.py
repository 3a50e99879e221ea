"""Sequence models without attention: convolutions, scans, shifts, statistics, experts, pooling."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from audit_set.case import case
from audit_set.proofs import future, sweep

VOCAB = 50


class WaveBlock(nn.Module):
    def __init__(self, channels: int, dilation: int, kernel_size: int = 3) -> None:
        super().__init__()
        self.pad = (kernel_size - 1) * dilation
        self.conv = nn.Conv1d(channels, 2 * channels, kernel_size, padding=self.pad, dilation=dilation)
        self.skip = nn.Conv1d(channels, channels, 1)

    def crop(self, y: Tensor, t: int) -> Tensor:
        return y[:, :, -t:]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.crop(self.conv(x), x.size(-1)).chunk(2, dim=1)
        z = torch.tanh(a) * torch.sigmoid(b)
        return (x + z) * math.sqrt(0.5), self.skip(z)


class ChompBlock(WaveBlock):
    def crop(self, y: Tensor, t: int) -> Tensor:
        return y[:, :, :t].contiguous()


class WaveNet(nn.Module):
    def __init__(self, block: type[WaveBlock], channels: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, channels)
        self.blocks = nn.ModuleList(block(channels, 2**i) for i in range(3))
        self.final = nn.Sequential(nn.ReLU(), nn.Linear(channels, VOCAB))

    def forward(self, samples: Tensor) -> Tensor:
        x, total = self.embed(samples).transpose(1, 2), 0.0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.final(total.transpose(1, 2))


@case(
    leaks=True,
    kinds=("future",),
    modules=("blocks.0.conv", "blocks.1.conv", "blocks.2.conv", "blocks.0", "blocks.1", "blocks.2"),
    after="after r9y9/wavenet_vocoder #131 (which side of a convolution padded on both is cut off)",
    prove=lambda: future(convolution_cut_left),
)
def convolution_cut_left() -> dict[str, Any]:
    """Dilated convolutions padded on both sides, of which the last positions are kept, not the first."""
    torch.manual_seed(0)
    return {"target": WaveNet(WaveBlock)}


@case(
    leaks=False,
    after="after locuslab/TCN #8, done right: padded on both sides, then the right side is cut off",
    prove=lambda: sweep(convolution_cut_right),
)
def convolution_cut_right() -> dict[str, Any]:
    """Dilated convolutions with padding on both sides, of which the first positions are kept."""
    torch.manual_seed(0)
    return {"target": WaveNet(ChompBlock)}


class FFTConv(nn.Module):
    def __init__(self, dim: int, taps: int = 8) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(dim, taps) * 0.3)
        self.skip = nn.Parameter(torch.ones(dim))

    def size(self, t: int) -> int:
        return 1 << max(t - 1, self.filter.size(-1) - 1).bit_length()

    def forward(self, u: Tensor) -> Tensor:
        u = u.transpose(-1, -2)
        n = self.size(u.size(-1))
        wide = u if u.dtype == torch.float64 else u.float()
        spectrum = torch.fft.rfft(wide, n=n) * torch.fft.rfft(self.filter.to(wide.dtype), n=n)
        y = torch.fft.irfft(spectrum, n=n)[..., : u.size(-1)].to(u.dtype)
        return (y + u * self.skip[:, None]).transpose(-1, -2)


class LongConv(FFTConv):
    def __init__(self, dim: int, length: int = 96) -> None:
        super().__init__(dim, length)
        with torch.no_grad():
            self.filter.mul_(torch.exp(-torch.arange(length) / 16))

    def size(self, t: int) -> int:
        return t + self.filter.size(-1)


class GatedConvLM(nn.Module):
    def __init__(self, conv: type[FFTConv], dim: int = 16) -> None:
        super().__init__()
        self.backbone = nn.Embedding(VOCAB, dim)
        self.gate, self.conv, self.out = nn.Linear(dim, dim), conv(dim), nn.Linear(dim, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.backbone(input_ids)
        return self.out(self.conv(x) * F.silu(self.gate(x)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("conv",),
    after="after HazyResearch/safari #4 (without enough zeros a Fourier convolution is circular)",
    prove=lambda: future(fourier_size_power_of_two, lengths=(12, 16, 30, 32)),
)
def fourier_size_power_of_two() -> dict[str, Any]:
    """A transform of the next power of two: lengths just below one leave too little room for eight taps."""
    torch.manual_seed(0)
    return {"target": GatedConvLM(FFTConv)}


@case(
    leaks=False,
    after="after HazyResearch/safari #4, done right: a transform as long as input and filter together",
    prove=lambda: sweep(fourier_with_room, double=True),
)
def fourier_with_room() -> dict[str, Any]:
    """A long convolution by Fourier transform: later tokens move earlier outputs by rounding errors only."""
    torch.manual_seed(0)
    return {"target": GatedConvLM(LongConv)}


class ChunkedScan(nn.Module):
    def __init__(self, dim: int, chunk: int = 16) -> None:
        super().__init__()
        self.chunk = chunk
        self.in_proj, self.out_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.log_decay = nn.Parameter(torch.linspace(-0.5, -0.01, dim))

    def carry(self, final: Tensor) -> Tensor:
        """The state each chunk begins with, from the states the chunks end with."""
        decay = torch.exp(self.log_decay * self.chunk)
        state, states = final[:, 0], [final[:, 0]]
        for index in range(1, final.size(1)):
            state = decay * state + final[:, index]
            states.append(state)
        return torch.stack(states, dim=1).roll(1, dims=1)

    def forward(self, x: Tensor) -> Tensor:
        t, c = x.size(1), self.chunk
        u, b, g = F.pad(self.in_proj(x), (0, 0, 0, -t % c)).unflatten(1, (-1, c)).chunk(3, dim=-1)
        u = u * torch.sigmoid(b)
        step = torch.arange(c, device=x.device, dtype=x.dtype)
        kernel = torch.exp((step[:, None] - step[None]).clamp(min=0)[..., None] * self.log_decay)
        kernel = kernel * (step[:, None] >= step[None])[..., None]
        inside = torch.einsum("ijd,bnjd->bnid", kernel, u)
        if u.size(1) > 1:
            start = self.carry(inside[:, :, -1])
            inside = inside + torch.exp((step + 1)[:, None] * self.log_decay) * start[:, :, None]
        return self.out_proj((inside * F.silu(g)).flatten(1, 2)[:, :t])


class ExclusiveScan(ChunkedScan):
    def carry(self, final: Tensor) -> Tensor:
        states = super().carry(final)
        return torch.cat((torch.zeros_like(states[:, :1]), states[:, 1:]), dim=1)


class MixerLM(nn.Module):
    def __init__(self, *mixers: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.mixers = nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in mixers)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(x)


@case(
    leaks=True,
    kinds=("future",),
    modules=("mixers.0", "mixers.1"),
    after="a common mistake: a scan made exclusive by torch.roll, which wraps the last state around",
    prove=lambda: future(chunk_states_rolled, lengths=(18, 24, 33)),
)
def chunk_states_rolled() -> dict[str, Any]:
    """A state space scan in chunks of 16; the first chunk starts with the state after the last."""
    torch.manual_seed(0)
    return {"target": MixerLM(ChunkedScan(16), ChunkedScan(16))}


@case(
    leaks=False,
    after="a common mistake, done right: rolled chunk states whose first entry is cleared",
    prove=lambda: sweep(chunk_states_cleared),
)
def chunk_states_cleared() -> dict[str, Any]:
    """The same scan in chunks of 16: states are rolled too, but the first chunk starts with zero."""
    torch.manual_seed(0)
    return {"target": MixerLM(ExclusiveScan(16), ExclusiveScan(16))}


class ChannelMix(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.time_shift = nn.ZeroPad2d((0, 0, -1, 1))
        self.mix = nn.Parameter(torch.rand(1, 1, dim))
        self.key, self.receptance = nn.Linear(dim, hidden), nn.Linear(dim, dim)
        self.value = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        xx = self.time_shift(x)
        k = torch.relu(self.key(x * self.mix + xx * (1 - self.mix))) ** 2
        return torch.sigmoid(self.receptance(xx)) * self.value(k)


class RolledMix(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        half = x.size(-1) // 2
        before = torch.roll(x, shifts=1, dims=1)
        before[:, 0] = 0.0
        twice = torch.roll(x[..., :half], 2, 1)
        twice[:, :2] = 0.0
        return F.gelu(self.linear(torch.cat((before, twice, x[..., half:]), dim=-1)))


@case(
    leaks=True,
    kinds=("future",),
    modules=("mixers.0.time_shift", "mixers.1.time_shift", "mixers.0", "mixers.1"),
    after="a common mistake: RWKV's token shift, ZeroPad2d((0, 0, 1, -1)), with its signs swapped",
    prove=lambda: future(token_shift_forward),
)
def token_shift_forward() -> dict[str, Any]:
    """Channel mixing whose token shift brings the next token instead of the previous one."""
    torch.manual_seed(0)
    return {"target": MixerLM(ChannelMix(16, 32), ChannelMix(16, 32))}


@case(
    leaks=False,
    after="after x-transformers #208, done right: shifts by torch.roll, with what wraps around set to zero",
    prove=lambda: sweep(token_shift_by_roll),
)
def token_shift_by_roll() -> dict[str, Any]:
    """Token shifts of one and two by torch.roll, cleared in place at the start."""
    torch.manual_seed(0)
    return {"target": MixerLM(RolledMix(16), RolledMix(16))}


class ConvBNBlock(nn.Module):
    def __init__(self, channels: int, kernel: int = 4) -> None:
        super().__init__()
        self.pad = nn.ConstantPad1d((kernel - 1, 0), 0.0)
        self.conv, self.bn = nn.Conv1d(channels, channels, kernel), nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.relu(self.bn(self.conv(self.pad(x))))


class ConvStack(nn.Module):
    def __init__(self, *blocks: nn.Module, dim: int = 16) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(VOCAB, dim)
        self.encoder = nn.Sequential(*blocks)
        self.decoder = nn.Conv1d(dim, VOCAB, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.encoder(self.tok_emb(tokens).mT)).mT


@case(
    leaks=True,
    kinds=("future", "batch"),
    modules=("encoder.0.bn", "encoder.1.bn"),
    after="a common mistake: BatchNorm1d in a causal network (in training it spans time and rows)",
    prove=lambda: future(batch_norm_over_time, modes=("train",)),
)
def batch_norm_over_time() -> dict[str, Any]:
    """Causal convolutions with batch normalisation: causal in eval mode only."""
    torch.manual_seed(0)
    return {"target": ConvStack(ConvBNBlock(16), ConvBNBlock(16))}


class SeparableBlock(nn.Module):
    def __init__(self, channels: int, hidden: int, dilation: int) -> None:
        super().__init__()
        self.shape = nn.Conv1d(channels, hidden, 1)
        self.norm = nn.GroupNorm(1, hidden, eps=1e-8)
        self.depthwise = nn.Conv1d(hidden, hidden, 3, dilation=dilation, groups=hidden)
        self.pointwise = nn.Conv1d(hidden, channels, 1)
        self.left = 2 * dilation

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(F.relu(self.shape(x)))
        return x + self.pointwise(self.depthwise(F.pad(y, (self.left, 0))))


class CumulativeNorm(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.gain, self.bias = nn.Parameter(torch.ones(channels, 1)), nn.Parameter(torch.zeros(channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        count = x.size(1) * torch.arange(1, x.size(2) + 1, device=x.device, dtype=x.dtype)
        mean = x.sum(1).cumsum(-1) / count
        var = ((x.square().sum(1).cumsum(-1) / count) - mean.square()).clamp(min=0.0)
        return self.gain * (x - mean[:, None]) / (var[:, None] + self.eps).sqrt() + self.bias


@case(
    leaks=True,
    kinds=("future",),
    modules=("encoder.0.norm", "encoder.1.norm"),
    after="after Wan2.1 #294 (the statistics of GroupNorm span all of time)",
    prove=lambda: future(group_norm_over_time),
)
def group_norm_over_time() -> dict[str, Any]:
    """Conv-TasNet's block with causal convolutions and a global normalisation."""
    torch.manual_seed(0)
    return {"target": ConvStack(SeparableBlock(16, 24, 1), SeparableBlock(16, 24, 2))}


@case(
    leaks=False,
    after="after FullSubNet-plus #5, done right: Conv-TasNet's cumulative normalisation",
    prove=lambda: sweep(cumulative_norm),
)
def cumulative_norm() -> dict[str, Any]:
    """Statistics of time and channels, but of the positions up to each one only."""
    torch.manual_seed(0)
    blocks = [SeparableBlock(16, 24, 1), SeparableBlock(16, 24, 2)]
    for block in blocks:
        block.norm = CumulativeNorm(24)
    return {"target": ConvStack(*blocks)}


class ExpertChoice(nn.Module):
    def __init__(self, dim: int, experts: int = 4, capacity_factor: float = 1.0) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )
        self.capacity_factor = capacity_factor

    def forward(self, x: Tensor) -> Tensor:
        _, t, d = x.shape
        capacity = max(1, math.ceil(self.capacity_factor * t / len(self.experts)))
        affinity = self.router(x).softmax(dim=-1)
        gate, index = affinity.transpose(1, 2).topk(capacity, dim=-1)  # b e c
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            place = index[:, e, :, None].expand(-1, -1, d)
            y = y.scatter_add(1, place, gate[:, e, :, None] * expert(x.gather(1, place)))
        return y


class FirstComeExperts(nn.Module):
    def __init__(self, dim: int, experts: int = 3, capacity: int = 6) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(dim, experts), capacity
        self.up = nn.Parameter(torch.randn(experts, dim, 2 * dim) * dim**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * dim, dim) * (2 * dim) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        probability, choice = self.gate(x).softmax(-1).max(-1)  # b t
        one_hot = F.one_hot(choice, self.gate.out_features)
        place_in_line = (one_hot.cumsum(dim=1) * one_hot).sum(-1)
        kept = place_in_line <= self.capacity
        y = torch.zeros_like(x)
        for e in range(self.gate.out_features):
            mine = kept & (choice == e)
            served = F.gelu(x[mine] @ self.up[e]) @ self.down[e]
            y[mine] = (served * probability[mine, None]).to(y.dtype)
        return y


class CausalConvMixer(nn.Module):
    def __init__(self, dim: int, kernel: int = 5) -> None:
        super().__init__()
        self.conv, self.kernel = nn.Conv1d(dim, dim, kernel, groups=dim), kernel

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.conv(F.pad(x.mT, (self.kernel - 1, 0))).mT)


@case(
    leaks=True,
    kinds=("future",),
    modules=("mixers.1", "mixers.1.router"),
    after="after OLMoE #46 (experts that choose their tokens see the whole sequence)",
    prove=lambda: future(experts_choose_tokens),
)
def experts_choose_tokens() -> dict[str, Any]:
    """Each expert takes the best tokens of a row: whether an early token is taken depends on later ones."""
    torch.manual_seed(0)
    return {"target": MixerLM(CausalConvMixer(16), ExpertChoice(16))}


@case(
    leaks=False,
    after="after OLMoE #46, done right: tokens choose, and each expert serves the first six of a row",
    prove=lambda: sweep(experts_in_order, double=True),
)
def experts_in_order() -> dict[str, Any]:
    """A capacity that is first come, first served; experts multiply other numbers of tokens each time."""
    torch.manual_seed(0)
    return {"target": MixerLM(CausalConvMixer(16), FirstComeExperts(16))}


class Hourglass(nn.Module):
    def __init__(self, dim: int = 16, factor: int = 2) -> None:
        super().__init__()
        self.factor = factor
        self.embed, self.head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB)
        self.pre, self.middle, self.post = (CausalConvMixer(dim) for _ in range(3))
        self.merge = nn.Linear(factor * dim, dim)

    def shorten(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.size(1) % self.factor))

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.size(1)
        x = self.embed(tokens)
        x = x + self.pre(x)
        short = self.merge(self.shorten(x).unflatten(1, (-1, self.factor)).flatten(2))
        short = short + self.middle(short)
        x = x + short.repeat_interleave(self.factor, dim=1)[:, :t]
        return self.head(x + self.post(x))


class ShiftedHourglass(Hourglass):
    def shorten(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, self.factor - 1, 0))
        return F.pad(x, (0, 0, 0, -x.size(1) % self.factor))


@case(
    leaks=True,
    kinds=("future",),
    modules=("", "merge"),
    after="a common mistake: an hourglass that shortens without first shifting right by factor - 1",
    prove=lambda: future(hourglass_without_shift),
)
def hourglass_without_shift() -> dict[str, Any]:
    """Pairs of tokens are merged, and both halves of a pair get the result."""
    torch.manual_seed(0)
    return {"target": Hourglass()}


@case(
    leaks=False,
    after="a common mistake, done right: an hourglass that shifts right by factor - 1 before it shortens",
    prove=lambda: sweep(hourglass_with_shift),
)
def hourglass_with_shift() -> dict[str, Any]:
    """Groups of three are merged and copied to three positions, shifted so that none lies ahead."""
    torch.manual_seed(0)
    return {"target": ShiftedHourglass(factor=3)}


class RunningCodebook(nn.Module):
    def __init__(self, dim: int, codes: int = 12, decay: float = 0.8) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("counts", torch.ones(codes))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().flatten(0, 1)
        nearest = torch.cdist(flat, self.codebook.to(flat)).argmin(-1)
        if self.training:
            one_hot = F.one_hot(nearest, self.codebook.size(0)).to(flat)
            self.counts = self.decay * self.counts + (1 - self.decay) * one_hot.sum(0)
            mean = one_hot.T @ flat / one_hot.sum(0).clamp(min=1.0)[:, None]
            seen = one_hot.sum(0)[:, None] > 0
            new = self.decay * self.codebook + (1 - self.decay) * mean
            self.codebook = torch.where(seen, new, self.codebook.to(flat))
        quantised = self.codebook[nearest].view_as(x)
        return x + (quantised - x).detach()


class QuantisedLM(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.quantizer = RunningCodebook(dim)
        self.logits = nn.Linear(dim, VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.rnn(self.embedding(x))
        return self.logits(self.quantizer(h))


@case(
    leaks=True,
    kinds=("future", "batch"),
    modules=("quantizer",),
    after="a common mistake: a codebook's moving average is updated with the batch before it is looked up",
    prove=lambda: future(codebook_updated_first, modes=("train",), fresh=True),
)
def codebook_updated_first() -> dict[str, Any]:
    """In training, codes are moved towards all vectors of the batch, then used for the same batch."""
    torch.manual_seed(0)
    return {"target": QuantisedLM()}


class StackedLSTM(nn.Module):
    def __init__(self, ninp: int = 16, nhid: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, ninp)
        self.lower = nn.LSTM(ninp, nhid, batch_first=True)
        self.upper = nn.LSTM(nhid, nhid // 2, batch_first=True, bidirectional=True)
        self.decoder = nn.Linear(nhid, VOCAB)

    def forward(self, data: Tensor) -> Tensor:
        self.lower.flatten_parameters()
        hidden, _ = self.lower(self.encoder(data))
        hidden, _ = self.upper(hidden)
        return F.log_softmax(self.decoder(hidden).view(-1, VOCAB), dim=-1)


@case(
    leaks=True,
    kinds=("future",),
    modules=("upper",),
    after="a common mistake: a bidirectional layer in a language model, its output flattened for the loss",
    prove=lambda: future(upper_layer_both_ways, lambda m, x: m(x).unflatten(0, tuple(x.shape))),
)
def upper_layer_both_ways() -> dict[str, Any]:
    """An LSTM language model that returns (batch · time, vocabulary); its second layer runs both ways."""
    torch.manual_seed(0)
    return {"target": StackedLSTM()}


class SpatialGate(nn.Module):
    def __init__(self, dim: int, max_len: int = 96) -> None:
        super().__init__()
        self.max_len = max_len
        self.proj_in, self.norm = nn.Linear(dim, 2 * dim), nn.GroupNorm(4, dim)
        self.weight = nn.Parameter(torch.randn(max_len, max_len) * 0.1)
        self.bias, self.proj_out = nn.Parameter(torch.ones(max_len)), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        if t > self.max_len:
            raise ValueError(f"sequences of up to {self.max_len}, not {t}")
        u, v = F.gelu(self.proj_in(x)).chunk(2, dim=-1)
        v = self.norm(v.flatten(0, 1)).unflatten(0, (b, t))  # per position: time is in the batch axis
        v = torch.tril(self.weight[:t, :t]) @ v + self.bias[:t, None]
        return self.proj_out(u * v)


@case(
    leaks=False,
    after="a common mistake, done right: GroupNorm per position, and a lower triangle of weights over time",
    prove=lambda: sweep(spatial_gating),
)
def spatial_gating() -> dict[str, Any]:
    """A gated MLP over time with dense (T, T) weights cut to a triangle; longer inputs are refused."""
    torch.manual_seed(0)
    return {"target": MixerLM(SpatialGate(16), SpatialGate(16))}
