"""LLaMA 1 to 3, SmolLM2, and, as rows, Mistral (a window) and Qwen2 (biases on queries, keys and values)."""

from __future__ import annotations

from typing import Any

from keepleft.attention.masks import Mask, causal, is_causal_window, window, window_size
from keepleft.models import presets
from keepleft.models.design import Classes, Design, Vocabulary
from keepleft.nn import sense
from keepleft.nn.position import Llama3, Stretched
from keepleft.weights.families.gpt2 import output
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, named, same
from keepleft.weights.rules import Rule, drop, joined, linear


def rules(design: Design) -> list[Rule]:
    block, ours, shape = "layers.{i}", "decoder.layers.{i}", design.attention
    queries, keys = shape.heads * shape.width, shape.kv_heads * shape.width
    return [
        Rule("embed_tokens.weight", "token.weight"),
        *linear(f"{block}.input_layernorm", f"{ours}.norm_self"),
        *joined(f"{block}.self_attn.{{}}", ("q_proj", "k_proj", "v_proj"), f"{ours}.self.qkv", (queries, keys, keys)),
        *linear(f"{block}.self_attn.o_proj", f"{ours}.self.out"),
        *linear(f"{block}.post_attention_layernorm", f"{ours}.norm_feed"),
        *joined(f"{block}.mlp.{{}}", ("gate_proj", "up_proj"), f"{ours}.feed.up", (design.feedforward.width,) * 2),
        *linear(f"{block}.mlp.down_proj", f"{ours}.feed.down"),
        *linear("norm", "decoder.norm"),
        output(design),
        Rule("score.weight", "head.out.weight", head=True),
        drop(f"{block}.self_attn.rotary_emb.inv_freq"),  # old files keep what is a formula
    ]


def unroll(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Rotary settings, old and new spelling, as one; a sliding window as the masks that it means."""
    new, old = config.pop("rope_parameters", None) or {}, config.pop("rope_scaling", None) or {}
    for name, given in (("rope_parameters", new), ("rope_scaling", old)):
        if not isinstance(given, dict):
            raise ValueError(f"{name!r} is {given!r}: it must be an object such as {{'rope_type': 'default'}}")
    if new and old and {**old, "rope_theta": 0} != {**new, "rope_theta": 0}:
        raise ValueError(f"'rope_parameters' {new} and 'rope_scaling' {old} differ")
    theta = config.pop("rope_theta", None)
    settings = new or old
    if theta is not None:
        number({"rope_theta": theta}, "rope_theta")
        if settings.get("rope_theta", theta) != theta:
            raise ValueError(f"'rope_theta' is {theta} and 'rope_parameters' says {settings['rope_theta']}")
    base = number({"rope_theta": 10_000.0 if theta is None else theta} | settings, "rope_theta")
    return config | {"base": base, "scaling": scaling(settings), "masks": turns(config)}


def turns(config: dict[str, Any]) -> tuple[Mask, ...]:
    """The masks that the layers take in turn."""
    size, on = config.pop("sliding_window", None), config.pop("use_sliding_window", True)
    kinds, _ = config.pop("layer_types", None), config.pop("max_window_layers", None)
    sense.flag("'use_sliding_window'", on)
    if size is not None and on:
        sense.whole("'sliding_window'", size)
    size = size if on else None
    if kinds is None:
        kinds = ["full_attention" if size is None else "sliding_attention"]
    elif not isinstance(kinds, list) or len(kinds) != (layers := config.get("num_hidden_layers", 32)):
        raise ValueError(f"'layer_types' speaks of {len(kinds)} layers and 'num_hidden_layers' of {layers!r}"
                         if isinstance(kinds, list) else f"'layer_types' is {kinds!r}: it must be a list")
    for kind in kinds:
        sense.word("attention in 'layer_types'", kind, ("full_attention", "sliding_attention"))
    if size is None and "sliding_attention" in kinds:
        raise ValueError("'layer_types' has 'sliding_attention', but there is no 'sliding_window'")
    local = causal if size is None else causal & window(size)
    masks = [causal if kind == "full_attention" else local for kind in kinds]
    return next(tuple(masks[:n]) for n in range(1, len(masks) + 1) if all(m == masks[i % n] for i, m in enumerate(masks)))


def number(settings: dict[str, Any], name: str) -> float:
    """One of the rotary settings: a number above 0."""
    sense.real(repr(name), settings.get(name), above=0)
    return float(settings[name])


def scaling(settings: dict[str, Any]) -> Stretched | Llama3 | None:
    kind = settings.get("rope_type", settings.get("type", "default"))
    own = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                                                           "original_max_position_embeddings")}
    if not isinstance(kind, str) or kind not in own:
        raise ValueError(f"rotary scaling of the kind {kind!r} is not understood: there are default, linear and llama3")
    if unknown := sorted(settings.keys() - {"rope_type", "type", "rope_theta", *own[kind]}):
        raise ValueError(f"'rope_parameters' of the kind {kind!r} have {', '.join(unknown)}, which is not understood")
    numbers = [number(settings, name) for name in own[kind]]
    if kind == "llama3":
        factor, low, high, original = numbers
        return Llama3(factor, low, high, int(original))
    return Stretched(numbers[0]) if kind == "linear" else None


def roll(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """The way back: both spellings, so that old and new programs read it."""
    base, choice, masks = config.pop("base"), config.pop("scaling"), config.pop("masks")
    settings: dict[str, Any] = {"rope_type": "default"}
    if isinstance(choice, Stretched):
        settings = {"rope_type": "linear", "factor": choice.factor}
    elif isinstance(choice, Llama3):
        settings = {"rope_type": "llama3", "factor": choice.factor, "low_freq_factor": choice.low,
                    "high_freq_factor": choice.high, "original_max_position_embeddings": choice.original}
    config |= {"rope_theta": base, "rope_parameters": {**settings, "rope_theta": base},
               "rope_scaling": None if choice is None else settings}
    if not all(map(is_causal_window, masks)):
        named = " / ".join(map(str, masks))
        raise ValueError(f"{config['model_type']} knows causal layers and causal & window layers only, not {named}")
    sizes = {window_size(mask) for mask in masks}
    if config["model_type"] == "mistral":
        if len(sizes) > 1:
            raise ValueError("Mistral has one mask for all layers")
        config["sliding_window"] = sizes.pop()
    elif sizes != {None}:
        raise ValueError(f"{config['model_type']} has no window")
    return config


def kin(name: str, cls: str, template: Design, *own: Field, eps: float = 1e-6) -> Family:
    """One of them; `own` are the rows in which it differs."""
    return Family(
        name,
        heads={f"{cls}ForCausalLM": Vocabulary(), f"{cls}Model": None, f"{cls}ForSequenceClassification": "labels"},
        classes=Classes(2, "last", bias=False),
        template=template, prefix="model.", bare=frozenset({f"{cls}Model"}),
        fields=[
            same("vocab_size", "vocab", template.vocab), same("hidden_size", "dim", 4096),
            same("intermediate_size", "feedforward.width", template.feedforward.width),
            same("num_hidden_layers", "decoder.layers", 32), same("num_attention_heads", "heads", 32),
            Field("num_key_value_heads", "kv_heads", None),
            Field("head_dim", "head_dim", None), Field("masks", "decoder.mask"),
            named("hidden_act", "feedforward.activation", {"silu": "silu", **ACTIVATIONS}, "silu"),
            same("max_position_embeddings", "position.length", 2048), Field("base", "position.base"),
            Field("scaling", "position.scaling", None), same("rms_norm_eps", "norm.eps", eps),
            same("attention_dropout", "attention_dropout", 0.0), same("tie_word_embeddings", "head.tied", False), *own,
        ],
        prepare=unroll, finish=lambda config, design: full_numbers(roll(config, design), design),
        rules=rules, extra=frozenset({"mlp_bias"} if name != "llama" else ()),
    )


def full_numbers(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """What is None here for "as usual" is spelt out there."""
    shape = design.attention
    config |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.width}
    return config | ({"attention_bias": shape.bias_qkv} if "attention_bias" in config else {})


FAMILIES = (
    kin("llama", "Llama", presets.llama,
        Field("attention_bias", ("bias_qkv", "bias_out"), False, lambda on: (on, on), lambda qkv, out: qkv),
        same("mlp_bias", "bias", False)),
    kin("mistral", "Mistral", presets.mistral),
    kin("qwen2", "Qwen2", presets.qwen2_0_5b),
)
