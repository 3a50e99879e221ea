"""Writing GGUF files of the LLaMA family: configuration, weights and tokenizer in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.masks import causal
from keepleft.disk import atomic
from keepleft.models import presets
from keepleft.models.design import Design, LMHead, NormalInit, StackDesign
from keepleft.models.transformer import Decoder, Model
from keepleft.nn.feedforward import FeedForward
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import LinearRopeScaling, Llama3RopeScaling, Rotary, rope_frequencies
from keepleft.weights.gguf import ROPE_FREQS_TENSOR, rules
from keepleft.weights.gguf_tokenizer_writer import tokenizer_metadata
from keepleft.weights.rules import export_tensors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


def write(model: Model, tokenizer: Tokenizer | None, path: Path, *, dtype: str = "f16") -> None:
    """Write a model as one file.

    Norms stay in float32. Where q8_0 cannot split rows into blocks of 32, they are float16.
    """
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "writing GGUF files needs the gguf package: pip install 'keepleft[gguf]'"
        ) from error
    if dtype not in DTYPES:
        raise ValueError(
            f"GGUF weights of the type {dtype!r} cannot be written: there are {', '.join(DTYPES)}"
        )
    design = model.design
    is_decoder = isinstance(model, Decoder)
    problems = unsupported_features(design) if is_decoder else [f"it is an {type(model).__name__}"]
    if problems:
        reason = "; ".join(problems)
        raise ValueError(
            f"GGUF files are written for the LLaMA family alone, and this model is of another: {reason}. "
            "--to hf, --to onnx and, for most, --to ctranslate2 can be written"
        )
    metadata = {} if tokenizer is None else tokenizer_metadata(tokenizer, design.vocab, model.notes)
    quant_type = gguf.GGMLQuantizationType[DTYPES[dtype]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.atomic_file(path) as temp_path:
        writer = gguf.GGUFWriter(temp_path, "llama")
        file_type = gguf.LlamaFileType[("ALL_" if dtype == "f32" else "MOSTLY_") + DTYPES[dtype]]
        _add_parameters(writer, design, int(file_type))
        for name, value in metadata.items():
            _add_metadata(writer, name, value)
        assert isinstance(design.position, Rotary)
        if isinstance(design.position.scaling, Llama3RopeScaling):
            writer.add_tensor(ROPE_FREQS_TENSOR, rope_factors(design.position, design.head_width).numpy())
        state = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
        for name, tensor in export_tensors(rules(design), state):
            data, tensor_type = tensor.detach().cpu().float().numpy(), quant_type
            if data.ndim == 1:
                tensor_type = gguf.GGMLQuantizationType.F32
            elif quant_type == gguf.GGMLQuantizationType.Q8_0 and data.shape[-1] % 32:
                tensor_type = gguf.GGMLQuantizationType.F16
            writer.add_tensor(name, gguf.quants.quantize(data, tensor_type), raw_dtype=tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def unsupported_features(design: Design) -> list[str]:
    """The fields in which a design differs from what a GGUF file can express."""
    plain_heads = (LMHead(), LMHead(tied=False))
    reference = presets.llama.but(
        vocab=design.vocab,
        dim=design.dim,
        heads=design.heads,
        kv_heads=design.kv_heads,
        head_dim=design.head_dim,
        feedforward=FeedForward(design.feedforward.width, "silu", gated=True),
        norm=RMSNorm(design.norm.eps),
        position=design.position if isinstance(design.position, Rotary) else Rotary(),
        head=design.head if design.head in plain_heads else LMHead(),
        decoder=StackDesign(design.decoder.layers if design.decoder else 1, (causal,)),
    )
    design = design.but(
        dropout=reference.dropout, attention_dropout=reference.attention_dropout, initial=NormalInit()
    )
    reference = reference.but(initial=NormalInit())
    out = [
        f"its {name} is {getattr(design, name)}"
        for name in design.__dataclass_fields__
        if getattr(design, name) != getattr(reference, name)
    ]
    if isinstance(design.position, Rotary) and isinstance(
        scaling := design.position.scaling, Llama3RopeScaling
    ):
        max_factor = float(rope_factors(design.position, design.head_width).max())
        if scaling != Llama3RopeScaling(scaling.factor) or max_factor != scaling.factor:
            out.append(f"its rotary scaling is {scaling}, where a file holds only the factor of LLaMA 3.1's")
    return out


def rope_factors(rotary: Rotary, head_dim: int) -> Tensor:
    """What LLaMA 3.1's scaling divides each frequency by: (head_dim / 2,) in float32."""
    assert isinstance(rotary.scaling, Llama3RopeScaling)
    cpu, factor = torch.device("cpu"), rotary.scaling.factor
    unscaled = rope_frequencies(Rotary(rotary.base, rotary.length), head_dim, cpu)
    ratios = unscaled / rope_frequencies(rotary, head_dim, cpu)
    at_factor = (ratios - factor).abs() < 1e-5 * factor  # rounded, it would read back as another factor
    return torch.where(at_factor, torch.tensor(factor), ratios)


def _add_parameters(writer: Any, design: Design, file_type: int) -> None:
    attention, position = design.attention, design.position
    assert isinstance(position, Rotary)
    assert design.decoder is not None
    writer.add_file_type(file_type)
    writer.add_vocab_size(design.vocab)
    writer.add_context_length(position.length)
    writer.add_embedding_length(design.dim)
    writer.add_block_count(design.decoder.layers)
    writer.add_feed_forward_length(design.feedforward.width)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_layer_norm_rms_eps(design.norm.eps)
    writer.add_rope_dimension_count(attention.head_dim)
    writer.add_rope_freq_base(position.base)
    if isinstance(position.scaling, LinearRopeScaling):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", position.scaling.factor)


def _add_metadata(writer: Any, name: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    add[type(value)](name, value)
