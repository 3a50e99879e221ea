"""GPT-2. Their matrices lie on their side (a Conv1D is a transposed Linear)."""

from __future__ import annotations

from keepleft.models import presets
from keepleft.models.design import Classes, Design, Vocabulary
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, fixed, named, same
from keepleft.weights.rules import Rule, drop, linear, transpose


def rules(design: Design) -> list[Rule]:
    block, ours = "h.{i}", "decoder.layers.{i}"
    return [
        Rule("wte.weight", "token.weight"),
        Rule("wpe.weight", "embed.position.weight"),
        *linear(f"{block}.ln_1", f"{ours}.norm_self"),
        *linear(f"{block}.attn.c_attn", f"{ours}.self.qkv", transpose),
        *linear(f"{block}.attn.c_proj", f"{ours}.self.out", transpose),
        *linear(f"{block}.ln_2", f"{ours}.norm_feed"),
        *linear(f"{block}.mlp.c_fc", f"{ours}.feed.up", transpose),
        *linear(f"{block}.mlp.c_proj", f"{ours}.feed.down", transpose),
        *linear("ln_f", "decoder.norm"),
        output(design),
        Rule("score.weight", "head.out.weight", head=True),
        drop(f"{block}.attn.bias"), drop(f"{block}.attn.masked_bias"),  # their causal mask, kept as a buffer
    ]


def output(design: Design) -> Rule:
    """The output matrix: a second copy of the embedding where the two are tied."""
    tied = isinstance(design.head, Vocabulary) and design.head.tied
    return Rule("lm_head.weight", "token.weight" if tied else "head.weight", head=True, twin=tied)


def inner(name: str, outer: str, usual: int) -> Field:
    """The width of the feed-forward part, four times the model's unless it is given."""
    return same(name, "feedforward.width", default=lambda config: 4 * (config.get(outer) or usual))


FAMILY = Family(
    "gpt2",
    heads={"GPT2LMHeadModel": Vocabulary(), "GPT2Model": None, "GPT2ForSequenceClassification": "labels"},
    classes=Classes(2, "last", bias=False),
    template=presets.gpt2,
    prefix="transformer.", bare=frozenset({"GPT2Model"}),
    fields=[
        same("vocab_size", "vocab", 50_257), same("n_embd", "dim", 768), same("n_layer", "decoder.layers", 12),
        same("n_head", "heads", 12), same("n_positions", "position.length", 1024), inner("n_inner", "n_embd", 768),
        named("activation_function", "feedforward.activation", {"gelu_new": "gelu_tanh", **ACTIVATIONS}, "gelu_new"),
        same("resid_pdrop", "dropout", 0.1), same("embd_pdrop", "dropout", lambda config: config.get("resid_pdrop", 0.1)),
        same("attn_pdrop", "attention_dropout", 0.1), same("layer_norm_epsilon", "norm.eps", 1e-5),
        same("scale_attn_weights", "scale_scores", True), same("tie_word_embeddings", "head.tied", True),
        fixed("scale_attn_by_inverse_layer_idx", False), fixed("reorder_and_upcast_attn", False, True),
        fixed("add_cross_attention", False),
    ],
    rules=rules,
)
