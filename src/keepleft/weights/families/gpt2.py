"""GPT-2. Its matrices are transposed: a Conv1D is a Linear with (in, out) weights."""

from __future__ import annotations

from keepleft.models import presets
from keepleft.models.design import ClassificationHead, Design, LMHead
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, choice_field, fixed_field, same_field
from keepleft.weights.rules import Rule, drop, linear, transpose


def rules(design: Design) -> list[Rule]:
    block = "h.{i}"
    layer = "decoder.layers.{i}"
    return [
        Rule("wte.weight", "token.weight"),
        Rule("wpe.weight", "embed.position.weight"),
        *linear(f"{block}.ln_1", f"{layer}.norm_self"),
        *linear(f"{block}.attn.c_attn", f"{layer}.self.qkv", transpose),
        *linear(f"{block}.attn.c_proj", f"{layer}.self.out", transpose),
        *linear(f"{block}.ln_2", f"{layer}.norm_feed"),
        *linear(f"{block}.mlp.c_fc", f"{layer}.feed.up", transpose),
        *linear(f"{block}.mlp.c_proj", f"{layer}.feed.down", transpose),
        *linear("ln_f", "decoder.norm"),
        output_rule(design),
        Rule("score.weight", "head.out.weight", head=True),
        drop(f"{block}.attn.bias"),  # the causal mask, in a buffer
        drop(f"{block}.attn.masked_bias"),
    ]


def output_rule(design: Design) -> Rule:
    """The output projection: a second copy of the embedding where the two are tied."""
    tied = isinstance(design.head, LMHead) and design.head.tied
    return Rule("lm_head.weight", "token.weight" if tied else "head.weight", head=True, tied=tied)


def ffn_width(config_key: str, dim_key: str, default_dim: int) -> Field:
    """The feed-forward width, four times the model's unless it is given."""
    default = lambda config: 4 * (config.get(dim_key) or default_dim)
    return same_field(config_key, "feedforward.width", default)


FAMILY = Family(
    "gpt2",
    heads={"GPT2LMHeadModel": LMHead(), "GPT2Model": None, "GPT2ForSequenceClassification": "labels"},
    classifier=ClassificationHead(2, "last", bias=False),
    template=presets.gpt2,
    prefix="transformer.",
    unprefixed_classes=frozenset({"GPT2Model"}),
    fields=[
        same_field("vocab_size", "vocab", 50_257),
        same_field("n_embd", "dim", 768),
        same_field("n_layer", "decoder.layers", 12),
        same_field("n_head", "heads", 12),
        same_field("n_positions", "position.length", 1024),
        ffn_width("n_inner", "n_embd", 768),
        choice_field("activation_function", "feedforward.activation", ACTIVATIONS, "gelu_new"),
        same_field("resid_pdrop", "dropout", 0.1),
        same_field("embd_pdrop", "dropout", lambda config: config.get("resid_pdrop", 0.1)),
        same_field("attn_pdrop", "attention_dropout", 0.1),
        same_field("layer_norm_epsilon", "norm.eps", 1e-5),
        same_field("scale_attn_weights", "scale_scores", True),
        same_field("tie_word_embeddings", "head.tied", True),
        fixed_field("scale_attn_by_inverse_layer_idx", False),
        fixed_field("reorder_and_upcast_attn", False, True),
        fixed_field("add_cross_attention", False),
    ],
    rules=rules,
)
