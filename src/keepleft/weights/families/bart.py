"""BART, Marian and Pegasus: the same names; learned positions and a norm on the embedding, or sinusoids and none.

Pegasus has its norms first, and so one more at the end of each stack.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from keepleft.models import presets
from keepleft.models.design import Design, Vocabulary
from keepleft.nn import sense
from keepleft.nn.position import Sinusoidal, waves
from keepleft.weights.families.gpt2 import output
from keepleft.weights.family import ACTIVATIONS, Family
from keepleft.weights.fields import Field, fixed, named, same
from keepleft.weights.rules import Rule, joined, linear, row

TRIPLE, PAIR = ("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")


def rules(design: Design) -> list[Rule]:
    shared = design.source_vocab is None
    out = [
        Rule("shared.weight", "token.weight", twin=not shared),
        Rule("final_logits_bias", "head.bias", op=row, head=True),
        output(design),
        Rule("encoder.embed_tokens.weight", "token.weight" if shared else "source_token.weight", twin=shared),
        Rule("decoder.embed_tokens.weight", "token.weight", twin=shared),
    ]
    for stack, embed in (("encoder", "source_embed"), ("decoder", "embed")):
        block, ours = f"{stack}.layers.{{i}}", f"{stack}.layers.{{i}}"
        out += [
            Rule(f"{stack}.embed_positions.weight", f"{embed}.position.weight") if design.longest
            else Rule(f"{stack}.embed_positions.weight", made=partial(sinusoids, design)),
            *linear(f"{stack}.layernorm_embedding", f"{embed}.norm"),
            *linear(f"{stack}.layer_norm", f"{stack}.norm"),
            *joined(f"{block}.self_attn.{{}}", TRIPLE, f"{ours}.self.qkv", (design.dim,) * 3),
            *linear(f"{block}.self_attn.out_proj", f"{ours}.self.out"),
            *linear(f"{block}.self_attn_layer_norm", f"{ours}.norm_self"),
            *linear(f"{block}.fc1", f"{ours}.feed.up"),
            *linear(f"{block}.fc2", f"{ours}.feed.down"),
            *linear(f"{block}.final_layer_norm", f"{ours}.norm_feed"),
        ]
    block = ours = "decoder.layers.{i}"
    return [
        *out,
        *linear(f"{block}.encoder_attn.q_proj", f"{ours}.cross.q"),
        *joined(f"{block}.encoder_attn.{{}}", PAIR, f"{ours}.cross.kv", (design.dim,) * 2),
        *linear(f"{block}.encoder_attn.out_proj", f"{ours}.cross.out"),
        *linear(f"{block}.encoder_attn_layer_norm", f"{ours}.norm_cross"),
    ]


def sinusoids(design: Design) -> Tensor:
    """(length, dim), as others keep them"""
    assert isinstance(design.position, Sinusoidal)
    return waves(torch.arange(design.position.length or 512), design.dim)


def stacks(config: dict[str, Any], design: Design) -> dict[str, Any]:
    return config | {"is_encoder_decoder": True, "num_hidden_layers": config["encoder_layers"]}


def shared_numbers(template: Design) -> list[Field]:
    def both(name: str, ours: str, default: Any) -> list[Field]:
        return [same(f"{stack}_{name}", ours, default) for stack in ("encoder", "decoder")]
    return [
        same("vocab_size", "vocab", template.vocab), same("d_model", "dim", 1024),
        same("encoder_layers", "encoder.layers", 12), same("decoder_layers", "decoder.layers", 12),
        *both("ffn_dim", "feedforward.width", 4096), *both("attention_heads", "heads", 16),
        named("activation_function", "feedforward.activation", ACTIVATIONS, "gelu"),
        same("dropout", "dropout", 0.1), same("attention_dropout", "attention_dropout", 0.0),
        same("max_position_embeddings", "position.length", 1024), same("scale_embedding", "scale_embedding", False),
        same("tie_word_embeddings", "head.tied", True), fixed("is_decoder", False),
    ]


def vocabularies(config: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Two vocabularies where encoder and decoder do not share theirs."""
    shared = config.pop("share_encoder_decoder_embeddings", True)
    sense.flag("'share_encoder_decoder_embeddings'", shared)
    source = config.get("vocab_size", presets.marian.vocab)
    target = config.pop("decoder_vocab_size", None) or source
    sense.whole("'vocab_size'", source)
    sense.whole("'decoder_vocab_size'", target)
    if shared and target != source:
        raise ValueError(f"'vocab_size' is {source!r} and 'decoder_vocab_size' {target!r}: a shared vocabulary has one size")
    return config | {"vocab_size": target, "source_vocab": None if shared else source}


def shares(config: dict[str, Any], design: Design) -> dict[str, Any]:
    config.pop("source_vocab")
    return stacks(config, design) | {"share_encoder_decoder_embeddings": design.source_vocab is None,
                                     "vocab_size": design.source_vocab or design.vocab, "decoder_vocab_size": design.vocab}


FAMILIES = (
    Family("bart", heads={"BartForConditionalGeneration": Vocabulary(bias=True), "BartModel": None},
           template=presets.bart, prefix="model.", bare=frozenset({"BartModel"}),
           fields=shared_numbers(presets.bart), finish=stacks, rules=rules, extra=frozenset({"num_hidden_layers"})),
    Family("pegasus", heads={"PegasusForConditionalGeneration": Vocabulary(bias=True), "PegasusModel": None},
           template=presets.pegasus, prefix="model.", bare=frozenset({"PegasusModel"}),
           fields=shared_numbers(presets.pegasus), finish=stacks, rules=rules, extra=frozenset({"num_hidden_layers"})),
    Family("marian", heads={"MarianMTModel": Vocabulary(bias=True), "MarianModel": None},
           template=presets.marian, prefix="model.", bare=frozenset({"MarianModel"}),
           fields=[*shared_numbers(presets.marian), Field("source_vocab", "source_vocab", None)],
           prepare=vocabularies, finish=shares, rules=rules, extra=frozenset({"num_hidden_layers"})),
)
