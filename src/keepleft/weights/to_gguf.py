"""Writing GGUF files of the LLaMA family: configuration, weights and tokenizer, all in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.masks import causal
from keepleft.disk import atomic
from keepleft.models import presets
from keepleft.models.design import Design, Normal, Stack, Vocabulary
from keepleft.models.wholes import Decoder
from keepleft.nn.feedforward import FeedForward
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import Llama3, Rotary, Stretched, frequencies
from keepleft.weights.gguf import FREQUENCIES, rules
from keepleft.weights.gguf_words import words
from keepleft.weights.rules import give

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DTYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


def write(model: Any, tokenizer: Tokenizer | None, path: Path, *, dtype: str = "f16") -> None:
    """The model as one file; its norms stay in float32, and so does what q8_0 cannot cut into blocks of 32 (as float16)."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("writing GGUF files needs the gguf package: pip install 'keepleft[gguf]'") from error
    if dtype not in DTYPES:
        raise ValueError(f"GGUF weights of the type {dtype!r} cannot be written: there are {', '.join(DTYPES)}")
    design: Design = model.design
    if not isinstance(model, Decoder) or (lacking := gaps(design)):
        why = "; ".join(lacking) if isinstance(model, Decoder) else f"it is an {type(model).__name__}"
        raise ValueError(f"GGUF files are written for the LLaMA family alone, and this model is of another: {why}. "
                         "--to hf, --to onnx and, for most, --to ctranslate2 can be written")
    told = {} if tokenizer is None else words(tokenizer, design.vocab, model.notes)
    kind = gguf.GGMLQuantizationType[DTYPES[dtype]]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.written(path) as part:
        writer = gguf.GGUFWriter(part, "llama")
        _facts(writer, design, int(gguf.LlamaFileType[("ALL_" if dtype == "f32" else "MOSTLY_") + DTYPES[dtype]]))
        for name, value in told.items():
            _fact(writer, name, value)
        assert isinstance(design.position, Rotary)
        if isinstance(design.position.scaling, Llama3):
            writer.add_tensor(FREQUENCIES, divisors(design.position, design.head_width).numpy())
        state = {name: tensor for name, tensor in model.state_dict().items() if tensor is not None}
        for name, tensor in give(rules(design), state):
            data, own = tensor.detach().cpu().float().numpy(), kind
            if data.ndim == 1:
                own = gguf.GGMLQuantizationType.F32
            elif kind == gguf.GGMLQuantizationType.Q8_0 and data.shape[-1] % 32:
                own = gguf.GGMLQuantizationType.F16
            writer.add_tensor(name, gguf.quants.quantize(data, own), raw_dtype=own)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def gaps(design: Design) -> list[str]:
    """In what a design differs from all that such a file can say."""
    plain = presets.llama.but(
        vocab=design.vocab, dim=design.dim, heads=design.heads, kv_heads=design.kv_heads, head_dim=design.head_dim,
        feedforward=FeedForward(design.feedforward.width, "silu", gated=True), norm=RMSNorm(design.norm.eps),
        position=design.position if isinstance(design.position, Rotary) else Rotary(),
        head=design.head if isinstance(design.head, Vocabulary) and design.head in (Vocabulary(), Vocabulary(tied=False))
        else Vocabulary(), decoder=Stack(design.decoder.layers if design.decoder else 1, (causal,)))
    design = design.but(dropout=plain.dropout, attention_dropout=plain.attention_dropout, initial=Normal())
    plain = plain.but(initial=Normal())
    out = [f"its {name} is {getattr(design, name)}" for name in design.__dataclass_fields__
           if getattr(design, name) != getattr(plain, name)]
    if isinstance(design.position, Rotary) and isinstance(scaling := design.position.scaling, Llama3):
        farthest = float(divisors(design.position, design.head_width).max())
        if scaling != Llama3(scaling.factor) or farthest != scaling.factor:
            out.append(f"its rotary scaling is {scaling}, where only the factor of LLaMA 3.1's can be told from a file")
    return out


def divisors(choice: Rotary, width: int) -> Tensor:
    """(width / 2,) what LLaMA 3.1's scaling divides the speed of each wave by, in float32"""
    assert isinstance(choice.scaling, Llama3)
    cpu, factor = torch.device("cpu"), choice.scaling.factor
    shares = frequencies(Rotary(choice.base, choice.length), width, cpu) / frequencies(choice, width, cpu)
    near = (shares - factor).abs() < 1e-5 * factor  # left rounded, it would read back as another factor
    return torch.where(near, torch.tensor(factor), shares)


def _facts(writer: Any, design: Design, file_type: int) -> None:
    shape, position = design.attention, design.position
    assert isinstance(position, Rotary)
    assert design.decoder is not None
    writer.add_file_type(file_type)
    writer.add_vocab_size(design.vocab)
    writer.add_context_length(position.length)
    writer.add_embedding_length(design.dim)
    writer.add_block_count(design.decoder.layers)
    writer.add_feed_forward_length(design.feedforward.width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.width)
    writer.add_value_length(shape.width)
    writer.add_layer_norm_rms_eps(design.norm.eps)
    writer.add_rope_dimension_count(shape.width)
    writer.add_rope_freq_base(position.base)
    if isinstance(position.scaling, Stretched):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", position.scaling.factor)


def _fact(writer: Any, name: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}[type(value)]
    add(name, value)
