"""GPT-Neo: GPT-2 with GPT-3's alternating masks, unscaled scores, and no bias on queries, keys and values."""

from __future__ import annotations

from typing import Any

from keepleft import checks
from keepleft.attention.masks import causal, is_causal_window, window, window_size
from keepleft.models import presets
from keepleft.models.design import ClassificationHead, Design, LMHead
from keepleft.weights.families.gpt2 import ffn_width, output_rule
from keepleft.weights.family import ACTIVATIONS, Family, repeating_masks
from keepleft.weights.fields import Field, choice_field, same_field
from keepleft.weights.rules import Rule, concat_rules, drop, linear

QKV_NAMES = ("q_proj", "k_proj", "v_proj")


def rules(design: Design) -> list[Rule]:
    block = "h.{i}"
    layer = "decoder.layers.{i}"
    return [
        Rule("wte.weight", "token.weight"),
        Rule("wpe.weight", "embed.position.weight"),
        *linear(f"{block}.ln_1", f"{layer}.norm_self"),
        *concat_rules(f"{block}.attn.attention.{{}}", QKV_NAMES, f"{layer}.self.qkv", (design.dim,) * 3),
        *linear(f"{block}.attn.attention.out_proj", f"{layer}.self.out"),
        *linear(f"{block}.ln_2", f"{layer}.norm_feed"),
        *linear(f"{block}.mlp.c_fc", f"{layer}.feed.up"),
        *linear(f"{block}.mlp.c_proj", f"{layer}.feed.down"),
        *linear("ln_f", "decoder.norm"),
        output_rule(design),
        Rule("score.weight", "head.out.weight", head=True),
        drop(f"{block}.attn.attention.bias"),
        drop(f"{block}.attn.attention.masked_bias"),
    ]


def read_layer_masks(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Replace attention types and window size by the masks that they mean."""
    attention_types = config.pop("attention_types", None) or [[["global", "local"], 12]]
    if not isinstance(attention_types, list) or not all(
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], list)
        and isinstance(entry[1], int)
        and entry[1] > 0
        for entry in attention_types
    ):
        raise ValueError(
            f"'attention_types' is {attention_types!r}: it must be such as [[['global', 'local'], 12]]"
        )
    count = sum(len(group) * repeats for group, repeats in attention_types)
    config.pop("attention_layers", None)
    layers = config.get("num_layers", 24)
    if layers is True or count != layers:
        raise ValueError(f"'attention_types' speaks of {count} layers and 'num_layers' of {layers!r}")
    layer_types = [
        layer_type for group, repeats in attention_types for _ in range(repeats) for layer_type in group
    ]
    size = config.pop("window_size", 256)
    checks.check_int("'window_size'", size)
    by_type = {"global": causal, "local": causal & window(size)}
    for layer_type in layer_types:
        if layer_type not in ("global", "local"):
            raise ValueError(
                f"'attention_types' has {layer_type!r}: only 'global' and 'local' are understood"
            )
    return config | {"masks": repeating_masks([by_type[layer_type] for layer_type in layer_types])}


def write_layer_masks(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """Replace masks by attention types and window size."""
    masks = config.pop("masks")
    if not all(map(is_causal_window, masks)):
        raise ValueError("GPT-Neo knows causal layers and causal & window layers only")
    layer_types = ["global" if mask == causal else "local" for mask in masks]
    layers = config["num_layers"]
    sizes = {window_size(mask) for mask in masks if mask != causal} or {256}
    if len(sizes) > 1:
        raise ValueError("GPT-Neo has one window for all local layers")
    repeats, rest = divmod(layers, len(layer_types))
    attention_types = [[layer_types, repeats]] + ([[layer_types[:rest], 1]] if rest else [])
    return config | {
        "attention_types": attention_types,
        "window_size": sizes.pop(),
        "attention_layers": [layer_types[n % len(layer_types)] for n in range(layers)],
    }


FAMILY = Family(
    "gpt_neo",
    heads={"GPTNeoForCausalLM": LMHead(), "GPTNeoModel": None, "GPTNeoForSequenceClassification": "labels"},
    classifier=ClassificationHead(2, "last", bias=False),
    template=presets.gpt_neo,
    prefix="transformer.",
    unprefixed_classes=frozenset({"GPTNeoModel"}),
    fields=[
        same_field("vocab_size", "vocab", 50_257),
        same_field("hidden_size", "dim", 2048),
        same_field("num_layers", "decoder.layers", 24),
        Field("masks", "decoder.mask"),
        same_field("num_heads", "heads", 16),
        same_field("max_position_embeddings", "position.length", 2048),
        ffn_width("intermediate_size", "hidden_size", 2048),
        choice_field("activation_function", "feedforward.activation", ACTIVATIONS, "gelu_new"),
        same_field("resid_dropout", "dropout", 0.0),
        same_field("embed_dropout", "dropout", lambda config: config.get("resid_dropout", 0.0)),
        same_field("attention_dropout", "attention_dropout", 0.0),
        same_field("layer_norm_epsilon", "norm.eps", 1e-5),
        same_field("tie_word_embeddings", "head.tied", True),
    ],
    prepare=read_layer_masks,
    finish=write_layer_masks,
    rules=rules,
)
