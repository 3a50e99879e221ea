"""The first GPT: GPT-2's tensors, but norms after each part and none at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keepleft.models import presets
from keepleft.models.design import Design, LMHead
from keepleft.weights.families import gpt2
from keepleft.weights.family import Family
from keepleft.weights.fields import choice_field, same_field
from keepleft.weights.rules import Rule, drop

RENAMED = {"wte.weight": "tokens_embed.weight", "wpe.weight": "positions_embed.weight"}
ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}


def rules(design: Design) -> list[Rule]:
    renamed = [
        replace(rule, checkpoint_name=RENAMED.get(rule.checkpoint_name, rule.checkpoint_name))
        for rule in gpt2.rules(design)
    ]
    return [*renamed, drop("position_ids")]


def without_ffn_width(config: dict[str, Any], design: Design) -> dict[str, Any]:
    """This configuration has no field for it: it is always 4 · n_embd."""
    return {key: value for key, value in config.items() if key != "n_inner"}


FAMILY = Family(
    "openai-gpt",
    heads={"OpenAIGPTLMHeadModel": LMHead(), "OpenAIGPTModel": None},
    template=presets.gpt,
    prefix="transformer.",
    unprefixed_classes=frozenset({"OpenAIGPTModel"}),
    fields=[
        same_field("vocab_size", "vocab", 40_478),
        same_field("n_embd", "dim", 768),
        same_field("n_layer", "decoder.layers", 12),
        same_field("n_head", "heads", 12),
        same_field("n_positions", "position.length", 512),
        gpt2.ffn_width("n_inner", "n_embd", 768),
        choice_field("afn", "feedforward.activation", ACTIVATIONS, "gelu"),
        same_field("resid_pdrop", "dropout", 0.1),
        same_field("embd_pdrop", "dropout", lambda config: config.get("resid_pdrop", 0.1)),
        same_field("attn_pdrop", "attention_dropout", 0.1),
        same_field("layer_norm_epsilon", "norm.eps", 1e-5),
        same_field("tie_word_embeddings", "head.tied", True),
    ],
    finish=without_ffn_width,
    rules=rules,
)
