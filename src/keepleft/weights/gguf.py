"""GGUF files of the LLaMA family: configuration, quantised weights and tokenizer, all in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.attention.masks import causal
from keepleft.models import presets
from keepleft.models.design import Design, Stack, Vocabulary
from keepleft.nn.feedforward import FeedForward
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import Llama3, Rotary, Stretched, frequencies
from keepleft.weights.rules import Rule, drop, interleave, linear

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.models.wholes import Decoder

FREQUENCIES = "rope_freqs.weight"


class File:
    """Its tensors, turned into floats a few rows at a time."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise ImportError("reading GGUF files needs pip install 'keepleft[gguf]'") from error
        try:
            reader = GGUFReader(path)
            self.facts: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
            self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        except (ValueError, KeyError, IndexError, OSError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise ValueError(f"{path} is not a whole GGUF file ({error}): copy or download it again") from error
        if (kind := self.facts.get("general.architecture")) != "llama":
            raise ValueError(f"{path} holds the architecture {kind!r}: of GGUF files only 'llama' is understood")

    def fact(self, name: str, default: Any = None) -> Any:
        value = self.facts.get(f"llama.{name}", default)
        if value is None:
            raise ValueError(f"the GGUF file lacks 'llama.{name}'")
        return value

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        from gguf import dequantize

        tensor = self.tensors[name]
        try:
            return torch.from_numpy(dequantize(tensor.data[begin:end], tensor.tensor_type).copy())
        except NotImplementedError as error:
            raise ValueError(f"the tensor {name!r} is quantised as {tensor.tensor_type.name}, which the gguf package "
                             "cannot undo") from error


def load(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[Decoder, Tokenizer | None]:
    """The model, its weights turned into floats, and the tokenizer inside the file."""
    from keepleft.weights.files import fill
    from keepleft.weights.gguf_tokenizer import tokenizer

    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    file = File(path)
    plan = design(file)
    model = fill(plan, rules(plan), file, prefix="", dtype=dtype, device=device)
    words = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}
    model.notes = {ours: int(file.facts[key]) for ours, word in words.items()
                   if (key := f"tokenizer.ggml.{word}_token_id") in file.facts}
    model.notes["model_type"] = "llama"
    if "tokenizer.chat_template" in file.facts:
        model.notes["chat_template"] = file.facts["tokenizer.chat_template"]
    return model, tokenizer(file.facts)  # type: ignore[return-value]


def design(file: File) -> Design:
    heads, dim = int(file.fact("attention.head_count")), int(file.fact("embedding_length"))
    width = int(file.fact("rope.dimension_count", dim // heads))
    if (experts := file.facts.get("llama.expert_count")):
        raise ValueError(f"the GGUF file has {experts} experts: mixtures of experts are not understood")
    return presets.llama.but(
        vocab=file.shape("token_embd.weight")[0], dim=dim, heads=heads, head_dim=width,
        kv_heads=int(file.fact("attention.head_count_kv", heads)),
        feedforward=FeedForward(int(file.fact("feed_forward_length")), "silu", gated=True),
        norm=RMSNorm(float(f"{file.fact('attention.layer_norm_rms_epsilon'):.6g}")),  # float32 there: 9.99e-06 is 1e-05
        position=rotary(file, width), head=Vocabulary(tied="output.weight" not in file.tensors),
        decoder=Stack(int(file.fact("block_count")), (causal,)))


def rotary(file: File, width: int) -> Rotary:
    plain = Rotary(float(file.fact("rope.freq_base", 10_000.0)), int(file.fact("context_length")))
    if FREQUENCIES in file.tensors:  # LLaMA 3.1's scaling, written out as a divisor for each wave
        divisors = file.rows(FREQUENCIES, 0, file.shape(FREQUENCIES)[0])
        choice = Rotary(plain.base, plain.length, Llama3(factor=float(divisors.max())))
        cpu = torch.device("cpu")
        if not torch.allclose(frequencies(plain, width, cpu) / divisors, frequencies(choice, width, cpu), rtol=1e-4):
            raise ValueError(f"the rotary divisors in {FREQUENCIES!r} are not LLaMA 3.1's: this scaling is not understood")
        return choice
    kind = file.facts.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return Rotary(plain.base, plain.length, Stretched(float(file.fact("rope.scaling.factor"))))
    if kind != "none":
        raise ValueError(f"rotary scaling of the kind {kind!r} is not understood: there are none and linear")
    return plain


def rules(plan: Design) -> list[Rule]:
    block, ours, shape = "blk.{i}", "decoder.layers.{i}", plan.attention
    queries, keys, width = shape.heads * shape.width, shape.kv_heads * shape.width, plan.feedforward.width
    qkv, up = f"{ours}.self.qkv.weight", f"{ours}.feed.up.weight"
    return [
        Rule("token_embd.weight", "token.weight"),
        *linear(f"{block}.attn_norm", f"{ours}.norm_self"),
        Rule(f"{block}.attn_q.weight", qkv, (0, queries), interleave(shape.heads)),
        Rule(f"{block}.attn_k.weight", qkv, (queries, queries + keys), interleave(shape.kv_heads)),
        Rule(f"{block}.attn_v.weight", qkv, (queries + keys, queries + 2 * keys)),
        *linear(f"{block}.attn_output", f"{ours}.self.out"),
        *linear(f"{block}.ffn_norm", f"{ours}.norm_feed"),
        Rule(f"{block}.ffn_gate.weight", up, (0, width)),
        Rule(f"{block}.ffn_up.weight", up, (width, 2 * width)),
        *linear(f"{block}.ffn_down", f"{ours}.feed.down"),
        *linear("output_norm", "decoder.norm"),
        Rule("output.weight", "head.weight"),
        drop(FREQUENCIES),
    ]
