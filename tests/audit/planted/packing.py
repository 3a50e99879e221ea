"""Leaks between the packed sequences of a row, and packed sequences that differ from themselves alone."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from audit.planted.case import Planted, seeded
from audit.planted.parts import (
    VOCAB,
    WIDTH,
    CapacityExperts,
    MaskedAttention,
    causal_mask,
    sinusoidal_positions,
)


def segment_starts(segments):
    """(B, T): where the sequence of each token begins."""
    at = torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)
    first = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return torch.where(first, at, 0).cummax(1).values


class Packed(nn.Module):
    """Correct for packed rows: causal inside each segment, and positions restart at 0."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(layers or [MaskedAttention(), MaskedAttention()])
        self.head = nn.Linear(WIDTH, VOCAB)

    def positions(self, segments):
        return torch.arange(segments.shape[1], device=segments.device) - segment_starts(segments)

    def seen(self, layer, segments):
        """(B, 1, T, T): where the layer of this index may attend."""
        return (
            (segments[:, :, None] == segments[:, None, :]) & causal_mask(segments.shape[1], segments.device)
        )[:, None]

    def forward(self, tokens, segment_ids=None):
        segments = torch.ones_like(tokens) if segment_ids is None else segment_ids
        x = self.embed(tokens)
        x = x + sinusoidal_positions(self.positions(segments), WIDTH).to(x.dtype)
        for number, layer in enumerate(self.layers):
            x = x + layer(x, self.seen(number, segments))
        return self.head(x)


class SegmentsIgnored(Packed):
    """Positions restart, but attention ignores segments."""

    def seen(self, layer, segments):
        return super().seen(layer, torch.ones_like(segments))


class LastLayerIgnores(Packed):
    """The last layer ignores segments."""

    def seen(self, layer, segments):
        return super().seen(layer, torch.ones_like(segments) if layer == len(self.layers) - 1 else segments)


class EvalIgnores(Packed):
    """Segments are applied in training only."""

    def seen(self, layer, segments):
        return super().seen(layer, segments if self.training else torch.ones_like(segments))


class PositionsNotReset(Packed):
    """Segments are applied, but positions do not restart."""

    def positions(self, segments):
        return torch.arange(segments.shape[1], device=segments.device).expand(segments.shape)


class SegmentsCompared(Packed):
    """Segments are compared with >=: a later sequence attends to all earlier ones."""

    def seen(self, layer, segments):
        later = segments[:, :, None] >= segments[:, None, :]
        return (
            (later & causal_mask(segments.shape[1], segments.device))[:, None]
            if layer == 1
            else super().seen(layer, segments)
        )


class BooleanSegments(Packed):
    """Segments become booleans before they are compared: 1, 2 and 3 are all True."""

    def seen(self, layer, segments):
        return super().seen(layer, segments.bool())


class AlternatingSegments(Packed):
    """Segments alternate between 0 and 1: the third sequence attends to the first."""

    def seen(self, layer, segments):
        return super().seen(layer, segments % 2)


class LateBoundary(Packed):
    """The boundary is one token late: the first token of a sequence belongs to the one before."""

    def seen(self, layer, segments):
        return super().seen(layer, torch.cat([segments[:, :1], segments[:, :-1]], 1))


class Sink(Packed):
    """The first token of the row is an attention sink for every sequence."""

    def seen(self, layer, segments):
        seen = super().seen(layer, segments).clone()
        if layer == 1:
            seen[..., 0] = True
        return seen


class Conv(nn.Module):
    """A causal convolution across boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)

    def forward(self, x, seen):
        return torch.tanh(self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))


class Shift(nn.Module):
    """Reads the previous token, across the boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x, seen):
        return x * self.mix + F.pad(x, (0, 0, 1, -1)) * (1 - self.mix)


class RunningMean(nn.Module):
    """The sum over the sequence so far, divided by the number of all tokens of the row so far."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        count = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)
        return (seen[:, 0].to(x.dtype) @ self.value(x)) / count[:, None]


class Scan(nn.Module):
    """A state-space scan that resets at boundaries, if it is given them."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(WIDTH))
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seq_idx=None):
        u = self.enter(x)
        state, states = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            if seq_idx is not None and t > 0:
                state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None].to(x.dtype)
            state = torch.sigmoid(self.decay) * state + u[:, t]
            states.append(state)
        return x + self.leave(torch.stack(states, 1))


class StateSpace(nn.Module):
    """Two scans, of which only the first is given the boundaries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.mixers = nn.ModuleList([Scan(), Scan()])
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids, seq_idx=None):
        x = self.mixers[0](self.embedding(input_ids), seq_idx)
        return {"logits": self.lm_head(self.mixers[1](x))}


class Recurrent(nn.Module):
    """A GRU that does not reset between sequences; only its embedding uses segments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 11)
        self.place = nn.Embedding(61, 11)
        self.rnn = nn.GRU(11, 13, batch_first=True)
        self.head = nn.Linear(13, VOCAB)

    def forward(self, tokens, doc_ids=None):
        doc_ids = torch.zeros_like(tokens) if doc_ids is None else doc_ids
        at = torch.arange(tokens.shape[1], device=tokens.device) - segment_starts(doc_ids)
        return self.head(self.rnn(self.embed(tokens) + self.place(at))[0])


class PositionsOnly(nn.Module):
    """Takes segments and positions, uses the positions, and forgets the segments."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.tok = nn.Embedding(29, width)
        self.place = nn.Embedding(67, width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, 29)

    def forward(self, input_ids, position_ids=None, segment_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.tok(input_ids) + self.place(position_ids)
        y, _ = self.attn(x, x, x, attn_mask=~causal_mask(x.shape[1], x.device), need_weights=False)
        return self.head(x + y)


def packed(name, module, model=Packed, *layers):
    return Planted(name, seeded(lambda: model(*[layer() for layer in layers])), "packing", module)


PLANTED = [
    packed("positions reset, attention open", "layers.0", SegmentsIgnored),
    packed(
        "last layer open", "layers.2", LastLayerIgnores, MaskedAttention, MaskedAttention, MaskedAttention
    ),
    packed("texts apart in training only", "layers.0", EvalIgnores),
    packed("positions not reset", "", PositionsNotReset),
    packed("segments compared with >=", "layers.1", SegmentsCompared),
    packed("segments compared as booleans", "layers.0", BooleanSegments),
    packed("segments told apart by one bit", "layers.0", AlternatingSegments),
    packed("border one token late", "layers.0", LateBoundary),
    packed("the row's first token as sink", "layers.1", Sink),
    packed("convolution over the border", "layers.1", Packed, MaskedAttention, Conv),
    packed("token shift over the border", "layers.0", Packed, Shift, MaskedAttention),
    packed("divided by the tokens of all texts", "layers.1", Packed, MaskedAttention, RunningMean),
    packed("texts share the experts' places", "layers.1", Packed, MaskedAttention, CapacityExperts),
    packed("state runs into the next text", "mixers.1", StateSpace),
    packed("GRU runs into the next text", "rnn", Recurrent),
    packed("segments forgotten, positions used", "attn", PositionsOnly),
]
