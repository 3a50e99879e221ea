"""LLaMA 1 to 3, SmolLM2, Mistral (a sliding window) and Qwen2 (biases on queries, keys and values)."""

from __future__ import annotations

from typing import Any

from keepleft import checks
from keepleft.attention.masks import Mask, causal, is_causal_window, window, window_size
from keepleft.models import presets
from keepleft.models.design import ClassificationHead, Design, LMHead
from keepleft.nn.position import LinearRopeScaling, Llama3RopeScaling
from keepleft.weights.families.gpt2 import output_rule
from keepleft.weights.family import ACTIVATIONS, Family, repeating_masks
from keepleft.weights.fields import Field, choice_field, same_field
from keepleft.weights.rules import Rule, concat_rules, drop, linear

QKV_NAMES = ("q_proj", "k_proj", "v_proj")
GATE_UP_NAMES = ("gate_proj", "up_proj")


def rules(design: Design) -> list[Rule]:
    block = "layers.{i}"
    layer = "decoder.layers.{i}"
    attention = design.attention
    kv_size = attention.kv_heads * attention.head_dim
    qkv_sizes = (attention.heads * attention.head_dim, kv_size, kv_size)
    up_sizes = (design.feedforward.width,) * 2
    return [
        Rule("embed_tokens.weight", "token.weight"),
        *linear(f"{block}.input_layernorm", f"{layer}.norm_self"),
        *concat_rules(f"{block}.self_attn.{{}}", QKV_NAMES, f"{layer}.self.qkv", qkv_sizes),
        *linear(f"{block}.self_attn.o_proj", f"{layer}.self.out"),
        *linear(f"{block}.post_attention_layernorm", f"{layer}.norm_feed"),
        *concat_rules(f"{block}.mlp.{{}}", GATE_UP_NAMES, f"{layer}.feed.up", up_sizes),
        *linear(f"{block}.mlp.down_proj", f"{layer}.feed.down"),
        *linear("norm", "decoder.norm"),
        output_rule(design),
        Rule("score.weight", "head.out.weight", head=True),
        drop(f"{block}.self_attn.rotary_emb.inv_freq"),  # of old files: a formula
    ]


def read_rope(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Replace RoPE settings, in old or new spelling, by base and scaling, and a sliding window by masks."""
    rope_parameters = config.pop("rope_parameters", None) or {}
    rope_scaling = config.pop("rope_scaling", None) or {}
    for name, value in (("rope_parameters", rope_parameters), ("rope_scaling", rope_scaling)):
        if not isinstance(value, dict):
            raise ValueError(
                f"{name!r} is {value!r}: it must be an object such as {{'rope_type': 'default'}}"
            )
    differ = rope_scaling | {"rope_theta": 0} != rope_parameters | {"rope_theta": 0}
    if rope_parameters and rope_scaling and differ:
        raise ValueError(f"'rope_parameters' {rope_parameters} and 'rope_scaling' {rope_scaling} differ")
    theta = config.pop("rope_theta", None)
    settings = rope_parameters or rope_scaling
    if theta is not None:
        positive_number({"rope_theta": theta}, "rope_theta")
        if settings.get("rope_theta", theta) != theta:
            raise ValueError(f"'rope_theta' is {theta} and 'rope_parameters' says {settings['rope_theta']}")
    base = positive_number({"rope_theta": 10_000.0 if theta is None else theta} | settings, "rope_theta")
    return config | {"base": base, "scaling": rope_scaling_config(settings), "masks": layer_masks(config)}


def layer_masks(config: dict[str, Any]) -> tuple[Mask, ...]:
    """The masks that the layers take in turn; removes the fields that say so."""
    size = config.pop("sliding_window", None)
    enabled = config.pop("use_sliding_window", True)
    layer_types = config.pop("layer_types", None)
    config.pop("max_window_layers", None)
    checks.check_bool("'use_sliding_window'", enabled)
    if size is not None and enabled:
        checks.check_int("'sliding_window'", size)
    size = size if enabled else None
    if layer_types is None:
        layer_types = ["full_attention" if size is None else "sliding_attention"]
    elif not isinstance(layer_types, list):
        raise ValueError(f"'layer_types' is {layer_types!r}: it must be a list")
    elif len(layer_types) != (layers := config.get("num_hidden_layers", 32)):
        raise ValueError(
            f"'layer_types' speaks of {len(layer_types)} layers and 'num_hidden_layers' of {layers!r}"
        )
    for layer_type in layer_types:
        checks.check_choice("attention in 'layer_types'", layer_type, ("full_attention", "sliding_attention"))
    if size is None and "sliding_attention" in layer_types:
        raise ValueError("'layer_types' has 'sliding_attention', but there is no 'sliding_window'")
    local = causal if size is None else causal & window(size)
    return repeating_masks([causal if name == "full_attention" else local for name in layer_types])


def positive_number(settings: dict[str, Any], name: str) -> float:
    """A RoPE setting, which must be above 0."""
    checks.check_number(repr(name), settings.get(name), above=0)
    return float(settings[name])


def rope_scaling_config(settings: dict[str, Any]) -> LinearRopeScaling | Llama3RopeScaling | None:
    rope_type = settings.get("rope_type", settings.get("type", "default"))
    required_keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(rope_type, str) or rope_type not in required_keys:
        raise ValueError(
            f"rotary scaling of the kind {rope_type!r} is not understood: there are default, linear and "
            "llama3"
        )
    if unknown := sorted(settings.keys() - {"rope_type", "type", "rope_theta", *required_keys[rope_type]}):
        raise ValueError(
            f"'rope_parameters' of the kind {rope_type!r} have {', '.join(unknown)}, which is not understood"
        )
    values = [positive_number(settings, name) for name in required_keys[rope_type]]
    if rope_type == "llama3":
        factor, low, high, original = values
        return Llama3RopeScaling(factor, low, high, int(original))
    return LinearRopeScaling(values[0]) if rope_type == "linear" else None


def write_rope(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """Write base and scaling in both spellings, for old and new programs, and masks as a sliding window."""
    base = config.pop("base")
    rope_scaling = config.pop("scaling")
    masks = config.pop("masks")
    settings: dict[str, Any] = {"rope_type": "default"}
    if isinstance(rope_scaling, LinearRopeScaling):
        settings = {"rope_type": "linear", "factor": rope_scaling.factor}
    elif isinstance(rope_scaling, Llama3RopeScaling):
        settings = {
            "rope_type": "llama3",
            "factor": rope_scaling.factor,
            "low_freq_factor": rope_scaling.low,
            "high_freq_factor": rope_scaling.high,
            "original_max_position_embeddings": rope_scaling.original,
        }
    config |= {
        "rope_theta": base,
        "rope_parameters": {**settings, "rope_theta": base},
        "rope_scaling": None if rope_scaling is None else settings,
    }
    if not all(map(is_causal_window, masks)):
        named = " / ".join(map(str, masks))
        raise ValueError(
            f"{config['model_type']} knows causal layers and causal & window layers only, not {named}"
        )
    sizes = {window_size(mask) for mask in masks}
    if config["model_type"] == "mistral":
        if len(sizes) > 1:
            raise ValueError("Mistral has one mask for all layers")
        config["sliding_window"] = sizes.pop()
    elif sizes != {None}:
        raise ValueError(f"{config['model_type']} has no window")
    return config


def llama_like(name: str, cls: str, template: Design, *extra_fields: Field, eps: float = 1e-6) -> Family:
    """A family with LLaMA's tensors; `extra_fields` are the rows that it has besides."""
    return Family(
        name,
        heads={
            f"{cls}ForCausalLM": LMHead(),
            f"{cls}Model": None,
            f"{cls}ForSequenceClassification": "labels",
        },
        classifier=ClassificationHead(2, "last", bias=False),
        template=template,
        prefix="model.",
        unprefixed_classes=frozenset({f"{cls}Model"}),
        fields=[
            same_field("vocab_size", "vocab", template.vocab),
            same_field("hidden_size", "dim", 4096),
            same_field("intermediate_size", "feedforward.width", template.feedforward.width),
            same_field("num_hidden_layers", "decoder.layers", 32),
            same_field("num_attention_heads", "heads", 32),
            Field("num_key_value_heads", "kv_heads", None),
            Field("head_dim", "head_dim", None),
            Field("masks", "decoder.mask"),
            choice_field("hidden_act", "feedforward.activation", ACTIVATIONS, "silu"),
            same_field("max_position_embeddings", "position.length", 2048),
            Field("base", "position.base"),
            Field("scaling", "position.scaling", None),
            same_field("rms_norm_eps", "norm.eps", eps),
            same_field("attention_dropout", "attention_dropout", 0.0),
            same_field("tie_word_embeddings", "head.tied", False),
            *extra_fields,
        ],
        prepare=read_rope,
        finish=lambda config, design: fill_defaults(write_rope(config, design), design),
        rules=rules,
        extra_passthrough_keys=frozenset({"mlp_bias"} if name != "llama" else ()),
    )


def fill_defaults(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """Spell out what a design leaves None."""
    attention = design.attention
    config |= {"num_key_value_heads": attention.kv_heads, "head_dim": attention.head_dim}
    return config | ({"attention_bias": attention.bias_qkv} if "attention_bias" in config else {})


FAMILIES = (
    llama_like(
        "llama",
        "Llama",
        presets.llama,
        Field("attention_bias", ("bias_qkv", "bias_out"), False, lambda on: (on, on), lambda qkv, out: qkv),
        same_field("mlp_bias", "bias", False),
    ),
    llama_like("mistral", "Mistral", presets.mistral),
    llama_like("qwen2", "Qwen2", presets.qwen2_0_5b),
)
