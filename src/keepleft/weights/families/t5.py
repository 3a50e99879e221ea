"""T5 v1.0 and v1.1, and mT5, which is v1.1 with a larger vocabulary."""

from __future__ import annotations

from typing import Any

from keepleft import checks
from keepleft.models import presets
from keepleft.models.design import Design, LMHead
from keepleft.weights.families.gpt2 import output_rule
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, fixed_field, same_field
from keepleft.weights.rules import Rule, concat_rules, linear


def rules(design: Design) -> list[Rule]:
    size = design.heads * design.head_width
    out = [Rule("shared.weight", "token.weight"), output_rule(design)]
    for stack, ffn_index in (("encoder", 1), ("decoder", 2)):
        attention = f"{stack}.block.{{i}}.layer.0"
        ffn = f"{stack}.block.{{i}}.layer.{ffn_index}"
        layer = f"{stack}.layers.{{i}}"
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        out += [
            Rule(f"{stack}.embed_tokens.weight", "token.weight", tied=True),
            Rule(bias, f"{stack}.nearness.weight"),
            *linear(f"{attention}.layer_norm", f"{layer}.norm_self"),
            *concat_rules(
                f"{attention}.SelfAttention.{{}}", ("q", "k", "v"), f"{layer}.self.qkv", (size,) * 3
            ),
            *linear(f"{attention}.SelfAttention.o", f"{layer}.self.out"),
            *linear(f"{ffn}.layer_norm", f"{layer}.norm_feed"),
            *up_rules(design, f"{ffn}.DenseReluDense", f"{layer}.feed.up"),
            *linear(f"{ffn}.DenseReluDense.wo", f"{layer}.feed.down"),
            *linear(f"{stack}.final_layer_norm", f"{stack}.norm"),
        ]
    cross = "decoder.block.{i}.layer.1"
    layer = "decoder.layers.{i}"
    return [
        *out,
        *linear(f"{cross}.layer_norm", f"{layer}.norm_cross"),
        *linear(f"{cross}.EncDecAttention.q", f"{layer}.cross.q"),
        *concat_rules(f"{cross}.EncDecAttention.{{}}", ("k", "v"), f"{layer}.cross.kv", (size,) * 2),
        *linear(f"{cross}.EncDecAttention.o", f"{layer}.cross.out"),
    ]


def up_rules(design: Design, checkpoint_name: str, param_name: str) -> list[Rule]:
    """One matrix, or gate and up where the feed-forward layer is gated."""
    if not design.feedforward.gated:
        return linear(f"{checkpoint_name}.wi", param_name)
    sizes = (design.feedforward.width,) * 2
    return concat_rules(f"{checkpoint_name}.{{}}", ("wi_0", "wi_1"), param_name, sizes)


def parse_ffn(feed_forward_proj: str) -> tuple[str, bool]:
    """Activation and gating of 'relu', 'gated-gelu' …; a gated gelu has always been the tanh one."""
    name = feed_forward_proj.removeprefix("gated-")
    if name not in ACTIVATIONS:
        raise ValueError(f"there are {', '.join(ACTIVATIONS)}, each also as 'gated-…'")
    activation = "gelu_tanh" if feed_forward_proj == "gated-gelu" else ACTIVATIONS[name]
    return activation, feed_forward_proj != name


def format_ffn(activation: str, gated: bool) -> str:
    if activation == "gelu_tanh":
        return "gated-gelu" if gated else "gelu_new"
    return f"gated-{activation}" if gated else activation


def resolve_tied_output(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Some programs write that the output is tied when it is not: the file decides.

    v1.0 alone scales its output.
    """
    for name in ("scale_decoder_outputs", "tie_word_embeddings"):
        if config.get(name) is not None:
            checks.check_bool(repr(name), config[name])
    scale_outputs = config.get("scale_decoder_outputs")
    tied = config.get("tie_word_embeddings") is not False
    for name in ("is_gated_act", "dense_act_fn"):  # follow from feed_forward_proj
        config.pop(name, None)
    if scale_outputs is None:
        scale_outputs = config.get("model_type") == "t5" and tied
    return config | {
        "scale_decoder_outputs": scale_outputs,
        "tie_word_embeddings": "lm_head.weight" not in names if names else tied,
    }


def family(name: str, cls: str, template: Design, heads: int, layers: int) -> Family:
    # fmt: off
    return Family(
        name,
        heads={f"{cls}ForConditionalGeneration": LMHead()},
        template=template,
        fields=[
            same_field("vocab_size", "vocab", template.vocab),
            same_field("d_model", "dim", 512),
            same_field("d_kv", "head_dim", 64),
            same_field("d_ff", "feedforward.width", template.feedforward.width),
            same_field("num_heads", "heads", heads),
            same_field("num_layers", "encoder.layers", layers),
            same_field("num_decoder_layers", "decoder.layers",
                       lambda config: config.get("num_layers", layers)),
            same_field("relative_attention_num_buckets", "position.buckets", 32),
            same_field("relative_attention_max_distance", "position.farthest", 128),
            Field("dropout_rate", ("dropout", "attention_dropout"), 0.1,
                  lambda rate: (rate, rate), lambda rate, _: rate),
            same_field("layer_norm_epsilon", "norm.eps", 1e-6),
            Field("feed_forward_proj", ("feedforward.activation", "feedforward.gated"),
                  "relu" if name == "t5" else "gated-gelu", parse_ffn, format_ffn),
            same_field("tie_word_embeddings", "head.tied", True),
            same_field("scale_decoder_outputs", "head.scale", True),
            fixed_field("is_decoder", False),
        ],
        prepare=resolve_tied_output,
        finish=lambda config, design: config | {"is_encoder_decoder": True, "d_kv": design.head_width},
        rules=rules,
    )
    # fmt: on


FAMILIES = (family("t5", "T5", presets.t5, 8, 6), family("mt5", "MT5", presets.mt5, 6, 8))
