"""BERT: bare, with its pooler, its masked-language-model head, or a classifier."""

from __future__ import annotations

from typing import Any

from keepleft.models import presets
from keepleft.models.design import Classes, Design, Masked, Pooled
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import fixed, named, same
from keepleft.weights.rules import Rule, drop, joined, linear


def rules(design: Design) -> list[Rule]:
    block, ours = "encoder.layer.{i}", "encoder.layers.{i}"
    return [
        Rule("embeddings.word_embeddings.weight", "token.weight"),
        Rule("embeddings.position_embeddings.weight", "embed.position.weight"),
        Rule("embeddings.token_type_embeddings.weight", "embed.kind.weight"),
        *linear("embeddings.LayerNorm", "embed.norm"),
        *joined(f"{block}.attention.self.{{}}", ("query", "key", "value"), f"{ours}.self.qkv", (design.dim,) * 3),
        *linear(f"{block}.attention.output.dense", f"{ours}.self.out"),
        *linear(f"{block}.attention.output.LayerNorm", f"{ours}.norm_self"),
        *linear(f"{block}.intermediate.dense", f"{ours}.feed.up"),
        *linear(f"{block}.output.dense", f"{ours}.feed.down"),
        *linear(f"{block}.output.LayerNorm", f"{ours}.norm_feed"),
        *head(design),
        drop("embeddings.position_ids"),
    ]


def head(design: Design) -> list[Rule]:
    if isinstance(design.head, Masked):
        return [
            *linear("cls.predictions.transform.dense", "head.dense", head=True),
            *linear("cls.predictions.transform.LayerNorm", "head.norm", head=True),
            Rule("cls.predictions.bias", "head.bias", head=True),
            Rule("cls.predictions.decoder.weight", "token.weight", head=True, twin=True),
            Rule("cls.predictions.decoder.bias", "head.bias", head=True, twin=True),
            *unused("pooler.dense"), *unused("cls.seq_relationship"),
        ]
    if isinstance(design.head, Classes):
        return [*linear("pooler.dense", "head.pool.dense"), *linear("classifier", "head.out", head=True)]
    return linear("pooler.dense", "head.dense") if design.head == Pooled("tanh") else unused("pooler.dense")


def unused(theirs: str) -> list[Rule]:
    """What some files hold and this head does not need."""
    return [drop(f"{theirs}.weight"), drop(f"{theirs}.bias")]


def plain(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """A file without a pooler is a BERT without a head, whatever class wrote it."""
    bare = names and not any(name.endswith("pooler.dense.weight") for name in names)
    if bare and config.get("architectures", ["BertModel"]) == ["BertModel"]:
        config["architectures"] = ["BertModel-without-pooler"]
    config.pop("position_embedding_type", None) if config.get("position_embedding_type") == "absolute" else None
    return config


def classes(config: dict[str, Any], design: Design) -> dict[str, Any]:
    return config | {"architectures": ["BertModel"]} if design.head is None else config


FAMILY = Family(
    "bert",
    heads={"BertModel": Pooled("tanh"), "BertModel-without-pooler": None, "BertForMaskedLM": Masked(),
           "BertForPreTraining": Masked(), "BertForSequenceClassification": "labels"},
    classes=Classes(2, "tanh"),
    template=presets.bert,
    prefix="bert.", bare=frozenset({"BertModel", "BertModel-without-pooler"}),
    fields=[
        same("vocab_size", "vocab", 30_522), same("hidden_size", "dim", 768), same("num_hidden_layers", "encoder.layers", 12),
        same("num_attention_heads", "heads", 12), same("intermediate_size", "feedforward.width", 3072),
        named("hidden_act", "feedforward.activation", ACTIVATIONS, "gelu"),
        same("hidden_dropout_prob", "dropout", 0.1), same("attention_probs_dropout_prob", "attention_dropout", 0.1),
        same("max_position_embeddings", "position.length", 512), same("type_vocab_size", "kinds", 2),
        same("layer_norm_eps", "norm.eps", 1e-12), fixed("is_decoder", False), fixed("add_cross_attention", False),
        fixed("tie_word_embeddings", True),
    ],
    prepare=plain, rules=rules,
)
