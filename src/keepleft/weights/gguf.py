"""GGUF files of the LLaMA family: configuration, quantised weights and tokenizer, all in one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from keepleft.attention.masks import causal
from keepleft.models import presets
from keepleft.models.design import Design, Stack, Vocabulary
from keepleft.nn import sense
from keepleft.nn.feedforward import FeedForward
from keepleft.nn.norm import RMSNorm
from keepleft.nn.position import Llama3, Rotary, Stretched, frequencies
from keepleft.weights import gguf_file
from keepleft.weights.rules import Rule, drop, interleave, linear

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from keepleft.models.wholes import Decoder

FREQUENCIES = "rope_freqs.weight"


PIECE = 1 << 17  # numbers turned into floats at a time: as many as the caches of a processor hold


class File:
    """Its facts, and its tensors, turned into floats a few rows at a time."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            raise ImportError("reading GGUF files needs the gguf package: pip install gguf") from error

        self.floats, self.sizes = gguf.dequantize, gguf.GGML_QUANT_SIZES
        try:
            self.facts, self.tensors = gguf_file.read(path)
        except (ValueError, KeyError, OSError, MemoryError, OverflowError, RecursionError) as error:
            raise ValueError(f"{path} is not a whole GGUF file ({error}): copy or download it again") from error
        if (kind := self.facts.get("general.architecture")) != "llama":
            raise ValueError(f"{path} holds the architecture {kind!r}: of GGUF files only 'llama' is understood")

    def fact(self, name: str, default: Any = None) -> Any:
        value = self.facts.get(f"llama.{name}", default)
        if value is None:
            raise ValueError(f"the file lacks 'llama.{name}'")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        sense.whole(f"'llama.{name}'", value := self.fact(name, default))
        return value

    def real(self, name: str, default: float | None = None) -> float:
        sense.real(f"'llama.{name}'", value := self.fact(name, default), above=0)
        return float(value)

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        kind, shape, data = self.tensors[name]
        flat = (data if len(shape) == 1 else data[begin:end]).reshape(-1)
        block, size = self.sizes[kind]  # so many numbers in so many bytes, each block by itself
        out = np.empty(len(flat) // size * block, np.float32)
        try:
            for first in range(0, len(out), PIECE):
                here = out[first:first + PIECE]
                here[:] = self.floats(flat[None, first // block * size:][:, :len(here) // block * size], kind)[0]
        except NotImplementedError as error:
            raise ValueError(f"the tensor {name!r} is quantised as {kind.name}, which the gguf package cannot undo") from error
        return torch.from_numpy(out[begin:end] if len(shape) == 1 else out.reshape(-1, *shape[1:]))


def load(path: Path, *, dtype: torch.dtype, device: torch.device) -> tuple[Decoder, Tokenizer | None]:
    """The model, its weights turned into floats, and the tokenizer inside the file."""
    from keepleft.weights.files import fill
    from keepleft.weights.gguf_tokenizer import tokenizer

    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    file = File(path)
    try:
        words = tokenizer(file.facts)
        plan = design(file)
        if words is not None and words.get_vocab_size() > plan.vocab:
            raise ValueError(f"'tokenizer.ggml.tokens' are {words.get_vocab_size()}, 'token_embd.weight' knows {plan.vocab}")
        model = fill(plan, rules(plan), file, prefix="", dtype=dtype, device=device)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    special = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding", "unk_token_id": "unknown"}
    model.notes = {ours: int(file.facts[key]) for ours, word in special.items()
                   if (key := f"tokenizer.ggml.{word}_token_id") in file.facts}
    model.notes["model_type"] = "llama"
    if "tokenizer.chat_template" in file.facts:
        model.notes["chat_template"] = file.facts["tokenizer.chat_template"]
    return model, words  # type: ignore[return-value]


def design(file: File) -> Design:
    heads, dim = file.whole("attention.head_count"), file.whole("embedding_length")
    if "llama.rope.dimension_count" not in file.facts and dim % heads:
        raise ValueError(f"'llama.embedding_length' {dim} does not divide into {heads} heads")
    width = file.whole("rope.dimension_count", dim // heads)
    if "token_embd.weight" not in file.tensors:
        raise ValueError("the file lacks the tensor 'token_embd.weight'")
    if (experts := file.facts.get("llama.expert_count")):
        raise ValueError(f"the file has {experts} experts: mixtures of experts are not understood")
    return presets.llama.but(
        vocab=file.shape("token_embd.weight")[0], dim=dim, heads=heads, head_dim=width,
        kv_heads=file.whole("attention.head_count_kv", heads),
        feedforward=FeedForward(file.whole("feed_forward_length"), "silu", gated=True),
        norm=RMSNorm(float(f"{file.real('attention.layer_norm_rms_epsilon'):.6g}")),  # float32 there: 9.99e-06 is 1e-05
        position=rotary(file, width), head=Vocabulary(tied="output.weight" not in file.tensors),
        decoder=Stack(file.whole("block_count"), (causal,)))


def rotary(file: File, width: int) -> Rotary:
    plain = Rotary(file.real("rope.freq_base", 10_000.0), file.whole("context_length"))
    if FREQUENCIES in file.tensors:  # LLaMA 3.1's scaling, written out as a divisor for each wave
        divisors = file.rows(FREQUENCIES, 0, file.shape(FREQUENCIES)[0])
        if divisors.shape != (width // 2,) or not (divisors > 0).all():
            raise ValueError(f"{FREQUENCIES!r} has shape {tuple(divisors.shape)}: {width // 2} numbers above 0 are needed")
        choice = Rotary(plain.base, plain.length, Llama3(factor=float(divisors.max())))
        cpu = torch.device("cpu")
        if not torch.allclose(frequencies(plain, width, cpu) / divisors, frequencies(choice, width, cpu), rtol=1e-4):
            raise ValueError(f"the rotary divisors in {FREQUENCIES!r} are not LLaMA 3.1's: this scaling is not understood")
        return choice
    kind = file.facts.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return Rotary(plain.base, plain.length, Stretched(file.real("rope.scaling.factor")))
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
