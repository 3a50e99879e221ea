"""keepleft's weights in the format of CTranslate2: decoders like GPT-2, encoder-decoders like Marian."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import torch
from ctranslate2.specs import TransformerDecoderModelSpec, TransformerSpec
from ctranslate2.specs.common_spec import Activation

import keepleft as kl
from keepleft.nn.position import sinusoidal_encoding

ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu_tanh": Activation.GELUTanh,
    "silu": Activation.SWISH,
    "gelu": Activation.GELU,
}
# CTranslate2 wants these first in the vocabulary; every other token's name is its number
SPECIAL_TOKENS = ("<s>", "</s>", "<unk>")


def convert(model: Any, folder: Path) -> Path:
    """Write a float32 model directory that Translator or Generator reads."""
    design = model.design
    vocabulary = token_names(range(design.vocab))
    shape = dict(
        num_heads=design.heads,
        pre_norm=design.norm_first,
        activation=ACTIVATIONS[design.feedforward.activation],
    )
    if not design.is_encoder_decoder:
        spec = TransformerDecoderModelSpec.from_config(design.decoder.layers, **shape)
        spec.register_vocabulary(vocabulary)
    else:
        spec = TransformerSpec.from_config((design.encoder.layers, design.decoder.layers), **shape)
        spec.register_source_vocabulary(vocabulary)
        spec.register_target_vocabulary(vocabulary)
        spec.config.decoder_start_token = SPECIAL_TOKENS[0]
        _set_stack(spec.encoder, model.encoder, model.source_embed, design)
        spec.encoder.embeddings[0].weight = _array(model.token.weight)
    _set_stack(spec.decoder, model.decoder, model.embed, design)
    spec.decoder.embeddings.weight = _array(model.token.weight)
    weight, bias = model.head.output_weight(model.token)
    spec.decoder.projection.weight = _array(weight)
    if bias is not None:
        spec.decoder.projection.bias = _array(bias)
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))
    return folder


def open_engine(folder: Path, design: kl.Design, compute_type: str, threads: int) -> Any:
    """A Translator or a Generator with one worker."""
    engine_class = ctranslate2.Translator if design.is_encoder_decoder else ctranslate2.Generator
    return engine_class(str(folder), compute_type=compute_type, inter_threads=1, intra_threads=threads)


def token_names(tokens: Any) -> list[str]:
    """The names of tokens in CTranslate2's vocabulary."""
    return [SPECIAL_TOKENS[token] if token < len(SPECIAL_TOKENS) else str(token) for token in tokens]


def token_numbers(names: list[str]) -> list[int]:
    """The inverse of `token_names`."""
    return [SPECIAL_TOKENS.index(name) if name in SPECIAL_TOKENS else int(name) for name in names]


def _set_stack(spec: Any, stack: Any, embed: Any, design: kl.Design) -> None:
    spec.scale_embeddings = design.scale_embedding
    positions = (
        embed.position.weight if design.max_positions else sinusoidal_encoding(torch.arange(512), design.dim)
    )
    spec.position_encodings.encodings = _array(positions)
    if design.norm_first:
        _set_norm(spec.layer_norm, stack.norm)
    for layer_spec, layer in zip(spec.layer, stack.layers, strict=True):
        _set_linear(layer_spec.self_attention.linear[0], layer.self.qkv)
        _set_linear(layer_spec.self_attention.linear[1], layer.self.out)
        _set_norm(layer_spec.self_attention.layer_norm, layer.norm_self)
        if hasattr(layer, "cross"):
            cross = (layer.cross.q, layer.cross.kv, layer.cross.out)
            for linear_spec, linear in zip(layer_spec.attention.linear, cross, strict=True):
                _set_linear(linear_spec, linear)
            _set_norm(layer_spec.attention.layer_norm, layer.norm_cross)
        _set_linear(layer_spec.ffn.linear_0, layer.feed.up)
        _set_linear(layer_spec.ffn.linear_1, layer.feed.down)
        _set_norm(layer_spec.ffn.layer_norm, layer.norm_feed)


def _set_linear(spec: Any, linear: Any) -> None:
    spec.weight = _array(linear.weight)
    spec.bias = _array(linear.bias)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    spec.beta = _array(norm.bias)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
