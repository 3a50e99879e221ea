"""Reading GGUF files of the LLaMA family: configuration, quantised weights and tokenizer in one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from keepleft import checks
from keepleft.attention.masks import causal
from keepleft.disk.missing_file import missing_file_message
from keepleft.models import presets
from keepleft.models.design import Design, LMHead, StackDesign
from keepleft.nn.feedforward import FeedForward
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import LinearRopeScaling, Llama3RopeScaling, Rotary, rope_frequencies
from keepleft.weights import gguf_reader
from keepleft.weights.gguf_tokenizer import SPECIAL_TOKEN_KEYS, read_tokenizer
from keepleft.weights.rules import Rule, drop, interleave, linear

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.models.transformer import Decoder

ROPE_FREQS_TENSOR = "rope_freqs.weight"
DEQUANTIZE_CHUNK = 1 << 17  # numbers dequantised at a time: as many as a processor's caches hold


class GGUFFile:
    """The metadata and tensors of a file; tensors are dequantised a few rows at a time."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError(
                "reading GGUF files needs the gguf package: pip install 'keepleft[gguf]'"
            ) from error

        self.dequantize = gguf.dequantize
        self.quant_sizes = gguf.GGML_QUANT_SIZES
        try:
            self.metadata, self.tensors = gguf_reader.read(path)
        except (ValueError, KeyError, OSError, MemoryError, OverflowError, RecursionError) as error:
            raise ValueError(
                f"{path} is not a complete GGUF file ({error}): copy or download it again"
            ) from error
        if (architecture := self.metadata.get("general.architecture")) != "llama":
            raise ValueError(
                f"{path} holds the architecture {architecture!r}: of GGUF files only 'llama' is understood"
            )

    def get_metadata(self, name: str, default: Any = None) -> Any:
        """The value of llama.{name}; a ValueError where it is missing and has no default."""
        value = self.metadata.get(f"llama.{name}", default)
        if value is None:
            raise ValueError(f"the file lacks 'llama.{name}'")
        return value

    def get_int(self, name: str, default: int | None = None) -> int:
        checks.check_int(f"'llama.{name}'", value := self.get_metadata(name, default))
        return value

    def get_float(self, name: str, default: float | None = None) -> float:
        checks.check_number(f"'llama.{name}'", value := self.get_metadata(name, default), above=0)
        return float(value)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        quant_type, shape, data = self.tensors[name]
        flat = (data if len(shape) == 1 else data[begin:end]).reshape(-1)
        block_size, block_bytes = self.quant_sizes[quant_type]  # a block is quantised by itself
        out = np.empty(len(flat) // block_bytes * block_size, np.float32)
        try:
            for start in range(0, len(out), DEQUANTIZE_CHUNK):
                chunk = out[start : start + DEQUANTIZE_CHUNK]
                first_byte = start // block_size * block_bytes
                num_bytes = len(chunk) // block_size * block_bytes
                chunk[:] = self.dequantize(flat[None, first_byte : first_byte + num_bytes], quant_type)[0]
        except NotImplementedError as error:
            raise ValueError(
                f"the tensor {name!r} is quantised as {quant_type.name}, which the gguf package cannot undo"
            ) from error
        return torch.from_numpy(out[begin:end] if len(shape) == 1 else out.reshape(-1, *shape[1:]))


def load(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[Decoder, Tokenizer | None]:
    """The model, its weights dequantised, and the tokenizer inside the file."""
    from keepleft.weights.model_directory import load_weights

    if not path.exists():
        raise FileNotFoundError(missing_file_message(path))
    file = GGUFFile(path)
    try:
        tokenizer = read_tokenizer(file.metadata)
        design = read_design(file)
        if tokenizer is not None and tokenizer.get_vocab_size() > design.vocab:
            raise ValueError(
                f"'tokenizer.ggml.tokens' are {tokenizer.get_vocab_size()}, 'token_embd.weight' knows "
                f"{design.vocab}"
            )
        model = load_weights(design, rules(design), file, prefix="", dtype=dtype, device=device)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    model.notes = {
        config_key: int(file.metadata[key])
        for config_key, gguf_name in SPECIAL_TOKEN_KEYS.items()
        if (key := f"tokenizer.ggml.{gguf_name}_token_id") in file.metadata
    }
    model.notes["model_type"] = "llama"
    if "tokenizer.chat_template" in file.metadata:
        model.notes["chat_template"] = file.metadata["tokenizer.chat_template"]
    return model, tokenizer  # type: ignore[return-value]


def read_design(file: GGUFFile) -> Design:
    heads = file.get_int("attention.head_count")
    dim = file.get_int("embedding_length")
    if "llama.rope.dimension_count" not in file.metadata and dim % heads:
        raise ValueError(f"'llama.embedding_length' {dim} does not divide into {heads} heads")
    head_dim = file.get_int("rope.dimension_count", dim // heads)
    if "token_embd.weight" not in file.tensors:
        raise ValueError("the file lacks the tensor 'token_embd.weight'")
    if experts := file.metadata.get("llama.expert_count"):
        raise ValueError(f"the file has {experts} experts: mixtures of experts are not understood")
    # a float32 in the file: 9.99e-06 is 1e-05
    eps = float(f"{file.get_float('attention.layer_norm_rms_epsilon'):.6g}")
    return presets.llama.but(
        vocab=file.shape("token_embd.weight")[0],
        dim=dim,
        heads=heads,
        head_dim=head_dim,
        kv_heads=file.get_int("attention.head_count_kv", heads),
        feedforward=FeedForward(file.get_int("feed_forward_length"), "silu", gated=True),
        norm=RMSNorm(eps),
        position=read_rotary(file, head_dim),
        head=LMHead(tied="output.weight" not in file.tensors),
        decoder=StackDesign(file.get_int("block_count"), (causal,)),
    )


def read_rotary(file: GGUFFile, head_dim: int) -> Rotary:
    unscaled = Rotary(file.get_float("rope.freq_base", 10_000.0), file.get_int("context_length"))
    if ROPE_FREQS_TENSOR in file.tensors:  # LLaMA 3.1's scaling, as a divisor of each frequency
        divisors = file.rows(ROPE_FREQS_TENSOR, 0, file.shape(ROPE_FREQS_TENSOR)[0])
        if divisors.shape != (head_dim // 2,) or not (divisors > 0).all():
            raise ValueError(
                f"{ROPE_FREQS_TENSOR!r} has shape {tuple(divisors.shape)}: {head_dim // 2} numbers above 0 "
                "are needed"
            )
        scaled = Rotary(unscaled.base, unscaled.length, Llama3RopeScaling(factor=float(divisors.max())))
        cpu = torch.device("cpu")
        if not torch.allclose(
            rope_frequencies(unscaled, head_dim, cpu) / divisors,
            rope_frequencies(scaled, head_dim, cpu),
            rtol=1e-4,
        ):
            raise ValueError(
                f"the rotary divisors in {ROPE_FREQS_TENSOR!r} are not LLaMA 3.1's: this scaling is not "
                "understood"
            )
        return scaled
    scaling_type = file.metadata.get("llama.rope.scaling.type", "none")
    if scaling_type == "linear":
        linear_scaling = LinearRopeScaling(file.get_float("rope.scaling.factor"))
        return Rotary(unscaled.base, unscaled.length, linear_scaling)
    if scaling_type != "none":
        raise ValueError(
            f"rotary scaling of the kind {scaling_type!r} is not understood: there are none and linear"
        )
    return unscaled


def rules(design: Design) -> list[Rule]:
    block = "blk.{i}"
    layer = "decoder.layers.{i}"
    attention = design.attention
    q_size = attention.heads * attention.head_dim
    kv_size = attention.kv_heads * attention.head_dim
    ffn_width = design.feedforward.width
    qkv = f"{layer}.self.qkv.weight"
    up = f"{layer}.feed.up.weight"
    return [
        Rule("token_embd.weight", "token.weight"),
        *linear(f"{block}.attn_norm", f"{layer}.norm_self"),
        Rule(f"{block}.attn_q.weight", qkv, (0, q_size), interleave(attention.heads)),
        Rule(f"{block}.attn_k.weight", qkv, (q_size, q_size + kv_size), interleave(attention.kv_heads)),
        Rule(f"{block}.attn_v.weight", qkv, (q_size + kv_size, q_size + 2 * kv_size)),
        *linear(f"{block}.attn_output", f"{layer}.self.out"),
        *linear(f"{block}.ffn_norm", f"{layer}.norm_feed"),
        Rule(f"{block}.ffn_gate.weight", up, (0, ffn_width)),
        Rule(f"{block}.ffn_up.weight", up, (ffn_width, 2 * ffn_width)),
        *linear(f"{block}.ffn_down", f"{layer}.feed.down"),
        *linear("output_norm", "decoder.norm"),
        Rule("output.weight", "head.weight"),
        drop(ROPE_FREQS_TENSOR),
    ]
