"""The first GPT: GPT-2's tensors, norms after the parts, no last norm."""

from __future__ import annotations

from dataclasses import replace

from keepleft.models import presets
from keepleft.models.design import Design, LMHead
from keepleft.weights.families import gpt2
from keepleft.weights.family import Family
from keepleft.weights.fields import choice_field, same_field
from keepleft.weights.rules import Rule, drop

CHECKPOINT_NAMES = {"wte": "tokens_embed", "wpe": "positions_embed"}


def rules(design: Design) -> list[Rule]:
    def rename_rule(rule: Rule) -> Rule:
        first, rest = rule.checkpoint_name.split(".", 1)
        return replace(rule, checkpoint_name=f"{CHECKPOINT_NAMES.get(first, first)}.{rest}")

    return [rename_rule(rule) for rule in gpt2.rules(design)] + [drop("position_ids")]


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
        choice_field(
            "afn",
            "feedforward.activation",
            {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"},
            "gelu",
        ),
        same_field("resid_pdrop", "dropout", 0.1),
        same_field("embd_pdrop", "dropout", lambda config: config.get("resid_pdrop", 0.1)),
        same_field("attn_pdrop", "attention_dropout", 0.1),
        same_field("layer_norm_epsilon", "norm.eps", 1e-5),
        same_field("tie_word_embeddings", "head.tied", True),
    ],
    finish=lambda config, design: {
        name: value for name, value in config.items() if name != "n_inner"
    },  # always 4 · n_embd
    rules=rules,
)
