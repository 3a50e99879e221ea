"""T5 v1.0 and v1.1, and mT5, which is v1.1 with a larger vocabulary."""

from __future__ import annotations

from typing import Any

from keepleft.models import presets
from keepleft.models.design import Design, Vocabulary
from keepleft.nn import sense
from keepleft.weights.families.gpt2 import output
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, fixed, same
from keepleft.weights.rules import Rule, joined, linear


def rules(design: Design) -> list[Rule]:
    out = [Rule("shared.weight", "token.weight"), output(design)]
    width = design.heads * design.head_width
    for stack in ("encoder", "decoder"):
        part, ours = f"{stack}.block.{{i}}.layer", f"{stack}.layers.{{i}}"
        feed = 2 if stack == "decoder" else 1
        out += [
            Rule(f"{stack}.embed_tokens.weight", "token.weight", twin=True),
            Rule(f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{stack}.nearness.weight"),
            *linear(f"{part}.0.layer_norm", f"{ours}.norm_self"),
            *joined(f"{part}.0.SelfAttention.{{}}", ("q", "k", "v"), f"{ours}.self.qkv", (width,) * 3),
            *linear(f"{part}.0.SelfAttention.o", f"{ours}.self.out"),
            *linear(f"{part}.{feed}.layer_norm", f"{ours}.norm_feed"),
            *linear(f"{part}.{feed}.DenseReluDense.wo", f"{ours}.feed.down"),
            *linear(f"{stack}.final_layer_norm", f"{stack}.norm"),
        ]
        if design.feedforward.gated:
            out += joined(f"{part}.{feed}.DenseReluDense.{{}}", ("wi_0", "wi_1"), f"{ours}.feed.up",
                          (design.feedforward.width,) * 2)
        else:
            out += linear(f"{part}.{feed}.DenseReluDense.wi", f"{ours}.feed.up")
    part, ours = "decoder.block.{i}.layer", "decoder.layers.{i}"
    return [
        *out,
        *linear(f"{part}.1.layer_norm", f"{ours}.norm_cross"),
        *linear(f"{part}.1.EncDecAttention.q", f"{ours}.cross.q"),
        *joined(f"{part}.1.EncDecAttention.{{}}", ("k", "v"), f"{ours}.cross.kv", (width,) * 2),
        *linear(f"{part}.1.EncDecAttention.o", f"{ours}.cross.out"),
    ]


def feed(word: str) -> tuple[str, bool]:
    """'relu', 'gated-gelu' …; a gated gelu has always been the tanh one."""
    name = word.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise ValueError(f"there are {', '.join(ACTIVATIONS)}, each also as 'gated-…'")
    return ("gelu_tanh" if word == "gated-gelu" else ACTIVATIONS[name]), word != name


def said(activation: str, gated: bool) -> str:
    if activation == "gelu_tanh":
        return "gated-gelu" if gated else "gelu_new"
    return f"gated-{activation}" if gated else activation


def settle(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Some programs write that the output is tied when it is not: the file decides. v1.0 alone scales its output."""
    for name in ("scale_decoder_outputs", "tie_word_embeddings"):
        if config.get(name) is not None:
            sense.flag(repr(name), config[name])
    scaled = config.pop("scale_decoder_outputs", None)
    tied = config.pop("tie_word_embeddings", None) is not False
    config.pop("is_gated_act", None), config.pop("dense_act_fn", None)
    scaled = (config.get("model_type") == "t5" and tied) if scaled is None else scaled
    return config | {"scale_decoder_outputs": scaled,
                     "tie_word_embeddings": "lm_head.weight" not in names if names else tied}


def family(name: str, cls: str, template: Design, heads: int, layers: int) -> Family:
    return Family(
        name,
        heads={f"{cls}ForConditionalGeneration": Vocabulary()},
        template=template,
        fields=[
            same("vocab_size", "vocab", template.vocab), same("d_model", "dim", 512), same("d_kv", "head_dim", 64),
            same("d_ff", "feedforward.width", template.feedforward.width), same("num_heads", "heads", heads),
            same("num_layers", "encoder.layers", layers),
            same("num_decoder_layers", "decoder.layers", lambda config: config.get("num_layers", layers)),
            same("relative_attention_num_buckets", "position.buckets", 32),
            same("relative_attention_max_distance", "position.farthest", 128),
            Field("dropout_rate", ("dropout", "attention_dropout"), 0.1, lambda rate: (rate, rate), lambda rate, _: rate),
            same("layer_norm_epsilon", "norm.eps", 1e-6),
            Field("feed_forward_proj", ("feedforward.activation", "feedforward.gated"),
                  "relu" if name == "t5" else "gated-gelu", feed, said),
            same("tie_word_embeddings", "head.tied", True), same("scale_decoder_outputs", "head.scale", True),
            fixed("is_decoder", False),
        ],
        prepare=settle,
        finish=lambda config, design: config | {"is_encoder_decoder": True, "d_kv": design.head_width},
        rules=rules,
    )


FAMILIES = (family("t5", "T5", presets.t5, 8, 6), family("mt5", "MT5", presets.mt5, 6, 8))
