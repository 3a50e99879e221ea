"""One design per published model. `kl.presets.gpt2.but(dim=64)` is a smaller one of the same kind."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from keepleft.attention.masks import causal, full, window
from keepleft.models.design import (
    Design,
    LMHead,
    MaskedLMHead,
    NormalInit,
    PoolingHead,
    StackDesign,
    T5Init,
    XavierInit,
)
from keepleft.nn.feedforward import FeedForward
from keepleft.nn.norm import LayerNorm, RMSNorm
from keepleft.nn.position import LearnedPositions, Llama3RopeScaling, RelativeBias, Rotary, Sinusoidal

# the 2017 Transformer: Vaswani et al., "Attention Is All You Need", table 3 --------------------

vaswani = Design(
    vocab=37_000,
    dim=512,
    heads=8,
    feedforward=FeedForward(2048, "relu"),
    position=Sinusoidal(),
    norm=LayerNorm(),
    norm_first=False,
    scale_embedding=True,
    initial=XavierInit(),
    encoder=StackDesign(6, (full,), final_norm=False),
    decoder=StackDesign(6, (causal,), final_norm=False),
)
vaswani_big = vaswani.but(dim=1024, heads=16, feedforward=FeedForward(4096, "relu"), dropout=0.3)

# OpenAI's decoders ----------------------------------------------------------------------------

gpt = Design(
    vocab=40_478,
    dim=768,
    heads=12,
    feedforward=FeedForward(3072, "gelu_tanh"),
    position=LearnedPositions(512),
    norm=LayerNorm(),
    norm_first=False,
    attention_dropout=0.1,
    decoder=StackDesign(12, (causal,), final_norm=False),
)

gpt2 = gpt.but(
    vocab=50_257,
    position=LearnedPositions(1024),
    norm_first=True,
    decoder=StackDesign(12, (causal,)),
    initial=NormalInit(0.02, by_depth=True),
)
gpt2_medium = gpt2.but(
    dim=1024, heads=16, feedforward=FeedForward(4096, "gelu_tanh"), decoder=StackDesign(24, (causal,))
)
gpt2_large = gpt2.but(
    dim=1280, heads=20, feedforward=FeedForward(5120, "gelu_tanh"), decoder=StackDesign(36, (causal,))
)
gpt2_xl = gpt2.but(
    dim=1600, heads=25, feedforward=FeedForward(6400, "gelu_tanh"), decoder=StackDesign(48, (causal,))
)


def _gpt3(layers: int, dim: int, heads: int, head_dim: int) -> Design:
    """Table 2.1 of Brown et al.; "alternating dense and locally banded sparse", the band as in GPT-Neo."""
    return gpt2.but(
        dim=dim,
        heads=heads,
        head_dim=head_dim,
        feedforward=FeedForward(4 * dim, "gelu_tanh"),
        position=LearnedPositions(2048),
        decoder=StackDesign(layers, (causal, causal & window(256))),
        dropout=0.0,
        attention_dropout=0.0,
    )


gpt3_small = _gpt3(12, 768, 12, 64)
gpt3_medium = _gpt3(24, 1024, 16, 64)
gpt3_large = _gpt3(24, 1536, 16, 96)
# the table prints 24 heads, which with head_dim 128 would make 1.5 B weights, not its 1.3 B
gpt3_xl = _gpt3(24, 2048, 16, 128)
gpt3_2_7b = _gpt3(32, 2560, 32, 80)
gpt3_6_7b = _gpt3(32, 4096, 32, 128)
gpt3_13b = _gpt3(40, 5140, 40, 128)  # 5140 as printed, though 40 heads of 128 make 5120
gpt3 = _gpt3(96, 12_288, 96, 128)

gpt_neo = gpt3_xl.but(scale_scores=False, bias_qkv=False, initial=NormalInit())  # EleutherAI's, 1.3 B

# LLaMA and its descendants --------------------------------------------------------------------


def _swiglu(width: int) -> FeedForward:
    return FeedForward(width, "silu", gated=True)


llama = Design(
    vocab=32_000,
    dim=4096,
    heads=32,
    feedforward=_swiglu(11_008),
    position=Rotary(),
    norm=RMSNorm(1e-6),
    norm_first=True,
    bias=False,
    head=LMHead(tied=False),
    dropout=0.0,
    decoder=StackDesign(32, (causal,)),
)
llama_13b = llama.but(dim=5120, heads=40, feedforward=_swiglu(13_824), decoder=StackDesign(40, (causal,)))
llama_33b = llama.but(dim=6656, heads=52, feedforward=_swiglu(17_920), decoder=StackDesign(60, (causal,)))
llama_65b = llama.but(dim=8192, heads=64, feedforward=_swiglu(22_016), decoder=StackDesign(80, (causal,)))

llama2 = llama.but(norm=RMSNorm(1e-5), position=Rotary(length=4096))
llama2_13b = llama_13b.but(norm=RMSNorm(1e-5), position=Rotary(length=4096))
llama2_70b = llama_65b.but(
    norm=RMSNorm(1e-5), position=Rotary(length=4096), kv_heads=8, feedforward=_swiglu(28_672)
)

llama3 = llama2.but(vocab=128_256, kv_heads=8, feedforward=_swiglu(14_336), position=Rotary(500_000.0, 8192))
llama3_70b = llama3.but(dim=8192, heads=64, feedforward=_swiglu(28_672), decoder=StackDesign(80, (causal,)))
llama3_1 = llama3.but(position=Rotary(500_000.0, 131_072, Llama3RopeScaling()))
llama3_1_405b = llama3_1.but(
    dim=16_384, heads=128, feedforward=_swiglu(53_248), decoder=StackDesign(126, (causal,))
)
llama3_2_1b = llama3_1.but(
    dim=2048,
    head=LMHead(),
    feedforward=_swiglu(8192),
    decoder=StackDesign(16, (causal,)),
    position=Rotary(500_000.0, 131_072, Llama3RopeScaling(factor=32.0)),
)
llama3_2_3b = llama3_2_1b.but(dim=3072, heads=24, head_dim=128, decoder=StackDesign(28, (causal,)))

smollm2_135m = llama2.but(
    vocab=49_152,
    dim=576,
    heads=9,
    kv_heads=3,
    feedforward=_swiglu(1536),
    head=LMHead(),
    position=Rotary(100_000.0, 8192),
    decoder=StackDesign(30, (causal,)),
)
mistral = llama2.but(
    kv_heads=8,
    feedforward=_swiglu(14_336),
    position=Rotary(length=32_768),
    decoder=StackDesign(32, (causal & window(4096),)),
)
qwen2_0_5b = llama.but(
    vocab=151_936,
    dim=896,
    heads=14,
    kv_heads=2,
    feedforward=_swiglu(4864),
    bias_qkv=True,
    head=LMHead(),
    position=Rotary(1_000_000.0, 131_072),
    decoder=StackDesign(24, (causal,)),
)

# T5 and mT5 -----------------------------------------------------------------------------------


def _encoder_decoder(layers: int, final_norm: bool = True) -> dict[str, Any]:
    return {
        "encoder": StackDesign(layers, (full,), final_norm),
        "decoder": StackDesign(layers, (causal,), final_norm),
    }


def _geglu(width: int) -> FeedForward:
    return FeedForward(width, "gelu_tanh", gated=True)


t5 = Design(
    vocab=32_128,
    dim=512,
    heads=8,
    head_dim=64,
    feedforward=FeedForward(2048, "relu"),
    position=RelativeBias(),
    norm=RMSNorm(),
    norm_first=True,
    bias=False,
    scale_scores=False,
    head=LMHead(scale=True),
    attention_dropout=0.1,
    initial=T5Init(),
    **_encoder_decoder(6),
)
t5_base = t5.but(dim=768, heads=12, feedforward=FeedForward(3072, "relu"), **_encoder_decoder(12))
t5_large = t5.but(dim=1024, heads=16, feedforward=FeedForward(4096, "relu"), **_encoder_decoder(24))
t5_3b = t5_large.but(heads=32, head_dim=128, feedforward=FeedForward(16_384, "relu"))
t5_11b = t5_large.but(heads=128, head_dim=128, feedforward=FeedForward(65_536, "relu"))

t5_v1_1 = t5.but(
    heads=6, head_dim=64, feedforward=_geglu(1024), head=LMHead(tied=False), **_encoder_decoder(8)
)
t5_v1_1_base = t5_v1_1.but(dim=768, heads=12, feedforward=_geglu(2048), **_encoder_decoder(12))
t5_v1_1_large = t5_v1_1.but(dim=1024, heads=16, feedforward=_geglu(2816), **_encoder_decoder(24))
t5_v1_1_xl = t5_v1_1.but(dim=2048, heads=32, feedforward=_geglu(5120), **_encoder_decoder(24))
t5_v1_1_xxl = t5_v1_1.but(dim=4096, heads=64, feedforward=_geglu(10_240), **_encoder_decoder(24))

mt5 = t5_v1_1.but(vocab=250_112)
mt5_base = t5_v1_1_base.but(vocab=250_112)
mt5_large = t5_v1_1_large.but(vocab=250_112)
mt5_xl = t5_v1_1_xl.but(vocab=250_112)
mt5_xxl = t5_v1_1_xxl.but(vocab=250_112)

# BART, Marian, Pegasus, BERT ---------------------------------------------------------------------------

bart = Design(
    vocab=50_265,
    dim=768,
    heads=12,
    feedforward=FeedForward(3072, "gelu"),
    position=LearnedPositions(1024, first=2),
    norm=LayerNorm(),
    norm_first=False,
    norm_embedding=True,
    head=LMHead(bias=True),
    **_encoder_decoder(6, False),
)
bart_large = bart.but(
    dim=1024, heads=16, feedforward=FeedForward(4096, "gelu"), **_encoder_decoder(12, False)
)

# opus-mt-en-de and the other OPUS-MT models
marian = vaswani.but(
    vocab=58_101,
    feedforward=FeedForward(2048, "silu"),
    position=Sinusoidal(512),
    head=LMHead(bias=True),
    initial=NormalInit(),
)

# Zhang et al. 2019, pegasus-large
pegasus = marian.but(
    vocab=96_103,
    dim=1024,
    heads=16,
    feedforward=FeedForward(4096, "relu"),
    position=Sinusoidal(1024),
    norm_first=True,
    **_encoder_decoder(16),
)

bert = Design(
    vocab=30_522,
    dim=768,
    heads=12,
    feedforward=FeedForward(3072, "gelu"),
    position=LearnedPositions(512),
    norm=LayerNorm(1e-12),
    norm_first=False,
    norm_embedding=True,
    token_types=2,
    attention_dropout=0.1,
    head=PoolingHead("tanh"),
    encoder=StackDesign(12, (full,), final_norm=False),
)
bert_large = bert.but(
    dim=1024,
    heads=16,
    feedforward=FeedForward(4096, "gelu"),
    encoder=StackDesign(24, (full,), final_norm=False),
)
bert_masked = bert.but(head=MaskedLMHead())


def small(design: Design) -> Design:
    """The same kind of model, small enough for a demonstration or a test."""
    stacks = {
        name: replace(stack, layers=2, heads=None, feedforward=None)
        for name in ("encoder", "decoder")
        if (stack := getattr(design, name))
    }
    return design.but(
        vocab=512,
        dim=64,
        heads=4,
        head_dim=None,
        kv_heads=2 if design.kv_heads else None,
        **stacks,
        feedforward=replace(design.feedforward, width=128),
    )


def __getattr__(name: str) -> Design:
    suggestions = get_close_matches(name, ALL, 3)
    hint = f"did you mean {' or '.join(suggestions)}?" if suggestions else f"there are {', '.join(ALL)}"
    raise AttributeError(f"no preset is called {name!r}: {hint}")


ALL: dict[str, Design] = {name: value for name, value in list(vars().items()) if isinstance(value, Design)}
