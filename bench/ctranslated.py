"""Our weights in CTranslate2's form: GPT-2's kind of decoder, Marian's kind of encoder-decoder."""

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
NAMES = ("<s>", "</s>", "<unk>")  # its special tokens stand first; the others are called by their numbers


def write(model: Any, folder: Path) -> Path:
    """A directory that Translator or Generator reads, in float32."""
    design, vocabulary = model.design, [*NAMES, *map(str, range(len(NAMES), model.design.vocab))]
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
        spec.config.decoder_start_token = NAMES[0]
        _stack(spec.encoder, model.encoder, model.source_embed, design)
        spec.encoder.embeddings[0].weight = _array(model.token.weight)
    _stack(spec.decoder, model.decoder, model.embed, design)
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


def opened(folder: Path, design: kl.Design, kind: str, threads: int) -> Any:
    made = ctranslate2.Translator if design.is_encoder_decoder else ctranslate2.Generator
    return made(str(folder), compute_type=kind, inter_threads=1, intra_threads=threads)


def said(row: torch.Tensor) -> list[str]:
    """Tokens under the names that they have there."""
    return [NAMES[n] if n < len(NAMES) else str(n) for n in row.tolist()]


def _stack(theirs: Any, ours: Any, embed: Any, design: kl.Design) -> None:
    theirs.scale_embeddings = design.scale_embedding
    places = (
        embed.position.weight if design.max_positions else sinusoidal_encoding(torch.arange(512), design.dim)
    )
    theirs.position_encodings.encodings = _array(places)
    if design.norm_first:
        _norm(theirs.layer_norm, ours.norm)
    for spec, layer in zip(theirs.layer, ours.layers, strict=True):
        _linear(spec.self_attention.linear[0], layer.self.qkv)
        _linear(spec.self_attention.linear[1], layer.self.out)
        _norm(spec.self_attention.layer_norm, layer.norm_self)
        if hasattr(layer, "cross"):
            for part, linear in zip(
                spec.attention.linear, (layer.cross.q, layer.cross.kv, layer.cross.out), strict=True
            ):
                _linear(part, linear)
            _norm(spec.attention.layer_norm, layer.norm_cross)
        _linear(spec.ffn.linear_0, layer.feed.up)
        _linear(spec.ffn.linear_1, layer.feed.down)
        _norm(spec.ffn.layer_norm, layer.norm_feed)


def _linear(spec: Any, linear: Any) -> None:
    spec.weight = _array(linear.weight)
    spec.bias = _array(linear.bias)


def _norm(spec: Any, norm: Any) -> None:
    spec.gamma = _array(norm.weight)
    spec.beta = _array(norm.bias)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.detach().numpy()
