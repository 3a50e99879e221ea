"""Writing CTranslate2 model directories: a specification filled with weights, and the vocabulary."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from keepleft.attention.masks import causal, full
from keepleft.disk import atomic
from keepleft.models.design import Design, LMHead, StackDesign
from keepleft.models.embedding import Embed
from keepleft.models.stack import LayerStack
from keepleft.models.transformer import Decoder, Encoder, EncoderDecoder, Model
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import (
    LearnedPositions,
    LinearRopeScaling,
    Llama3RopeScaling,
    RelativeBias,
    Rotary,
    Sinusoidal,
    sinusoidal_encoding,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer

    from keepleft.nn.block import TransformerBlock

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
DEFAULT_SPECIAL_TOKENS = {
    "bos_token": ("<s>", "[CLS]", "<|begin_of_text|>"),
    "eos_token": ("</s>", "[SEP]", "<|endoftext|>", "<|im_end|>"),
    "unk_token": ("<unk>", "[UNK]"),
}


def write(
    model: Encoder | Decoder | EncoderDecoder,
    tokenizer: Tokenizer | None,
    folder: Path,
    *,
    quantization: str | None = None,
) -> None:
    """Write a directory for ctranslate2.Translator or, where there is no encoder, ctranslate2.Generator."""
    try:
        from ctranslate2 import specs
    except ImportError as error:
        raise ImportError(
            "writing CTranslate2 models needs the ctranslate2 package: pip install 'keepleft[export]'"
        ) from error
    design = model.design
    if problems := unsupported_features(design):
        raise ValueError(
            f"CTranslate2 cannot run this model: {'; '.join(problems)}. --to hf and --to onnx can be written"
        )
    assert design.decoder is not None
    if quantization is not None:
        model = deepcopy(model)  # CTranslate2 quantises in place
    vocab = vocabulary(tokenizer, design.vocab)
    decoder = specs.TransformerDecoderSpec(
        design.decoder.layers,
        design.heads,
        with_encoder_attention=design.is_encoder_decoder,
        **_stack_options(design, design.decoder),
        **_rotary_options(design),
    )
    spec: Any
    if isinstance(model, EncoderDecoder):
        assert design.encoder is not None
        encoder = specs.TransformerEncoderSpec(
            design.encoder.layers,
            design.stack_attention(design.encoder).heads,
            **_stack_options(design, design.encoder),
        )
        spec = specs.TransformerSpec(encoder, decoder)
        source_embedding = model.token if model.source_token is None else model.source_token
        _fill_stack(encoder, design, model.encoder, model.source_embed)
        encoder.embeddings[0].weight = source_embedding.weight
        spec.register_source_vocabulary(
            vocab if model.source_token is None else vocabulary(None, source_embedding.num_embeddings)
        )
        spec.register_target_vocabulary(vocab)
        spec.config.decoder_start_token = vocab[decoder_start_token(model)]
    else:
        assert isinstance(model, Decoder)
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(vocab)
    _fill_stack(decoder, design, model.decoder, model.embed)
    decoder.embeddings.weight = model.token.weight
    head: Any = model.head
    decoder.projection.weight, bias = head.output_weight(model.token)
    if bias is not None:
        decoder.projection.bias = bias
    if head.scale != 1.0:
        decoder.scale_outputs = head.scale
    for name, token in special_tokens(model, vocab).items():
        setattr(spec.config, name, token)
    spec.config.layer_norm_epsilon = design.norm.eps
    with torch.no_grad():
        spec.validate()
        spec.optimize(quantization=quantization)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic.atomic_folder(folder) as temp_folder:
        spec.save(str(temp_folder))
        if tokenizer is not None:
            (temp_folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")


def unsupported_features(design: Design) -> list[str]:
    """What a design has that CTranslate2 cannot express."""
    out = []
    if design.decoder is None:
        out.append("it has no decoder")
    elif not isinstance(design.head, LMHead):
        out.append(f"its head is {design.head}, not a score for every token")
    for name, stack, mask in (("encoder", design.encoder, full), ("decoder", design.decoder, causal)):
        if stack is not None and stack.mask != (mask,):
            masks = " and ".join(map(str, stack.mask))
            out.append(f"its {name} has the mask {masks}, where only {mask} is supported")
        if stack is not None and stack.final_norm and not design.norm_first:
            out.append(f"its {name} has norms after its parts and one more at the end")
    if isinstance(design.position, Rotary) and design.encoder is not None:
        out.append("its encoder has rotary positions")
    if design.token_types:
        out.append("it has token types")
    return out


def vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> list[str]:
    """The token of each id: the tokenizer's own, or the id in angle brackets where it has none."""
    token_ids = {} if tokenizer is None else tokenizer.get_vocab()
    id_to_token = {token_id: token for token, token_id in token_ids.items()}
    if id_to_token and max(id_to_token) >= vocab_size:
        raise ValueError(
            f"the tokenizer knows {max(id_to_token) + 1} tokens, the model {vocab_size}: they do not belong "
            "together"
        )
    return [id_to_token.get(token_id, f"<{token_id}>") for token_id in range(vocab_size)]


def special_tokens(model: Model, vocab: list[str]) -> dict[str, str]:
    """The special tokens of the model's configuration, or the first usual name in the vocabulary, or ""."""
    out = {}
    for name, candidates in DEFAULT_SPECIAL_TOKENS.items():
        token_id = model.notes.get(f"{name}_id")
        if isinstance(token_id, list) and token_id:
            token_id = token_id[0]
        if isinstance(token_id, int) and 0 <= token_id < len(vocab):
            out[name] = vocab[token_id]
        else:
            out[name] = next((token for token in candidates if token in vocab), "")
    return out


def decoder_start_token(model: Model) -> int:
    """The token that every target begins with."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(token_id := model.notes.get(name), int):
            return token_id
    return 0


def _stack_options(design: Design, stack: StackDesign) -> dict[str, Any]:
    from ctranslate2.specs import Activation

    attention = design.stack_attention(stack)
    feedforward = design.stack_feedforward(stack)
    return {
        "pre_norm": design.norm_first,
        "no_final_norm": not stack.final_norm,
        "activation": getattr(Activation, ACTIVATIONS[feedforward.activation]),
        "layernorm_embedding": design.norm_embedding,
        "ffn_glu": feedforward.gated,
        "relative_attention_bias": isinstance(design.position, RelativeBias),
        "rms_norm": isinstance(design.norm, RMSNorm),
        "num_heads_kv": None if attention.kv_heads == attention.heads else attention.kv_heads,
        "head_dim": None if attention.head_dim * attention.heads == design.dim else attention.head_dim,
    }


def _rotary_options(design: Design) -> dict[str, Any]:
    from ctranslate2.specs import RotaryScalingType

    if not isinstance(rotary := design.position, Rotary):
        return {}
    out: dict[str, Any] = {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": rotary.base}
    if isinstance(rotary.scaling, LinearRopeScaling):
        out |= {
            "rotary_scaling_type": RotaryScalingType.Linear,
            "rotary_scaling_factor": rotary.scaling.factor,
        }
    elif isinstance(rotary.scaling, Llama3RopeScaling):
        out |= {
            "rotary_scaling_type": RotaryScalingType.Llama3,
            "original_max_position_embeddings": rotary.scaling.original,
        }
    return out


def _fill_stack(spec: Any, design: Design, stack: LayerStack, embed: Embed) -> None:
    spec.scale_embeddings = design.dim**0.5 if design.scale_embedding else False
    if isinstance(design.position, LearnedPositions):
        spec.position_encodings.encodings = embed.position.weight[design.position.first :]
    elif isinstance(design.position, Sinusoidal):
        positions = torch.arange(design.position.length)
        spec.position_encodings.encodings = sinusoidal_encoding(positions, design.dim)
    if design.norm_embedding:
        _fill_norm(spec.layernorm_embedding, embed.norm)
    if hasattr(spec, "layer_norm"):
        _fill_norm(spec.layer_norm, stack.norm)
    layers = cast("Iterable[TransformerBlock]", stack.layers)
    for layer_spec, layer in zip(spec.layer, layers, strict=True):
        _fill_attention(layer_spec.self_attention, design, layer.norm_self, layer.self.qkv, layer.self.out)
        if isinstance(position := design.position, RelativeBias):
            layer_spec.self_attention.relative_attention_bias = stack.nearness.weight
            layer_spec.self_attention.relative_attention_max_distance = np.int32(position.farthest)
        elif isinstance(position, Rotary) and isinstance(position.scaling, Llama3RopeScaling):
            # the specification has no field for the factor, though the runtime reads it: without it, nothing
            # is scaled
            vars(layer_spec.self_attention)["rotary_scaling_factor"] = np.float32(position.scaling.factor)
            layer_spec.self_attention.rotary_low_freq_factor = position.scaling.low
            layer_spec.self_attention.rotary_high_freq_factor = position.scaling.high
        if hasattr(layer, "cross"):
            _fill_attention(
                layer_spec.attention, design, layer.norm_cross, layer.cross.q, layer.cross.kv, layer.cross.out
            )
        _fill_norm(layer_spec.ffn.layer_norm, layer.norm_feed)
        if layer.feed.gated:
            _fill_linear(layer_spec.ffn.linear_0, layer.feed.up, 0)
            _fill_linear(layer_spec.ffn.linear_0_noact, layer.feed.up, 1)
        else:
            _fill_linear(layer_spec.ffn.linear_0, layer.feed.up)
        _fill_linear(layer_spec.ffn.linear_1, layer.feed.down)


def _fill_attention(spec: Any, design: Design, norm: nn.Module, *linears: nn.Linear) -> None:
    _fill_norm(spec.layer_norm, norm)
    if not design.scale_scores:
        spec.queries_scale = 1.0
    for linear_spec, linear in zip(spec.linear, linears, strict=True):
        _fill_linear(linear_spec, linear)


def _fill_linear(spec: Any, linear: nn.Linear, half: int | None = None) -> None:
    """A matrix, or one half of two that are concatenated in ours."""
    select = lambda tensor: tensor if half is None else tensor.chunk(2)[half]
    spec.weight = select(linear.weight)
    if linear.bias is not None:
        spec.bias = select(linear.bias)


def _fill_norm(spec: Any, norm: Any) -> None:
    spec.gamma = norm.weight
    if isinstance(beta := getattr(norm, "bias", None), Tensor):
        spec.beta = beta
