"""Writing CTranslate2 model directories: a specification filled from our weights, and the vocabulary."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from keepleft.attention.masks import causal, full
from keepleft.disk import atomic
from keepleft.models.design import Design, Stack, Vocabulary
from keepleft.models.wholes import Decoder, Encoder, EncoderDecoder
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import Learned, Llama3, RelativeBias, Rotary, Sinusoidal, Stretched, waves

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_tanh": "GELUTanh", "silu": "SWISH"}
USUAL = {"bos_token": ("<s>", "[CLS]", "<|begin_of_text|>"), "eos_token": ("</s>", "[SEP]", "<|endoftext|>", "<|im_end|>"),
         "unk_token": ("<unk>", "[UNK]")}


def write(model: Encoder | Decoder | EncoderDecoder, tokenizer: Tokenizer | None, folder: Path, *,
          quantization: str | None = None) -> None:
    """A directory for ctranslate2.Translator, or for ctranslate2.Generator where there is no encoder."""
    try:
        from ctranslate2 import specs
    except ImportError as error:
        raise ImportError("writing CTranslate2 models needs the ctranslate2 package: pip install 'keepleft[export]'") from error
    design = model.design
    if lacking := gaps(design):
        raise ValueError(f"CTranslate2 cannot run this model: {'; '.join(lacking)}. --to hf and --to onnx can be written")
    assert design.decoder is not None
    if quantization is not None:
        model = deepcopy(model)  # they quantise in place
    words = vocabulary(tokenizer, design.vocab)
    decoder = specs.TransformerDecoderSpec(design.decoder.layers, design.heads,
                                           with_encoder_attention=design.encoder is not None,
                                           **_shape(design, design.decoder), **_rotary(design))
    spec: Any
    if isinstance(model, EncoderDecoder):
        assert design.encoder is not None
        encoder = specs.TransformerEncoderSpec(design.encoder.layers, design.heads, **_shape(design, design.encoder))
        spec = specs.TransformerSpec(encoder, decoder)
        table = model.token if model.source_token is None else model.source_token
        _stack(encoder, design, model.encoder, model.source_embed)
        encoder.embeddings[0].weight = table.weight
        spec.register_source_vocabulary(words if model.source_token is None else vocabulary(None, table.num_embeddings))
        spec.register_target_vocabulary(words)
        spec.config.decoder_start_token = words[start_of(model)]
    else:
        assert isinstance(model, Decoder)
        spec = specs.TransformerDecoderModelSpec(decoder)
        spec.register_vocabulary(words)
    _stack(decoder, design, model.decoder, model.embed)
    decoder.embeddings.weight = model.token.weight
    head: Any = model.head
    decoder.projection.weight, bias = head.matrix(model.token)
    if bias is not None:
        decoder.projection.bias = bias
    if head.scale != 1.0:
        decoder.scale_outputs = head.scale
    for name, word in special(model, words).items():
        setattr(spec.config, name, word)
    spec.config.layer_norm_epsilon = design.norm.eps
    with torch.no_grad():
        spec.validate()
        spec.optimize(quantization=quantization)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic.made(folder) as part:
        spec.save(str(part))
        if tokenizer is not None:
            (part / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")


def gaps(design: Design) -> list[str]:
    """What CTranslate2 has no words for, of all that a design can say."""
    out = []
    if design.decoder is None:
        out.append("it has no decoder")
    elif not isinstance(design.head, Vocabulary):
        out.append(f"its head is {design.head}, not a score for every token")
    for name, stack, mask in (("encoder", design.encoder, full), ("decoder", design.decoder, causal)):
        if stack is not None and stack.mask != (mask,):
            out.append(f"its {name} looks through {' and '.join(map(str, stack.mask))}, where only {mask} is known")
        if stack is not None and stack.final_norm and not design.norm_first:
            out.append(f"its {name} has norms behind its parts and one more at the end")
    if isinstance(design.position, Rotary) and design.encoder is not None:
        out.append("its encoder has rotary positions")
    if design.kinds:
        out.append("it tells kinds of token apart")
    return out


def vocabulary(tokenizer: Tokenizer | None, size: int) -> list[str]:
    """A word for each number: the tokenizer's own, and the number itself in brackets where it has none."""
    words = {} if tokenizer is None else {number: word for word, number in tokenizer.get_vocab().items()}
    if words and max(words) >= size:
        raise ValueError(f"the tokenizer knows {max(words) + 1} tokens, the model {size}: they do not belong together")
    return [words.get(number, f"<{number}>") for number in range(size)]


def special(model: Any, words: list[str]) -> dict[str, str]:
    """The special tokens of its configuration, or what such tokens are mostly called; "" where there is none."""
    out = {}
    for name, usual in USUAL.items():
        number = model.notes.get(f"{name}_id")
        number = number[0] if isinstance(number, list) and number else number
        known = isinstance(number, int) and 0 <= number < len(words)
        out[name] = words[number] if known else next((word for word in usual if word in words), "")
    return out


def start_of(model: Any) -> int:
    """The token that a target begins with."""
    for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
        if isinstance(number := model.notes.get(name), int):
            return number
    return 0


def _shape(design: Design, stack: Stack) -> dict[str, Any]:
    from ctranslate2.specs import Activation

    width = design.head_width
    return {"pre_norm": design.norm_first, "no_final_norm": not stack.final_norm,
            "activation": getattr(Activation, ACTIVATIONS[design.feedforward.activation]),
            "layernorm_embedding": design.norm_embedding, "ffn_glu": design.feedforward.gated,
            "relative_attention_bias": isinstance(design.position, RelativeBias),
            "rms_norm": isinstance(design.norm, RMSNorm), "num_heads_kv": design.kv_heads,
            "head_dim": width if width * design.heads != design.dim else None}


def _rotary(design: Design) -> dict[str, Any]:
    from ctranslate2.specs import RotaryScalingType

    if not isinstance(choice := design.position, Rotary):
        return {}
    out: dict[str, Any] = {"rotary_dim": 0, "rotary_interleave": False, "rotary_base": choice.base}
    if isinstance(choice.scaling, Stretched):
        out |= {"rotary_scaling_type": RotaryScalingType.Linear, "rotary_scaling_factor": choice.scaling.factor}
    elif isinstance(choice.scaling, Llama3):
        out |= {"rotary_scaling_type": RotaryScalingType.Llama3, "original_max_position_embeddings": choice.scaling.original}
    return out


def _stack(spec: Any, design: Design, stack: Any, embed: Any) -> None:
    spec.scale_embeddings = design.dim ** 0.5 if design.scale_embedding else False
    if isinstance(design.position, Learned):
        spec.position_encodings.encodings = embed.position.weight[design.position.first:]
    elif isinstance(design.position, Sinusoidal):
        spec.position_encodings.encodings = waves(torch.arange(design.position.length), design.dim)
    if design.norm_embedding:
        _norm(spec.layernorm_embedding, embed.norm)
    if hasattr(spec, "layer_norm"):
        _norm(spec.layer_norm, stack.norm)
    for theirs, ours in zip(spec.layer, stack.layers, strict=True):
        _attention(theirs.self_attention, design, ours.norm_self, ours.self.qkv, ours.self.out)
        if isinstance(choice := design.position, RelativeBias):
            theirs.self_attention.relative_attention_bias = stack.nearness.weight
            theirs.self_attention.relative_attention_max_distance = np.int32(choice.farthest)
        elif isinstance(choice, Rotary) and isinstance(choice.scaling, Llama3):
            # their specification has no place for the factor, though their model reads it: without it nothing is scaled
            vars(theirs.self_attention)["rotary_scaling_factor"] = np.float32(choice.scaling.factor)
            theirs.self_attention.rotary_low_freq_factor = choice.scaling.low
            theirs.self_attention.rotary_high_freq_factor = choice.scaling.high
        if hasattr(ours, "cross"):
            _attention(theirs.attention, design, ours.norm_cross, ours.cross.q, ours.cross.kv, ours.cross.out)
        _norm(theirs.ffn.layer_norm, ours.norm_feed)
        if design.feedforward.gated:
            for part, half in zip((theirs.ffn.linear_0, theirs.ffn.linear_0_noact), (0, 1), strict=True):
                _linear(part, ours.feed.up, half)
        else:
            _linear(theirs.ffn.linear_0, ours.feed.up)
        _linear(theirs.ffn.linear_1, ours.feed.down)


def _attention(spec: Any, design: Design, norm: nn.Module, *linears: nn.Linear) -> None:
    _norm(spec.layer_norm, norm)
    if not design.scale_scores:
        spec.queries_scale = 1.0
    for theirs, ours in zip(spec.linear, linears, strict=True):
        _linear(theirs, ours)


def _linear(spec: Any, ours: nn.Linear, half: int | None = None) -> None:
    """One matrix, or one half of two that we keep as one."""
    pick = lambda tensor: tensor if half is None else tensor.chunk(2)[half]
    spec.weight = pick(ours.weight)
    if ours.bias is not None:
        spec.bias = pick(ours.bias)


def _norm(spec: Any, ours: Any) -> None:
    spec.gamma = ours.weight
    if isinstance(beta := getattr(ours, "bias", None), Tensor):
        spec.beta = beta
