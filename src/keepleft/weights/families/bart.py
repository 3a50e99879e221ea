"""BART, Marian and Pegasus share their tensor names.

BART has learned positions and a norm on the embedding, Marian sinusoids and none; Pegasus is Marian with
norms before each part, and so one more at the end of each stack.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepleft import checks
from keepleft.models import presets
from keepleft.models.design import Design, LMHead
from keepleft.nn.position import Sinusoidal, sinusoidal_encoding
from keepleft.weights.families.gpt2 import output_rule
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, choice_field, fixed_field, same_field
from keepleft.weights.rules import Rule, concat_rules, linear, unsqueeze

QKV_NAMES = ("q_proj", "k_proj", "v_proj")
KV_NAMES = QKV_NAMES[1:]


def rules(design: Design) -> list[Rule]:
    shared_vocab = design.source_vocab is None
    source_token = "token.weight" if shared_vocab else "source_token.weight"
    out = [
        Rule("shared.weight", "token.weight", tied=not shared_vocab),
        Rule("encoder.embed_tokens.weight", source_token, tied=shared_vocab),
        Rule("decoder.embed_tokens.weight", "token.weight", tied=shared_vocab),
        Rule("final_logits_bias", "head.bias", op=unsqueeze, head=True),
        output_rule(design),
    ]
    for stack, embed in (("encoder", "source_embed"), ("decoder", "embed")):
        layer = f"{stack}.layers.{{i}}"  # both call it so
        out += [
            position_rule(design, f"{stack}.embed_positions.weight", f"{embed}.position.weight"),
            *linear(f"{stack}.layernorm_embedding", f"{embed}.norm"),
            *linear(f"{stack}.layer_norm", f"{stack}.norm"),
            *concat_rules(f"{layer}.self_attn.{{}}", QKV_NAMES, f"{layer}.self.qkv", (design.dim,) * 3),
            *linear(f"{layer}.self_attn.out_proj", f"{layer}.self.out"),
            *linear(f"{layer}.self_attn_layer_norm", f"{layer}.norm_self"),
            *linear(f"{layer}.fc1", f"{layer}.feed.up"),
            *linear(f"{layer}.fc2", f"{layer}.feed.down"),
            *linear(f"{layer}.final_layer_norm", f"{layer}.norm_feed"),
        ]
    layer = "decoder.layers.{i}"
    return [
        *out,
        *linear(f"{layer}.encoder_attn.q_proj", f"{layer}.cross.q"),
        *concat_rules(f"{layer}.encoder_attn.{{}}", KV_NAMES, f"{layer}.cross.kv", (design.dim,) * 2),
        *linear(f"{layer}.encoder_attn.out_proj", f"{layer}.cross.out"),
        *linear(f"{layer}.encoder_attn_layer_norm", f"{layer}.norm_cross"),
    ]


def position_rule(design: Design, checkpoint_name: str, param_name: str) -> Rule:
    """Learned positions are a parameter; sinusoids a table that only the checkpoint holds."""
    if design.max_positions:
        return Rule(checkpoint_name, param_name)
    return Rule(checkpoint_name, compute=partial(position_table, design))


def position_table(design: Design) -> Tensor:
    """Sinusoids, (length, dim)."""
    assert isinstance(design.position, Sinusoidal)
    return sinusoidal_encoding(torch.arange(design.position.length or 512), design.dim)


def write_layer_count(config: dict[str, Any], design: Design) -> dict[str, Any]:
    return config | {"is_encoder_decoder": True, "num_hidden_layers": config["encoder_layers"]}


def shared_fields(template: Design) -> list[Field]:
    """The fields of all three families."""
    return [
        same_field("vocab_size", "vocab", template.vocab),
        same_field("d_model", "dim", 1024),
        same_field("encoder_layers", "encoder.layers", 12),
        same_field("decoder_layers", "decoder.layers", 12),
        same_field("encoder_ffn_dim", "encoder.feedforward.width", 4096),
        same_field("decoder_ffn_dim", "feedforward.width", 4096),
        same_field("encoder_attention_heads", "encoder.heads", 16),
        same_field("decoder_attention_heads", "heads", 16),
        choice_field("activation_function", "feedforward.activation", ACTIVATIONS, "gelu"),
        same_field("dropout", "dropout", 0.1),
        same_field("attention_dropout", "attention_dropout", 0.0),
        same_field("max_position_embeddings", "position.length", 1024),
        same_field("scale_embedding", "scale_embedding", False),
        same_field("tie_word_embeddings", "head.tied", True),
        fixed_field("is_decoder", False),
    ]


def read_vocabularies(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Where encoder and decoder do not share their embedding, "vocab_size" is the source's."""
    shared = config.pop("share_encoder_decoder_embeddings", True)
    checks.check_bool("'share_encoder_decoder_embeddings'", shared)
    source_vocab = config.get("vocab_size", presets.marian.vocab)
    target_vocab = config.pop("decoder_vocab_size", None) or source_vocab
    checks.check_int("'vocab_size'", source_vocab)
    checks.check_int("'decoder_vocab_size'", target_vocab)
    if shared and target_vocab != source_vocab:
        raise ValueError(
            f"'vocab_size' is {source_vocab!r} and 'decoder_vocab_size' {target_vocab!r}: a shared "
            "vocabulary has one size"
        )
    return config | {"vocab_size": target_vocab, "source_vocab": None if shared else source_vocab}


def write_vocabularies(config: dict[str, Any], design: Design) -> dict[str, Any]:
    del config["source_vocab"]
    return write_layer_count(config, design) | {
        "share_encoder_decoder_embeddings": design.source_vocab is None,
        "vocab_size": design.source_vocab or design.vocab,
        "decoder_vocab_size": design.vocab,
    }


FAMILIES = (
    Family(
        "bart",
        heads={"BartForConditionalGeneration": LMHead(bias=True), "BartModel": None},
        template=presets.bart,
        prefix="model.",
        unprefixed_classes=frozenset({"BartModel"}),
        fields=shared_fields(presets.bart),
        finish=write_layer_count,
        rules=rules,
        extra_passthrough_keys=frozenset({"num_hidden_layers"}),
    ),
    Family(
        "pegasus",
        heads={"PegasusForConditionalGeneration": LMHead(bias=True), "PegasusModel": None},
        template=presets.pegasus,
        prefix="model.",
        unprefixed_classes=frozenset({"PegasusModel"}),
        fields=shared_fields(presets.pegasus),
        finish=write_layer_count,
        rules=rules,
        extra_passthrough_keys=frozenset({"num_hidden_layers"}),
    ),
    Family(
        "marian",
        heads={"MarianMTModel": LMHead(bias=True), "MarianModel": None},
        template=presets.marian,
        prefix="model.",
        unprefixed_classes=frozenset({"MarianModel"}),
        fields=[*shared_fields(presets.marian), Field("source_vocab", "source_vocab", None)],
        prepare=read_vocabularies,
        finish=write_vocabularies,
        rules=rules,
        extra_passthrough_keys=frozenset({"num_hidden_layers"}),
    ),
)
