"""BERT: without a head, with its pooler, its masked-language-model head, or a classifier."""

from __future__ import annotations

from typing import Any

from keepleft.models import presets
from keepleft.models.design import ClassificationHead, Design, MaskedLMHead, PoolingHead
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import choice_field, fixed_field, same_field
from keepleft.weights.rules import Rule, concat_rules, drop, linear

QKV_NAMES = ("query", "key", "value")


def rules(design: Design) -> list[Rule]:
    block = "encoder.layer.{i}"
    layer = "encoder.layers.{i}"
    return [
        Rule("embeddings.word_embeddings.weight", "token.weight"),
        Rule("embeddings.position_embeddings.weight", "embed.position.weight"),
        Rule("embeddings.token_type_embeddings.weight", "embed.kind.weight"),
        *linear("embeddings.LayerNorm", "embed.norm"),
        *concat_rules(f"{block}.attention.self.{{}}", QKV_NAMES, f"{layer}.self.qkv", (design.dim,) * 3),
        *linear(f"{block}.attention.output.dense", f"{layer}.self.out"),
        *linear(f"{block}.attention.output.LayerNorm", f"{layer}.norm_self"),
        *linear(f"{block}.intermediate.dense", f"{layer}.feed.up"),
        *linear(f"{block}.output.dense", f"{layer}.feed.down"),
        *linear(f"{block}.output.LayerNorm", f"{layer}.norm_feed"),
        *head_rules(design),
        drop("embeddings.position_ids"),
    ]


def head_rules(design: Design) -> list[Rule]:
    if isinstance(design.head, MaskedLMHead):
        return [
            *linear("cls.predictions.transform.dense", "head.dense", head=True),
            *linear("cls.predictions.transform.LayerNorm", "head.norm", head=True),
            Rule("cls.predictions.bias", "head.bias", head=True),
            Rule("cls.predictions.decoder.weight", "token.weight", head=True, tied=True),
            Rule("cls.predictions.decoder.bias", "head.bias", head=True, tied=True),
            *drop_linear("pooler.dense"),
            *drop_linear("cls.seq_relationship"),
        ]
    if isinstance(design.head, ClassificationHead):
        return [*linear("pooler.dense", "head.pool.dense"), *linear("classifier", "head.out", head=True)]
    if design.head == PoolingHead("tanh"):
        return linear("pooler.dense", "head.dense")
    return drop_linear("pooler.dense")


def drop_linear(checkpoint_name: str) -> list[Rule]:
    """A layer that some files hold and this head does not need."""
    return [drop(f"{checkpoint_name}.weight"), drop(f"{checkpoint_name}.bias")]


def without_pooler(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """A checkpoint without a pooler is a BERT without a head, whatever class wrote it."""
    lacks_pooler = names and not any(name.endswith("pooler.dense.weight") for name in names)
    if lacks_pooler and config.get("architectures", ["BertModel"]) == ["BertModel"]:
        config["architectures"] = ["BertModel-without-pooler"]
    if config.get("position_embedding_type") == "absolute":
        del config["position_embedding_type"]
    return config


FAMILY = Family(
    "bert",
    heads={
        "BertModel": PoolingHead("tanh"),
        "BertModel-without-pooler": None,
        "BertForMaskedLM": MaskedLMHead(),
        "BertForPreTraining": MaskedLMHead(),
        "BertForSequenceClassification": "labels",
    },
    classifier=ClassificationHead(2, "tanh"),
    template=presets.bert,
    prefix="bert.",
    unprefixed_classes=frozenset({"BertModel", "BertModel-without-pooler"}),
    fields=[
        same_field("vocab_size", "vocab", 30_522),
        same_field("hidden_size", "dim", 768),
        same_field("num_hidden_layers", "encoder.layers", 12),
        same_field("num_attention_heads", "heads", 12),
        same_field("intermediate_size", "feedforward.width", 3072),
        choice_field("hidden_act", "feedforward.activation", ACTIVATIONS, "gelu"),
        same_field("hidden_dropout_prob", "dropout", 0.1),
        same_field("attention_probs_dropout_prob", "attention_dropout", 0.1),
        same_field("max_position_embeddings", "position.length", 512),
        same_field("type_vocab_size", "token_types", 2),
        same_field("layer_norm_eps", "norm.eps", 1e-12),
        fixed_field("is_decoder", False),
        fixed_field("add_cross_attention", False),
        fixed_field("tie_word_embeddings", True),
    ],
    prepare=without_pooler,
    rules=rules,
)
