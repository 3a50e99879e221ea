"""GGUF files of the LLaMA family give the logits of `transformers`, and carry their tokenizer."""

from __future__ import annotations

import json
import math
import random
import re
import struct
import time
from itertools import pairwise

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as ValueType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

import keepleft as kl
import peers
from keepleft.weights.gguf import GGUFFile

V = 53
B = 3
T = 13
# quantised rows are multiples of 32 or, for the newer types, of 256
SIZES = dict(
    vocab_size=V,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
)
ROWS_OF_256 = dict(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
TEXTS = [
    "",
    " ",
    "  two  spaces ",
    "The sea is calm tonight.",
    "don't we'LL I'M",
    "१२३ नमस्ते दुनिया, आप कैसे हैं?",
    "12345 1,000.5 ٣٤",
    "🙂👩\u200d👩\u200d👧 ok",
    "naïve café\n\n\ttabs\r\nand\xa0more",
    "日本語とEnglish",
    "a\u0301\u200d\x00\x7f",
    "x" * 31,
    "(a+b)=c; //no",
]


pytestmark = pytest.mark.usefixtures("one_thread")


def llama(**changes):
    return peers.make_peer("LlamaConfig", "LlamaForCausalLM", **(SIZES | changes))()


# writing a file as llama.cpp's converter does -------------------------------------------------


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's own formula: rotary pairs (i, i + width/2) next to each other."""
    return (
        weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def divisors(config) -> np.ndarray:
    """The converter's own formula for LLaMA 3.1's rotary scaling of each frequency."""
    rope, width = config.rope_parameters, config.hidden_size // config.num_attention_heads
    out = []
    for step in range(0, width, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (step / width)
        if length < rope["original_max_position_embeddings"] / rope["high_freq_factor"]:
            out.append(1.0)
        elif length > rope["original_max_position_embeddings"] / rope["low_freq_factor"]:
            out.append(rope["factor"])
        else:
            ramp = (rope["original_max_position_embeddings"] / length - rope["low_freq_factor"]) / (
                rope["high_freq_factor"] - rope["low_freq_factor"]
            )
            out.append(1 / ((1 - ramp) / rope["factor"] + ramp))
    return np.array(out, dtype=np.float32)


def noise(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Random blocks of a type that the gguf package reads but does not write, with small scales."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.random.default_rng(7).integers(256, size=(shape[0], shape[1] // block, size), dtype=np.uint8)
    where = {Kind.Q4_K: slice(0, 4), Kind.Q5_K: slice(0, 4), Kind.Q6_K: slice(208, 210)}[kind]
    count = (where.stop - where.start) // 2
    rows[..., where] = np.full((*rows.shape[:2], count), 1e-3, dtype=np.float16).view(np.uint8)
    return rows.reshape(shape[0], -1)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def their_name(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[name]}.weight"


@torch.no_grad()
def write(peer, path, kind: Kind = Kind.F32, metadata=(), tokenizer=()) -> None:
    """The peer as a GGUF file; the peer itself is rounded to what the file holds."""
    config, writer = peer.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for name, value in dict(metadata).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(name, value)
    add_tokenizer(writer, tokenizer)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(config))
    for name, weight in peer.named_parameters():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(
            name.split(".")[-2]
        )
        data = (permuted(weight, heads) if heads else weight).numpy()
        if weight.dim() == 1 or kind == Kind.F32:
            writer.add_tensor(their_name(name), data)
            continue
        if kind in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
            packed = noise(data.shape, kind)
        else:
            packed = gguf.quants.quantize(data, kind)
        writer.add_tensor(their_name(name), packed, raw_dtype=kind)
        rounded = torch.from_numpy(gguf.quants.dequantize(packed, kind).astype(np.float32))
        if heads:  # undo the permutation
            rounded = rounded.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        weight.copy_(rounded)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, metadata) -> None:
    for name, value in dict(metadata).items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.ggml.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.ggml.{name}", value)
        else:
            writer.add_array(f"tokenizer.ggml.{name}", list(value))


def agree(path, peer) -> kl.Decoder:
    """Ours from the file and the peer give the same logits, at once and step by step."""
    ours, _ = kl.load(path)
    tokens = torch.randint(V, (B, T))
    with torch.no_grad():
        want = peer(tokens).logits
        scores, state = ours.start(tokens[:, :5])
        for got, expected in (
            (ours(tokens), want),
            (scores, want[:, 4]),
            (ours.step(tokens[:, 5:], state), want[:, -1]),
        ):
            assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
    return ours


# weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_weights_of_every_kind_give_the_logits_of_transformers(tmp_path, kind, tied):
    peer = llama(tie_word_embeddings=tied)
    write(peer, tmp_path / "x.gguf", Kind[kind])
    ours = agree(tmp_path / "x.gguf", peer)
    assert ours.design.head == kl.LMHead(tied=tied)
    assert {tensor.dtype for tensor in ours.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_weights_in_blocks_of_256_give_the_logits_of_transformers(tmp_path, kind):
    peer = llama(**ROWS_OF_256)
    write(peer, tmp_path / "x.gguf", Kind[kind])
    agree(tmp_path / "x.gguf", peer)


def test_weights_are_the_same_however_few_rows_are_read_at_a_time(tmp_path, monkeypatch):
    write(llama(), tmp_path / "x.gguf", Kind.Q4_0)
    at_once, _ = kl.load(tmp_path / "x.gguf")
    monkeypatch.setattr("keepleft.weights.rules.CHUNK_ELEMENTS", 200)
    in_chunks, _ = kl.load(tmp_path / "x.gguf")
    assert all(
        torch.equal(a, b)
        for a, b in zip(at_once.state_dict().values(), in_chunks.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    "changes",
    [
        dict(num_key_value_heads=4),
        dict(num_key_value_heads=1),
        dict(head_dim=10),
        dict(rms_norm_eps=1e-6),
        dict(rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}),
    ],
)
def test_the_numbers_in_the_file_are_the_design(tmp_path, changes):
    peer = llama(**changes)
    write(peer, tmp_path / "x.gguf")
    design = agree(tmp_path / "x.gguf", peer).design
    assert design.attention.kv_heads == peer.config.num_key_value_heads
    assert design.head_width == peer.config.head_dim
    assert design.norm == kl.RMSNorm(peer.config.rms_norm_eps)
    assert design.position == kl.Rotary(peer.config.rope_parameters["rope_theta"], 128)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_of_llama_3_1_are_its_scaling(tmp_path, factor):
    peer = llama(
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    write(peer, tmp_path / "x.gguf")
    assert agree(tmp_path / "x.gguf", peer).design.position == kl.Rotary(
        500_000.0, 128, kl.Llama3RopeScaling(factor)
    )


def test_linear_scaling_is_read(tmp_path):
    peer = llama(rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0})
    write(
        peer,
        tmp_path / "x.gguf",
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 3.0},
    )
    assert agree(tmp_path / "x.gguf", peer).design.position == kl.Rotary(
        10_000.0, 128, kl.LinearRopeScaling(3.0)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_rounded_to_what_is_asked_for(tmp_path, dtype):
    write(llama(), tmp_path / "x.gguf", Kind.Q8_0)
    plain, _ = kl.load(tmp_path / "x.gguf")
    asked, _ = kl.load(tmp_path / "x.gguf", dtype=dtype)
    for a, b in zip(plain.state_dict().values(), asked.state_dict().values(), strict=True):
        assert torch.equal(a.to(dtype), b)
        assert b.dtype == dtype


@pytest.mark.parametrize("tied", [True, False])
def test_what_came_from_gguf_is_saved_for_transformers_with_all_that_it_knew(tmp_path, tied):
    peer, metadata = llama(tie_word_embeddings=tied), sentencepiece_metadata()
    write(peer, tmp_path / "x.gguf", Kind.Q8_0, {"tokenizer.chat_template": "{{ messages }}"}, metadata)
    ours, tokenizer = kl.load(tmp_path / "x.gguf")
    assert ours.notes["bos_token_id"] == 1
    assert ours.notes["eos_token_id"] == 2
    kl.save(ours, tokenizer, tmp_path / "out")
    again, tokenizer_again = kl.load(tmp_path / "out")
    assert again.design == ours.design
    assert again.notes["bos_token_id"] == 1
    assert tokenizer_again.to_str() == tokenizer.to_str()
    tokens = torch.randint(V, (B, T))
    with torch.no_grad():
        assert torch.equal(again(tokens), ours(tokens))
        want = peer(tokens).logits
        again_theirs = peers.reload(peer, tmp_path / "out")(tokens).logits
        assert (again_theirs - want).abs().max() <= 2e-5 * want.abs().max()


# the file format ------------------------------------------------------------------------------


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_is_read_is_what_the_gguf_package_reads(tmp_path):
    """Metadata values of every type, alone and in lists, and tensors of every type that it can write."""
    writer, rng = gguf.GGUFWriter(tmp_path / "x.gguf", "llama"), np.random.default_rng(3)
    values = {
        ValueType.UINT8: 255,
        ValueType.INT8: -128,
        ValueType.UINT16: 65535,
        ValueType.INT16: -32768,
        ValueType.UINT32: (1 << 32) - 1,
        ValueType.INT32: -(1 << 31),
        ValueType.FLOAT32: 0.1,
        ValueType.BOOL: True,
        ValueType.STRING: "नमस्ते\0 🙂",
        ValueType.UINT64: (1 << 64) - 1,
        ValueType.INT64: -(1 << 63),
        ValueType.FLOAT64: 0.1,
    }
    for kind, value in values.items():
        writer.add_key_value(f"a.{kind.name}", value, kind)
        writer.add_key_value(
            f"some.{kind.name}",
            [value, value if kind == ValueType.STRING else 0],
            ValueType.ARRAY,
            sub_type=kind,
        )
    writer.add_string("empty", "")
    writer.add_custom_alignment(64)
    for kind in (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0):
        for shape in ((96,), (7, 96), (2, 3, 32)):
            writer.add_tensor(
                f"{kind.name}.{len(shape)}",
                gguf.quantize(rng.normal(size=shape).astype(np.float32), kind),
                raw_dtype=kind,
            )
    finish(writer)
    ours, theirs = GGUFFile(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert fields == ours.metadata
    assert [type(value) for value in fields.values()] == [type(value) for value in ours.metadata.values()]
    assert ours.names() == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        want = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(ours.rows(tensor.name, 0, len(want)), want)
        assert torch.equal(ours.rows(tensor.name, 1, 2), want[1:2])
        assert ours.shape(tensor.name) == tuple(want.shape)


def test_chunks_of_a_large_tensor_are_joined_where_they_were_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("keepleft.weights.gguf.DEQUANTIZE_CHUNK", 256)
    write(llama(), tmp_path / "x.gguf", Kind.Q4_1)
    file = GGUFFile(tmp_path / "x.gguf")
    for tensor in gguf.GGUFReader(tmp_path / "x.gguf").tensors:
        want = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        assert torch.equal(file.rows(tensor.name, 0, len(want)), want)


def test_a_large_vocabulary_is_read_in_a_moment(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    tokens = [f"word{n}" for n in range(200_000)]
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [1] * len(tokens))
    finish(writer)
    start = time.monotonic()
    metadata = GGUFFile(tmp_path / "x.gguf").metadata
    assert time.monotonic() - start < 3
    assert metadata["tokenizer.ggml.tokens"] == tokens


def test_lists_of_lists_stay_lists(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_array("deep", [[1, 2], [3]])
    finish(writer)
    assert GGUFFile(tmp_path / "x.gguf").metadata["deep"] == [[1, 2], [3]]


def test_a_file_for_machines_of_the_other_byte_order_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    finish(writer)
    with pytest.raises(
        ValueError, match=r"x\.gguf is not a complete GGUF file \(it was written for machines that"
    ):
        GGUFFile(tmp_path / "x.gguf")


def raw(metadata=(), tensors=(), version=3) -> bytes:
    """A file by hand, with 64 bytes of data.

    Metadata are names, types and bytes; tensors names, shapes, types and offsets.
    """
    string = lambda text: struct.pack("<Q", len(text)) + text
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(string(name) + struct.pack("<I", kind) + value for name, kind, value in metadata)
    head += b"".join(
        string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, begin)
        for name, shape, kind, begin in tensors
    )
    return head + bytes(-len(head) % 32 + 64)


LLAMA = (b"general.architecture", 8, struct.pack("<Q", 5) + b"llama")
HUGE = 1 << 61


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (raw([LLAMA, LLAMA]), "it says 'general.architecture' twice"),
        (raw([LLAMA], [(b"a", (2,), 0, 0), (b"a", (2,), 0, 0)]), "it holds the tensor 'a' twice"),
        (raw([LLAMA], version=9), "its version is 9, and 2 and 3 are understood"),
        (
            raw([LLAMA, (b"general.alignment", 4, struct.pack("<I", 48))]),
            "'general.alignment' is 48: it must be a power of two",
        ),
        (raw([LLAMA, (b"general.alignment", 4, struct.pack("<I", 0))]), "'general.alignment' is 0"),
        (raw([LLAMA, (b"odd", 13, b"")]), "a metadata value has the type 13"),
        (raw([LLAMA, (b"no text", 8, struct.pack("<Q", 1) + b"\xff")]), "can't decode byte 0xff"),
        (raw([LLAMA, (b"long", 8, struct.pack("<Q", HUGE))]), "it ends too early"),
        (raw([LLAMA, (b"many", 9, struct.pack("<IQ", 0, HUGE))]), "it ends too early"),
        (raw([LLAMA, (b"many", 9, struct.pack("<IQ", 8, HUGE))]), "it ends too early"),
        (raw([LLAMA, (b"many", 9, struct.pack("<IQ", 9, HUGE))]), "it ends too early"),
        (raw([LLAMA, (b"deep", 9, struct.pack("<IQ", 9, 1) * 5000)]), "recursion"),
        (raw([LLAMA], [(b"a", (17,), 0, 0)]), "it ends too early"),
        (raw([LLAMA], [(b"a", (2,), 0, 60)]), "it ends too early"),
        (raw([LLAMA], [(b"a", (1 << 40, 1 << 40), 0, 0)]), "it ends too early"),
        (raw([LLAMA], [(b"a", (0, 1 << 63), 0, 0)]), "copy or download it again"),
        (
            raw([LLAMA], [(b"a", (33,), 2, 0)]),
            "the tensor 'a' has shape (33,): rows of Q4_0 are multiples of 32",
        ),
        (raw([LLAMA], [(b"a", (), 0, 0)]), "the tensor 'a' has shape ()"),
        (raw([LLAMA], [(b"a", (2,), 999, 0)]), "999"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path, content, message):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        kl.load(tmp_path / "x.gguf")
    assert str(tmp_path / "x.gguf") in str(error.value)


# byte-level BPE -------------------------------------------------------------------------------


PRE = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    ),
    "llama-bpe": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(
                    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
                ),
                behavior="isolated",
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}
SPECIAL = ["<|begin|>", "<|end|>"]
USER_DEFINED = "<think>"


def train(pre: str) -> Tokenizer:
    """A small byte-level BPE, with two special tokens and one defined by the user."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text * 3 for text in TEXTS], trainer)
    tokenizer.add_tokens([AddedToken(USER_DEFINED, normalized=False, special=False)])
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str, **more) -> dict:
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(n) for n in range(size)]
    merges = [" ".join(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]
    kinds = [3 if token in SPECIAL else 4 if token == USER_DEFINED else 1 for token in tokens]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "merges": merges,
        "token_type": kinds,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "add_bos_token": False,
    } | more


@pytest.fixture(scope="module")
def read_back(tmp_path_factory):
    """A function from the metadata of a tokenizer to the tokenizer of a GGUF file with them."""
    folder, count = tmp_path_factory.mktemp("gguf"), iter(range(1000))

    def read(metadata: dict) -> Tokenizer:
        path = folder / f"{next(count)}.gguf"
        write(llama(vocab_size=len(metadata["tokens"]), num_hidden_layers=1), path, tokenizer=metadata)
        return kl.load(path)[1]

    return read


@pytest.fixture(scope="module")
def both(read_back):
    """Each kind of byte-level BPE, as it was trained and as it is read back."""
    trained = {pre: train(pre) for pre in PRE}
    return {pre: (trained[pre], read_back(byte_level_metadata(trained[pre], pre))) for pre in PRE}


@pytest.mark.parametrize("pre", PRE)
def test_a_byte_level_tokenizer_comes_out_as_it_went_in(both, pre):
    trained, ours = both[pre]
    assert ours.get_vocab() == trained.get_vocab()
    for text in [
        *TEXTS,
        "".join(TEXTS),
        f"{SPECIAL[0]}नमस्ते{SPECIAL[1]} {USER_DEFINED}why{USER_DEFINED} <|neither|>",
    ]:
        want, got = trained.encode(text), ours.encode(text)
        assert got.ids == want.ids, text
        for skip in (True, False):
            assert ours.decode(got.ids, skip_special_tokens=skip) == trained.decode(
                want.ids, skip_special_tokens=skip
            ), text


@pytest.mark.parametrize("pre", PRE)
@given(text=st.text(max_size=23))
def test_any_text_survives_a_byte_level_tokenizer(both, pre, text):
    trained, ours = both[pre]
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == trained.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_a_word_of_llama_3_needs_no_merges(read_back):
    """Its vocabulary has words that no chain of merges reaches."""
    trained = train("llama-bpe")
    metadata = byte_level_metadata(trained, "llama-bpe")
    metadata["tokens"] += ["zqxj", "Ġzqxj"]
    metadata["token_type"] += [1, 1]
    ours = read_back(metadata)
    size = trained.get_vocab_size()
    assert ours.encode("zqxj zqxj").ids == [size, size + 1]


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "expected"),
    [
        ("gpt-2", True, True),
        ("gpt-2", None, False),
        ("smollm", None, False),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_text_begins_as_the_file_says_or_as_in_llama_cpp(read_back, pre, add_bos_token, expected):
    trained = train(pre)
    metadata = byte_level_metadata(trained, pre, add_bos_token=add_bos_token)
    ours = read_back({name: value for name, value in metadata.items() if value is not None})
    want = trained.encode("the sea").ids
    assert ours.encode("the sea").ids == ([0, *want] if expected else want)
    assert ours.encode("the sea", add_special_tokens=False).ids == want


# SentencePiece --------------------------------------------------------------------------------


def sentencepiece_metadata(**more) -> dict:
    """A vocabulary by hand: 0-2 special, then pieces from best to worst, then letters, then bytes."""
    best = "▁t he ▁the in ▁s ea ▁sea er ▁▁ ▁▁▁▁ नम नमस्ते ing 12 ▁in".split()
    letters = list("▁theinsargdmobc12नमस्ते")
    tokens = ["<unk>", "<s>", "</s>", *best, *dict.fromkeys(letters)]
    scores = [0.0, 0.0, 0.0] + [-float(n) for n in range(len(tokens) - 3)]
    kinds = [2, 3, 3] + [1] * (len(tokens) - 3)
    if more.pop("bytes", False):
        tokens += [f"<0x{n:02X}>" for n in range(256)]
        scores += [0.0] * 256
        kinds += [6] * 256
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": kinds,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    while len(metadata["tokens"]) < V:
        metadata["tokens"].append(f"unused{len(metadata['tokens'])}")
        metadata["scores"].append(-99.0)
        metadata["token_type"].append(5)
    return metadata | more


def slow(text: str, metadata: dict, prefix: bool = True) -> list[int]:
    """llama.cpp's definition: join the neighbours that make the best piece, leftmost first, until none do.

    What is then no piece is spelt out in bytes.
    """
    ids = {token: n for n, token in enumerate(metadata["tokens"])}
    parts = list(((" " if prefix else "") + text).replace(" ", "▁")) if text else []
    while True:
        candidates = [
            (-metadata["scores"][ids[a + b]], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in ids
        ]
        if not candidates:
            break
        _, n = min(candidates)
        parts[n : n + 2] = [parts[n] + parts[n + 1]]
    out = []
    for part in parts:
        out += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return out


def test_a_sentencepiece_vocabulary_splits_as_worked_by_hand(read_back):
    metadata = sentencepiece_metadata()
    ours = read_back(metadata)
    for text, parts in {
        "the sea": ["▁the", "▁sea"],
        "tea": ["▁t", "ea"],  # ▁t is better than ea, and both fit
        "there": ["▁the", "r", "e"],  # he, then ▁the, leave er nothing to join
        "seeing": ["▁s", "e", "e", "ing"],
        "12": ["▁", "12"],
        "नमस्ते": ["▁", "नम", "स", "्", "त", "े"],  # no two neighbours make the word
        "the  sea": ["▁the", "▁", "▁sea"],  # ▁sea is better than ▁▁
        "in": ["▁in"],
    }.items():
        assert ours.encode(text).tokens == ["<s>", *parts], text
        assert ours.decode(ours.encode(text).ids) == text


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_splits_as_the_slow_definition(read_back, prefix):
    metadata = sentencepiece_metadata(bytes=True, add_space_prefix=prefix)
    ours, rng = read_back(metadata), random.Random(11)
    texts = [t for t in TEXTS if t] + [
        "".join(rng.choices("  theinsargdmobc12नमस्ते🙂", k=n)) for n in range(1, 200)
    ]
    for text in texts:
        assert ours.encode(text).ids == [1, *slow(text, metadata, prefix)], repr(text)
        assert ours.decode(ours.encode(text).ids) == text


def test_special_tokens_of_a_sentencepiece_vocabulary_stay_whole(read_back):
    metadata = sentencepiece_metadata(bytes=True)
    metadata["tokens"].append("<|user|>")
    metadata["scores"].append(0.0)
    metadata["token_type"].append(4)
    user_defined = len(metadata["tokens"]) - 1
    ours = read_back(metadata)
    ids = ours.encode("the</s>sea<|user|>12", add_special_tokens=False).ids
    assert ids.count(2) == 1
    assert ids.count(user_defined) == 1
    assert "<|user|>" in ours.decode(ids)  # the user's own token is text
    assert "</s>" not in ours.decode(ids)  # a control token is not
    assert "</s>" in ours.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("more", "begin", "end"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
    ],
)
def test_a_sentence_begins_and_ends_as_the_file_says(read_back, more, begin, end):
    metadata = sentencepiece_metadata(**more)
    assert read_back(metadata).encode("the sea").ids == [*begin, *slow("the sea", metadata), *end]


def test_a_file_without_a_tokenizer_gives_none(tmp_path):
    write(llama(), tmp_path / "x.gguf")
    assert kl.load(tmp_path / "x.gguf")[1] is None
