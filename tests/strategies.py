"""Hypothesis strategies. Sizes are distinct primes, so that a mixed-up axis cannot hide."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import strategies as st

import keepleft as kl
from keepleft import (
    FeedForward,
    LayerNorm,
    LearnedPositions,
    RelativeBias,
    RMSNorm,
    Rotary,
    Sinusoidal,
    StackDesign,
    block,
    causal,
    full,
    prefix,
    window,
)

SIMPLE_MASKS = [full, causal, window(1), window(3), prefix(2), block(3)]
MASKS = st.recursive(
    st.sampled_from(SIMPLE_MASKS),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a: ~a, inner),
    ),
    max_leaves=5,
)
CAUSAL_MASKS = st.sampled_from(
    [(causal,), (causal & window(3),), (causal, causal & window(2)), (causal & window(4), causal)]
)

VOCAB, DIM, HEADS = 31, 24, 6


@st.composite
def segments(draw, rows: int, length: int, *, packed: bool = True) -> torch.Tensor:
    """(rows, length): packed sequences, padding before, between and behind them; no row is all padding."""
    out = []
    for _ in range(rows):
        row: list[int] = []
        number = 0
        while len(row) < length:
            pad = draw(st.integers(0, 2))
            size = draw(st.integers(1, length if not packed else 5))
            number += 1
            row += [0] * pad + [number] * size
            if not packed:
                row += [0] * length
        row = row[:length]
        out.append(row if any(row) else [1] * length)
    return torch.tensor(out)


@st.composite
def padding(draw, rows: int, length: int) -> torch.Tensor:
    """(rows, length): one sequence in each row, padded on the left, the right, or both."""
    out = []
    for _ in range(rows):
        size = draw(st.integers(1, length))
        left = draw(st.integers(0, length - size))
        out.append([0] * left + [1] * size + [0] * (length - left - size))
    return torch.tensor(out)


@st.composite
def designs(draw, kind: str | None = None) -> kl.Design:
    """Any small design that can be built."""
    kind = kind or draw(st.sampled_from(["encoder", "decoder", "both"]))
    masks = draw(CAUSAL_MASKS)
    layers = draw(st.integers(1, 3))
    stack = lambda mask: StackDesign(layers, mask, final_norm=draw(st.booleans()))
    rms = draw(st.booleans())
    encoder = None if kind == "decoder" else stack((full,))
    if kind == "both":  # an encoder unlike its decoder
        encoder = replace(
            encoder,
            heads=draw(st.sampled_from([None, 3, 12])),
            feedforward=draw(st.sampled_from([None, FeedForward(23, "relu")])),
        )
    return kl.Design(
        vocab=VOCAB,
        dim=DIM,
        heads=HEADS,
        kv_heads=draw(st.sampled_from([None, 1, 3])),
        head_dim=draw(st.sampled_from([None, 2, 10])),
        feedforward=FeedForward(
            29, draw(st.sampled_from(["relu", "gelu", "gelu_tanh", "silu"])), draw(st.booleans())
        ),
        position=draw(
            st.sampled_from(
                [
                    Sinusoidal(),
                    LearnedPositions(61),
                    LearnedPositions(61, first=2),
                    Rotary(100.0),
                    RelativeBias(8, 19),
                ]
            )
        ),
        norm=RMSNorm(1e-5) if rms else LayerNorm(),
        norm_first=draw(st.booleans()),
        encoder=encoder,
        decoder=None if kind == "encoder" else stack(masks),
        head=kl.LMHead(tied=draw(st.booleans()), bias=draw(st.booleans()), scale=draw(st.booleans())),
        bias=draw(st.booleans()),
        bias_qkv=draw(st.sampled_from([None, True, False])),
        scale_embedding=draw(st.booleans()),
        scale_scores=draw(st.booleans()),
        norm_embedding=draw(st.booleans()),
        token_types=draw(st.sampled_from([0, 2])) if kind == "encoder" else 0,
    )


def random_model(design: kl.Design) -> torch.nn.Module:
    """The model of a design, in float64, with every weight something other than its fresh value."""
    generator = torch.Generator().manual_seed(3)
    model = kl.build(design, dtype=torch.float64, generator=generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.4 if parameter.dim() > 1 else 1.0, generator=generator)
    return model.requires_grad_(False)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows * 1009 + length))
