"""The first GPT: GPT-2's tensors, norms after the parts, no last norm."""

from __future__ import annotations

from dataclasses import replace

from keepleft.models import presets
from keepleft.models.design import Design, Vocabulary
from keepleft.weights.families import gpt2
from keepleft.weights.family import Family
from keepleft.weights.fields import named, same
from keepleft.weights.rules import Rule, drop

THEIR_NAMES = {"wte": "tokens_embed", "wpe": "positions_embed"}


def rules(design: Design) -> list[Rule]:
    def renamed(rule: Rule) -> Rule:
        first, rest = rule.theirs.split(".", 1)
        return replace(rule, theirs=f"{THEIR_NAMES.get(first, first)}.{rest}")
    return [renamed(rule) for rule in gpt2.rules(design)] + [drop("position_ids")]


FAMILY = Family(
    "openai-gpt",
    heads={"OpenAIGPTLMHeadModel": Vocabulary(), "OpenAIGPTModel": None},
    template=presets.gpt,
    prefix="transformer.", bare=frozenset({"OpenAIGPTModel"}),
    fields=[
        same("vocab_size", "vocab", 40_478), same("n_embd", "dim", 768), same("n_layer", "decoder.layers", 12),
        same("n_head", "heads", 12), same("n_positions", "position.length", 512), gpt2.inner("n_inner", "n_embd", 768),
        named("afn", "feedforward.activation", {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}, "gelu"),
        same("resid_pdrop", "dropout", 0.1), same("embd_pdrop", "dropout", lambda config: config.get("resid_pdrop", 0.1)),
        same("attn_pdrop", "attention_dropout", 0.1), same("layer_norm_epsilon", "norm.eps", 1e-5),
        same("tie_word_embeddings", "head.tied", True),
    ],
    finish=lambda config, design: {name: value for name, value in config.items() if name != "n_inner"},  # always 4 · n_embd
    rules=rules,
)
