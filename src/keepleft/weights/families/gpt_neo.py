"""GPT-Neo: GPT-2's plan with GPT-3's alternating layers, unscaled scores, and no bias on queries, keys and values."""

from __future__ import annotations

from typing import Any

from keepleft.attention.masks import Mask, causal, is_causal_window, window, window_size
from keepleft.models import presets
from keepleft.models.design import Classes, Design, Vocabulary
from keepleft.nn import sense
from keepleft.weights.families.gpt2 import inner, output
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, named, same
from keepleft.weights.rules import Rule, drop, joined, linear


def rules(design: Design) -> list[Rule]:
    block, ours = "h.{i}", "decoder.layers.{i}"
    return [
        Rule("wte.weight", "token.weight"),
        Rule("wpe.weight", "embed.position.weight"),
        *linear(f"{block}.ln_1", f"{ours}.norm_self"),
        *joined(f"{block}.attn.attention.{{}}", ("q_proj", "k_proj", "v_proj"), f"{ours}.self.qkv", (design.dim,) * 3),
        *linear(f"{block}.attn.attention.out_proj", f"{ours}.self.out"),
        *linear(f"{block}.ln_2", f"{ours}.norm_feed"),
        *linear(f"{block}.mlp.c_fc", f"{ours}.feed.up"),
        *linear(f"{block}.mlp.c_proj", f"{ours}.feed.down"),
        *linear("ln_f", "decoder.norm"),
        output(design),
        Rule("score.weight", "head.out.weight", head=True),
        drop(f"{block}.attn.attention.bias"), drop(f"{block}.attn.attention.masked_bias"),
    ]


def spread(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Layer kinds and window as the masks that they mean."""
    types = config.pop("attention_types", None) or [[["global", "local"], 12]]
    if not isinstance(types, list) or not all(isinstance(part, list) and len(part) == 2 and isinstance(part[0], list)
                                              and isinstance(part[1], int) and part[1] > 0 for part in types):
        raise ValueError(f"'attention_types' is {types!r}: it must be such as [[['global', 'local'], 12]]")
    count = sum(len(group) * times for group, times in types)
    config.pop("attention_layers", None)
    layers = config.get("num_layers", 24)
    if layers is True or count != layers:
        raise ValueError(f"'attention_types' speaks of {count} layers and 'num_layers' of {layers!r}")
    kinds = [kind for group, times in types for _ in range(times) for kind in group]
    size = config.pop("window_size", 256)
    sense.whole("'window_size'", size)
    local = causal & window(size)
    masks: list[Mask] = []
    for kind in kinds:
        if kind not in ("global", "local"):
            raise ValueError(f"'attention_types' has {kind!r}: only 'global' and 'local' are understood")
        masks.append(local if kind == "local" else causal)
    turn = next(n for n in range(1, len(masks) + 1) if all(mask == masks[i % n] for i, mask in enumerate(masks)))
    return config | {"masks": tuple(masks[:turn])}


def gather(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """The way back."""
    masks = config.pop("masks")
    if not all(map(is_causal_window, masks)):
        raise ValueError("GPT-Neo knows causal layers and causal & window layers only")
    kinds = ["global" if mask == causal else "local" for mask in masks]
    layers = config["num_layers"]
    sizes = {window_size(mask) for mask in masks if mask != causal} or {256}
    if len(sizes) > 1:
        raise ValueError("GPT-Neo has one window for all local layers")
    types = [[kinds, layers // len(kinds)]] + ([[kinds[:layers % len(kinds)], 1]] if layers % len(kinds) else [])
    return config | {"attention_types": types, "window_size": sizes.pop(),
                     "attention_layers": [kinds[n % len(kinds)] for n in range(layers)]}


FAMILY = Family(
    "gpt_neo",
    heads={"GPTNeoForCausalLM": Vocabulary(), "GPTNeoModel": None, "GPTNeoForSequenceClassification": "labels"},
    classes=Classes(2, "last", bias=False),
    template=presets.gpt_neo,
    prefix="transformer.", bare=frozenset({"GPTNeoModel"}),
    fields=[
        same("vocab_size", "vocab", 50_257), same("hidden_size", "dim", 2048), same("num_layers", "decoder.layers", 24),
        Field("masks", "decoder.mask"), same("num_heads", "heads", 16),
        same("max_position_embeddings", "position.length", 2048), inner("intermediate_size", "hidden_size", 2048),
        named("activation_function", "feedforward.activation", {"gelu_new": "gelu_tanh", **ACTIVATIONS}, "gelu_new"),
        same("resid_dropout", "dropout", 0.0),
        same("embed_dropout", "dropout", lambda config: config.get("resid_dropout", 0.0)),
        same("attention_dropout", "attention_dropout", 0.0), same("layer_norm_epsilon", "norm.eps", 1e-5),
        same("tie_word_embeddings", "head.tied", True),
    ],
    prepare=spread, finish=gather, rules=rules,
)
