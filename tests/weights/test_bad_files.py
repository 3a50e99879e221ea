"""Damaged files are refused with what is wrong, where, and what to do; saving never damages what was there.

A flipped bit in the data of a file without checksums, as other programs write them, cannot be detected, so
there is nothing to test. Our own files carry a checksum for each tensor, so there it is always detected.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import keepleft as kl
import peers
from keepleft import causal, full, window
from keepleft.weights.families import families

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
FEW = 3_000
MANY = 14_000
ALL = 1 << 30  # bytes in a shard: a dozen of them, a few, or one file

PAIR = {"encoder": kl.StackDesign(1, (full,)), "decoder": kl.StackDesign(2, (causal,))}
LOOSE = {"encoder": kl.StackDesign(1, (full,), False), "decoder": kl.StackDesign(2, (causal,), False)}
SMALL = {"vocab": 53, "heads": 3}
DESIGNS = {
    "gpt2": kl.presets.gpt2.but(
        **SMALL,
        dim=21,
        feedforward=kl.FeedForward(43, "gelu_tanh"),
        position=kl.LearnedPositions(37),
        decoder=kl.StackDesign(2, (causal,)),
    ),
    "openai-gpt": kl.presets.gpt.but(
        **SMALL,
        dim=21,
        feedforward=kl.FeedForward(84, "gelu_tanh"),
        position=kl.LearnedPositions(37),
        decoder=kl.StackDesign(2, (causal,), False),
    ),
    "gpt_neo": kl.presets.gpt_neo.but(
        **SMALL,
        dim=21,
        head_dim=7,
        feedforward=kl.FeedForward(43, "gelu_tanh"),
        position=kl.LearnedPositions(37),
        decoder=kl.StackDesign(3, (causal, causal & window(5))),
    ),
    "llama": kl.presets.llama.but(
        **SMALL,
        dim=23,
        head_dim=10,
        kv_heads=1,
        feedforward=kl.FeedForward(43, "silu", gated=True),
        decoder=kl.StackDesign(2, (causal,)),
    ),
    "mistral": kl.presets.mistral.but(
        **SMALL,
        dim=23,
        head_dim=10,
        kv_heads=1,
        decoder=kl.StackDesign(2, (causal & window(5),)),
        feedforward=kl.FeedForward(43, "silu", gated=True),
    ),
    "qwen2": kl.presets.qwen2_0_5b.but(
        **SMALL,
        dim=30,
        kv_heads=1,
        feedforward=kl.FeedForward(43, "silu", gated=True),
        decoder=kl.StackDesign(2, (causal,)),
    ),
    "t5": kl.presets.t5.but(
        **SMALL,
        dim=23,
        head_dim=7,
        feedforward=kl.FeedForward(43, "relu"),
        position=kl.RelativeBias(10, 17),
        **PAIR,
    ),
    "mt5": kl.presets.mt5.but(
        **SMALL,
        dim=23,
        head_dim=7,
        feedforward=kl.FeedForward(43, "gelu_tanh", gated=True),
        position=kl.RelativeBias(10, 17),
        **PAIR,
    ),
    "bart": kl.presets.bart.but(
        **SMALL,
        dim=21,
        feedforward=kl.FeedForward(43, "gelu"),
        position=kl.LearnedPositions(37, first=2),
        **LOOSE,
    ),
    "marian": kl.presets.marian.but(
        **SMALL, dim=21, feedforward=kl.FeedForward(43, "silu"), position=kl.Sinusoidal(37), **LOOSE
    ),
    "pegasus": kl.presets.pegasus.but(
        **SMALL, dim=21, feedforward=kl.FeedForward(43, "relu"), position=kl.Sinusoidal(37), **PAIR
    ),
    "bert": kl.presets.bert.but(
        **SMALL,
        dim=21,
        feedforward=kl.FeedForward(43, "gelu"),
        position=kl.LearnedPositions(37),
        encoder=kl.StackDesign(2, (full,), False),
    ),
}


# helpers --------------------------------------------------------------------------------------


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory):
    """A model directory of each family, as we save it."""
    out = tmp_path_factory.mktemp("saved")
    for name, design in DESIGNS.items():
        model = kl.build(design, generator=torch.Generator().manual_seed(2))
        model.notes["model_type"] = name
        kl.save(model, None, out / name)
        assert json.loads((out / name / CONFIG).read_text())["model_type"] == name
    return out


@pytest.fixture(scope="module", autouse=True)
def warm_imports(saved_models, tmp_path_factory):
    """Import everything before anything is timed: an alarm during an import would break the session."""
    kl.load(saved_models / "gpt2")
    kl.load(write_gguf(tmp_path_factory.mktemp("awake") / "x.gguf"))


@pytest.fixture
def copy_model(saved_models, tmp_path):
    """A function that copies the directory of a family, which may then be damaged."""
    return lambda family="gpt2", name="model": Path(shutil.copytree(saved_models / family, tmp_path / name))


def refused(path, *words, error=ValueError, **kwargs) -> str:
    """load() raises just that type of error, with these words; those in the path of the test do not count."""
    with pytest.raises(error) as caught:
        kl.load(path, **kwargs)
    message, home = str(caught.value), str(Path(path).parent)
    body = message.replace(home, "") if len(home) > 2 else message
    missing = [word for word in words if word not in (message if len(home) > 2 and home in word else body)]
    assert not missing, f"{missing} are not in: {message}"
    assert type(caught.value) is error, f"{type(caught.value).__name__} says: {message}"
    return body


def attempt(path, seconds: float = 5) -> tuple[nn.Module | None, BaseException | None]:
    """What load() returns, or what it raises."""
    try:
        with within(seconds):
            return kl.load(path)[0], None
    except Exception as error:
        return None, error


def same(a: nn.Module, b: nn.Module) -> bool:
    """Same design and weights."""
    a_state, b_state = a.state_dict(), b.state_dict()
    return (
        a.design == b.design
        and a_state.keys() == b_state.keys()
        and all(torch.equal(a_state[name], b_state[name]) for name in a_state)
    )


def edit(folder: Path, **changes) -> Path:
    """Change fields of the configuration; `...` removes one."""
    config = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(
        json.dumps({name: value for name, value in config.items() if value is not ...})
    )
    return folder


def retensor(folder: Path, change) -> Path:
    """Change the weights by a function, and write them as another program would: without checksums."""
    state = load_file(folder / ONE)
    change(state)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / ONE, metadata={"format": "pt"}
    )
    return folder


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def header(path: Path) -> tuple[int, dict]:
    """Where the data begins, and the header."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return 8 + size, json.loads(raw[8 : 8 + size])


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith((".part", ".tmp")))


@contextmanager
def within(seconds: float):
    """An error where something would never end."""

    def ring(signum, frame):
        raise AssertionError(f"still busy after {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # and again: a callback may swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def no_memory(monkeypatch):
    """Nothing may allocate the memory of a model."""

    def to_empty(self, **kwargs):
        raise AssertionError("memory was allocated before the file was checked")

    monkeypatch.setattr(nn.Module, "to_empty", to_empty)


# damaged safetensors --------------------------------------------------------------------------


def test_a_file_cut_off_anywhere_is_refused(copy_model):
    folder = copy_model()
    intact = (folder / ONE).read_bytes()
    begin, _ = header(folder / ONE)
    rng = random.Random(3)
    cuts = {
        *range(9),
        begin - 1,
        begin,
        begin + 1,
        len(intact) - 1,
        *rng.sample(range(9, begin), 41),
        *rng.sample(range(begin, len(intact)), 41),
    }
    for cut in sorted(cuts):
        (folder / ONE).write_bytes(intact[:cut])
        refused(folder, str(folder / ONE), "copy or download it again")


def test_a_file_with_something_behind_its_end_is_refused(copy_model):
    folder = copy_model()
    (folder / ONE).write_bytes((folder / ONE).read_bytes() + b"\0")
    refused(folder, str(folder / ONE), "copy or download it again")


@pytest.mark.parametrize("length", [0, 1, 1 << 20, 100_000_001, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_a_header_of_an_impossible_length_is_refused_at_once(copy_model, length):
    folder = copy_model()
    (folder / ONE).write_bytes(length.to_bytes(8, "little") + (folder / ONE).read_bytes()[8:])
    with within(5):
        refused(folder, str(folder / ONE), "copy or download it again")


def test_a_file_of_noise_is_refused(copy_model):
    folder = copy_model()
    for content in (
        b"",
        b"PK\3\4" + bytes(97),
        random.Random(5).randbytes(997),
        b"version https://git-lfs.github.com/spec/v1\n",
    ):
        (folder / ONE).write_bytes(content)
        refused(folder, str(folder / ONE), "copy or download it again")


def test_a_flipped_bit_in_a_header_is_refused_or_does_no_harm(copy_model):
    folder = copy_model()
    good, _ = kl.load(folder)
    intact = (folder / ONE).read_bytes()
    begin, _ = header(folder / ONE)
    rng = random.Random(7)
    for at in (*range(8), *rng.sample(range(8, begin), 307)):
        (folder / ONE).write_bytes(intact)
        flip(folder / ONE, at, rng.randrange(8))
        model, error = attempt(folder)
        if model is None:
            assert type(error) is ValueError, f"byte {at}: {type(error).__name__}: {error}"
            assert ONE in str(error) or "tensor" in str(error), f"byte {at}: {error}"
        else:
            assert same(model, good), f"byte {at}"


@pytest.mark.parametrize("chunk", [17, 1 << 24])
@pytest.mark.parametrize("shard", [MANY, ALL])
def test_a_flipped_bit_in_the_numbers_of_our_own_file_is_found(
    saved_models, tmp_path, monkeypatch, shard, chunk
):
    # however few rows of a tensor are read at a time
    monkeypatch.setattr("keepleft.weights.rules.CHUNK_ELEMENTS", chunk)
    model, _ = kl.load(saved_models / "gpt2")
    kl.save(model, None, tmp_path, shard=shard)
    rng = random.Random(11)
    for path in tmp_path.glob("*.safetensors"):
        begin, entries = header(path)
        entries.pop("__metadata__")
        for name, entry in entries.items():
            first, end = entry["data_offsets"]
            at = begin + rng.choice([first, end - 1, rng.randrange(first, end)])
            bit = rng.randrange(8)
            flip(path, at, bit)
            refused(tmp_path, name, str(path), "copy or download it again")
            flip(path, at, bit)
    assert same(kl.load(tmp_path)[0], model)


def test_every_byte_of_a_tensor_counts_whatever_it_is_loaded_as(copy_model):
    folder = copy_model()
    begin, entries = header(folder / ONE)
    first, end = entries["transformer.h.1.ln_2.bias"]["data_offsets"]
    for at in range(begin + first, begin + end):
        flip(folder / ONE, at)
        refused(folder, "transformer.h.1.ln_2.bias", dtype=torch.bfloat16)
        flip(folder / ONE, at)


# shards ---------------------------------------------------------------------------------------


@pytest.fixture
def sharded(saved_models, tmp_path):
    model, _ = kl.load(saved_models / "gpt2")
    kl.save(model, None, tmp_path / "sharded", shard=FEW)
    return tmp_path / "sharded"


def remap(folder: Path, change) -> Path:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_a_missing_shard_is_named(sharded):
    for path in sorted(sharded.glob("*.safetensors")):
        moved = path.rename(sharded / "elsewhere")
        refused(sharded, str(path), "missing", "copy or download it again")
        moved.rename(path)


def test_a_cut_shard_is_named(sharded):
    path = sorted(sharded.glob("*.safetensors"))[2]
    path.write_bytes(path.read_bytes()[:-1])
    refused(sharded, str(path), "copy or download it again")


def test_a_shard_without_the_tensor_that_the_index_promises_is_named(sharded):
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    name, shard = next(iter(weight_map.items()))
    other = next(s for s in weight_map.values() if s != shard)
    remap(sharded, lambda index: index["weight_map"].update({name: other}))
    refused(sharded, name, other, INDEX)


def test_a_tensor_that_the_index_forgets_is_named(sharded):
    remap(sharded, lambda index: index["weight_map"].pop("transformer.h.1.ln_2.bias"))
    refused(sharded, "transformer.h.1.ln_2.bias")


@pytest.mark.parametrize(
    "where", ["../outside.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", 7, None, ["x"]]
)
def test_an_index_that_points_out_of_its_directory_is_refused(sharded, where):
    shutil.copy(next(sharded.glob("*.safetensors")), sharded.parent / "outside.safetensors")
    remap(sharded, lambda index: index["weight_map"].update({"transformer.wte.weight": where}))
    refused(sharded, str(sharded / INDEX), repr(where), "beside it")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": 3}',
        b'{"weight_map": null}',
        b'{"weight_map": {}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_none_is_refused(sharded, content):
    (sharded / INDEX).write_bytes(content)
    message = refused(sharded)
    assert INDEX in message or content == b'{"weight_map": {}}', message


def test_shards_hold_what_one_file_holds(saved_models, sharded):
    single, _ = kl.load(saved_models / "gpt2")
    many, _ = kl.load(sharded)
    assert same(single, many)
    files = sorted(sharded.glob("*.safetensors"))
    together = {name: tensor for path in files for name, tensor in load_file(path).items()}
    alone = load_file(saved_models / "gpt2" / ONE)
    assert together.keys() == alone.keys()
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    assert [path.name for path in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    for path in files:
        state = load_file(path)
        assert len(state) == 1 or sum(tensor.nbytes for tensor in state.values()) <= FEW
    total = json.loads((sharded / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in alone.values())


def test_transformers_reads_our_shards(tmp_path):
    peer = peers.DECODERS["gpt2"]()
    ours, _ = kl.load(peers.save(peer, tmp_path / "theirs"))
    kl.save(ours, None, tmp_path / "ours", shard=FEW)
    again = peers.reload(peer, tmp_path / "ours")
    assert all(torch.equal(a, b) for a, b in zip(peer.parameters(), again.parameters(), strict=True))


# config.json ----------------------------------------------------------------------------------


def test_a_directory_without_a_configuration_is_refused(copy_model):
    folder = copy_model()
    (folder / CONFIG).unlink()
    refused(folder, str(folder / CONFIG), "missing", error=FileNotFoundError)


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json", "1_Pooling/config.json", "modules.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"model_type: gpt2", b"\xff\xfe\x00", b"{'a': 1}", b"[" * 100_000]
)
def test_what_is_not_json_is_refused_by_name(copy_model, name, content):
    folder = copy_model("bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / CONFIG).write_text('{"pooling_mode_mean_tokens": true}')
    (folder / name).write_bytes(content)
    refused(folder, str(folder / name), "JSON")


@pytest.mark.parametrize("name", [CONFIG, "generation_config.json", "1_Pooling/config.json"])
@pytest.mark.parametrize("content", ["[]", '"gpt2"', "3", "null", "true", '[{"model_type": "gpt2"}]'])
def test_json_that_is_no_object_is_refused_by_name(copy_model, name, content):
    folder = copy_model("bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / CONFIG).write_text('{"pooling_mode_mean_tokens": true}')
    (folder / name).write_text(content)
    refused(folder, str(folder / name), "object")


@pytest.mark.parametrize(
    "pooling",
    [
        {},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_max_tokens": True},
    ],
)
def test_pooling_that_is_none_or_two_is_refused(copy_model, pooling):
    folder = copy_model("bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / CONFIG).write_text(json.dumps(pooling))
    refused(folder, str(folder / "1_Pooling" / CONFIG), "mean, first and last")


def test_an_unknown_field_is_named_and_may_be_ignored(copy_model):
    folder = edit(copy_model(), shiny_new_knob=0.5, another=None)
    refused(folder, str(folder / CONFIG), "shiny_new_knob", "another", "ignore=")
    refused(folder, "shiny_new_knob", "ignore=", ignore=["another"])
    model, _ = kl.load(folder, ignore=["shiny_new_knob", "another"])
    assert model.design == DESIGNS["gpt2"]


def test_ignoring_never_hides_a_field_that_is_known(copy_model):
    folder = edit(copy_model(), n_head=5)
    refused(folder, "21", "5", ignore=["n_head"])


@pytest.mark.parametrize("kind", ["gptj", "GPT2", "", None, ..., 3, ["gpt2"], {"gpt2": 1}])
def test_an_unknown_architecture_is_named_beside_those_that_are_known(copy_model, kind):
    folder = edit(copy_model(), model_type=kind)
    refused(folder, str(folder / CONFIG), "model_type", repr(None if kind is ... else kind), *families())


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["GPT2DoubleHeadsModel"], "GPT2DoubleHeadsModel"),
        (["LlamaForCausalLM"], "LlamaForCausalLM"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel"),
        ([7], "7"),
        ({"GPT2LMHeadModel": 1}, "architectures"),
        (7, "7"),
        ([[]], "[]"),
    ],
)
def test_an_unknown_class_is_named_beside_those_that_are_known(copy_model, given, named):
    folder = edit(copy_model(), architectures=given)
    refused(folder, str(folder / CONFIG), named, "GPT2LMHeadModel", "GPT2Model")


CONTRADICTIONS = {
    "gpt2: heads do not divide the width": ("gpt2", {"n_head": 5}, ("21", "5", "heads")),
    "gpt2: two dropouts": ("gpt2", {"embd_pdrop": 0.3}, ("embd_pdrop", "0.3", "resid_pdrop", "0.1")),
    "bert: heads do not divide the width": ("bert", {"num_attention_heads": 4}, ("21", "4", "heads")),
    "llama: heads do not divide the width": (
        "llama",
        {"num_attention_heads": 5, "head_dim": None},
        ("23", "5", "heads"),
    ),
    "llama: key heads do not divide heads": ("llama", {"num_key_value_heads": 2}, ("3", "2", "key heads")),
    "llama: an odd head": ("llama", {"head_dim": 7}, ("even", "7")),
    "llama: two bases": (
        "llama",
        {"rope_theta": 500.0},
        ("rope_theta", "500.0", "rope_parameters", "10000.0"),
    ),
    "llama: two scalings": (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ("rope_parameters", "rope_scaling", "linear"),
    ),
    "bart: encoder heads do not divide the width": (
        "bart",
        {"encoder_attention_heads": 5},
        ("21", "5 encoder.heads"),
    ),
    "bart: heads do not divide the width": ("bart", {"decoder_attention_heads": 5}, ("21", "5 heads")),
    "bart: encoder heads that are no number": (
        "bart",
        {"encoder_attention_heads": "3"},
        ("encoder_attention_heads", "'3'"),
    ),
    "bart: an encoder width of nothing": ("bart", {"encoder_ffn_dim": 0}, ("encoder_ffn_dim", "0")),
    "gpt_neo: fewer kinds than layers": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1]]},
        ("attention_types", "2", "num_layers", "3"),
    ),
    "gpt_neo: more kinds than layers": (
        "gpt_neo",
        {"num_layers": 2},
        ("attention_types", "3", "num_layers", "2"),
    ),
    "marian: one vocabulary of two sizes": ("marian", {"decoder_vocab_size": 59}, ("53", "59", "vocab")),
    "bert: more classes than labels": (
        "bert",
        {
            "architectures": ["BertForSequenceClassification"],
            "num_labels": 5,
            "id2label": {"0": "no", "1": "yes"},
        },
        ("num_labels", "5", "id2label", "2"),
    ),
    "mistral: fewer kinds than layers": (
        "mistral",
        {"layer_types": ["full_attention"] * 3},
        ("layer_types", "3", "2"),
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_configuration_that_contradicts_itself_is_refused_by_both_sides(copy_model, case):
    family, changes, words = CONTRADICTIONS[case]
    folder = edit(copy_model(family), **changes)
    refused(folder, str(folder / CONFIG), *words)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_width_of_one_stack_that_is_not_that_of_its_tensors_names_the_tensor(copy_model, side):
    folder = edit(copy_model("bart"), **{f"{side}_ffn_dim": 47})
    refused(folder, f"model.{side}.layers.0.fc1", "47", "43")


UNSUPPORTED = {
    "gpt2": [
        {"activation_function": "mish"},
        {"scale_attn_by_inverse_layer_idx": True},
        {"add_cross_attention": True},
    ],
    "openai-gpt": [{"afn": "tanh"}],
    "gpt_neo": [{"activation_function": "mish"}, {"attention_types": [[["global", "banded", "local"], 1]]}],
    "llama": [{"hidden_act": "xielu"}, {"quantization_config": {"quant_method": "gptq"}}],
    "mistral": [{"layer_types": ["full_attention", "chunked_attention"]}],
    "t5": [{"feed_forward_proj": "gated-mish"}, {"is_decoder": True}],
    "bart": [{"activation_function": "mish"}, {"is_decoder": True}],
    "bert": [
        {"hidden_act": "mish"},
        {"position_embedding_type": "relative_key"},
        {"is_decoder": True},
        {"tie_word_embeddings": False},
    ],
}


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_what_keepleft_cannot_compute_is_refused_by_name(copy_model, family):
    for number, changes in enumerate(UNSUPPORTED[family]):
        folder = edit(copy_model(family, f"model-{number}"), **changes)
        ((field, value),) = changes.items()
        words = (
            []
            if isinstance(value, dict) or field == "position_embedding_type"
            else [
                "banded"
                if field == "attention_types"
                else "chunked_attention"
                if field == "layer_types"
                else repr(value)
            ]
        )
        refused(folder, str(folder / CONFIG), field, *words)


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("word", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope", "", 3])
def test_a_rotary_scaling_that_is_not_understood_is_named(copy_model, key, word, kind):
    other = {"rope_parameters": "rope_scaling", "rope_scaling": "rope_parameters"}[key]
    folder = edit(copy_model("llama"), **{other: ..., key: {word: kind, "factor": 2.0}})
    refused(folder, str(folder / CONFIG), repr(kind), "default, linear and llama3")


@pytest.mark.parametrize(
    "settings",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": "two"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": None},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {"rope_type": "default", "rope_theta": "ten"},
        {"rope_type": "default", "rope_theta": -1.0},
        {"rope_type": "default", "rope_theta": 0.0},
        {"rope_type": "default", "surprise": 3},
        ["default"],
        "default",
        7,
    ],
)
def test_rotary_settings_that_make_no_sense_are_refused_by_name(copy_model, settings):
    folder = edit(copy_model("llama"), rope_theta=..., rope_scaling=..., rope_parameters=settings)
    message = refused(folder, str(folder / CONFIG))
    assert any(word in message for word in ("rope_parameters", "rope_theta", "factor", "low", "surprise")), (
        message
    )


def numbers(family: str, config: dict, kind: type) -> list[str]:
    """The fields that a family understands and that hold values of that kind."""
    known = [row.config_key for row in families()[family].fields] + [
        "rope_theta",
        "sliding_window",
        "window_size",
    ]
    return [field for field in known if type(config.get(field)) is kind]


@pytest.mark.parametrize("family", DESIGNS)
def test_a_field_of_the_wrong_kind_is_named_with_its_value(copy_model, family, no_memory):
    folder = copy_model(family)
    config = json.loads((folder / CONFIG).read_text())
    wrong = {
        int: ["7", "many", -3, 0, 2.5, True, [7], {}],
        float: ["0.1", -0.5, [0.1], {}, float("nan")],
        bool: ["false", 2, [True]],
    }
    complaints = []
    for field, value in [
        (field, value) for kind in wrong for field in numbers(family, config, kind) for value in wrong[kind]
    ]:
        if (field, value) == ("type_vocab_size", 0):
            continue  # the one size that may be nothing
        alone = {"rope_parameters": None} if field == "rope_theta" else {}
        (folder / CONFIG).write_text(json.dumps(config | alone | {field: value}))
        _, error = attempt(folder)
        if type(error) is not ValueError or field not in str(error) or repr(value) not in str(error):
            complaints.append(f"{field} = {value!r}: {type(error).__name__}: {error}")
    assert complaints == []


@pytest.mark.parametrize("family", DESIGNS)
def test_an_absurd_size_is_refused_before_any_memory_is_asked_for(copy_model, family, no_memory):
    folder = copy_model(family)
    config = json.loads((folder / CONFIG).read_text())
    complaints = []
    silent = {
        "sliding_window",
        "window_size",
        "relative_attention_max_distance",  # numbers that nothing in the file speaks of
        *(
            ["max_position_embeddings"]
            if family in ("llama", "mistral", "qwen2", "marian", "pegasus")
            else []
        ),
    }
    for field in numbers(family, config, int):
        for value in () if field in silent else (10**7, 10**12, 10**18, 10**30):
            (folder / CONFIG).write_text(json.dumps(config | {field: value}))
            _, error = attempt(folder, seconds=2)
            if type(error) is not ValueError:
                complaints.append(f"{field} = {value!r}: {type(error).__name__}: {error}")
    assert complaints == []


@pytest.mark.parametrize("family", DESIGNS)
def test_a_configuration_of_nothing_but_a_name_means_the_published_sizes(copy_model, family, no_memory):
    folder = copy_model(family)
    (folder / CONFIG).write_text(json.dumps({"model_type": family}))
    message = refused(folder)
    assert "tensor" in message, message


def test_a_size_that_is_left_out_means_the_published_one(copy_model):
    folder = edit(copy_model(), n_embd=..., n_inner=..., n_head=...)
    refused(folder, "transformer.", "(63,)", f"({3 * 768},)")


@pytest.mark.parametrize(
    "types",
    [
        3,
        "global",
        [],
        [["global"]],
        [[["global"], "3"]],
        [[["global"], -3]],
        [["global", 3]],
        [[["global"], 10**12]],
    ],
)
def test_attention_types_of_no_known_form_are_refused_by_name(copy_model, types):
    folder = edit(copy_model("gpt_neo"), attention_types=types)
    with within(5):
        refused(folder, str(folder / CONFIG), "attention_types")


def test_a_design_of_our_own_that_is_damaged_is_refused_by_field(tmp_path):
    design = DESIGNS["gpt2"].but(norm=kl.RMSNorm(), position=kl.Rotary(), heads=3, head_dim=10)
    kl.save(kl.build(design), None, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    assert config["model_type"] == "keepleft"
    plan = config["design"]
    for broken, words in (
        (plan | {"dim": "21"}, ["dim", "'21'"]),
        (plan | {"shiny": 1}, ["shiny"]),
        ({name: value for name, value in plan.items() if name != "vocab"}, ["vocab"]),
        (plan | {"norm": {"kind": "BatchNorm"}}, ["norm", "BatchNorm"]),
        (plan | {"norm": 3}, ["norm", "3"]),
        (plan | {"norm": None}, ["norm", "None"]),
        (
            plan | {"position": {"kind": "FeedForward", "width": 3, "activation": "relu"}},
            ["position", "FeedForward"],
        ),
        (plan | {"decoder": plan["decoder"] | {"mask": [{"mask": "casual"}]}}, ["casual", "causal"]),
        (plan | {"decoder": plan["decoder"] | {"mask": []}}, ["mask", "()"]),
        (plan | {"decoder": plan["decoder"] | {"mask": ["causal"]}}, ["mask", "causal"]),
        (plan | {"decoder": plan["decoder"] | {"layers": "2"}}, ["layers", "'2'"]),
        (plan | {"feedforward": plan["feedforward"] | {"width": "43"}}, ["width", "'43'"]),
        (plan | {"feedforward": plan["feedforward"] | {"activation": "mish"}}, ["mish", "relu"]),
        ({"kind": "RMSNorm"}, ["RMSNorm", "Design"]),
        ({}, ["design"]),
        ([], ["design"]),
        (None, ["design"]),
        ("x", ["design"]),
    ):
        (tmp_path / CONFIG).write_text(json.dumps(config | {"design": broken}))
        refused(tmp_path, str(tmp_path / CONFIG), *words)


# tensors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "transformer.h.0.attn.extra.weight",
        "transformer.h.2.ln_1.weight",
        "lm_head.bias",
        "x",
        "transformer.h.٣.ln_1.weight",
        "transformer.h.00.ln_1.weight",
        "nested.transformer.wte.weight",
    ],
)
def test_a_tensor_too_many_is_named(copy_model, name):
    folder = retensor(copy_model(), lambda state: state.update({name: torch.zeros(21)}))
    refused(folder, name)


@pytest.mark.parametrize("name", ["wte.weight", "h.1.ln_2.bias", "transformer.h.0.attn.c_attn.weight"])
def test_a_tensor_that_comes_twice_is_named(copy_model, name):
    """Under its full name and without its prefix."""

    def double(state):
        state[name] = state["transformer." + name.removeprefix("transformer.")].clone()
        state[name.removeprefix("transformer.")] = state[name].clone()

    refused(retensor(copy_model(), double), name.removeprefix("transformer."), "twice")


def test_a_tensor_that_comes_twice_does_not_make_up_for_another(copy_model):
    """Queries, keys and values of one size fill one matrix of ours: two of the first are no second."""

    def swap(state):
        state["h.0.attn.attention.q_proj.weight"] = state.pop("transformer.h.0.attn.attention.k_proj.weight")

    message = refused(retensor(copy_model("gpt_neo"), swap))
    assert "h.0.attn.attention.q_proj.weight" in message or "h.0.attn.attention.k_proj.weight" in message


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt2", "transformer.wte.weight"),
        ("gpt2", "transformer.h.1.attn.c_attn.weight"),
        ("gpt2", "transformer.ln_f.bias"),
        ("llama", "model.layers.1.self_attn.k_proj.weight"),
        ("llama", "model.layers.0.mlp.up_proj.weight"),
        ("llama", "lm_head.weight"),
        ("bart", "model.decoder.layers.1.encoder_attn.v_proj.bias"),
        ("bart", "final_logits_bias"),
        ("bert", "encoder.layer.1.output.dense.weight"),
        ("t5", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
    ],
)
def test_a_tensor_too_few_is_named_as_the_file_would_name_it(copy_model, family, name):
    folder = retensor(copy_model(family), lambda state: state.pop(name))
    refused(folder, name)


def test_a_file_with_a_layer_too_few_is_refused(copy_model):
    def shorten(state):
        for name in [name for name in state if name.startswith("transformer.h.1.")]:
            del state[name]

    refused(retensor(copy_model(), shorten), "transformer.h.1.")


def test_a_file_without_any_tensor_is_refused(copy_model):
    refused(retensor(copy_model(), dict.clear), "lacks", "0 tensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.T,
        lambda t: t[:-1],
        lambda t: t[:, :-1],
        lambda t: t.reshape(-1),
        lambda t: t[None],
        lambda t: t[:0],
        lambda t: t[0, 0],
        lambda t: torch.cat([t, t[:1]]),
    ],
)
@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.1.mlp.c_fc.weight"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy_model, name, change):
    state = load_file(copy_model(name="look") / ONE)
    wanted, given = tuple(state[name].shape), tuple(change(state[name]).shape)
    folder = retensor(copy_model(), lambda state: state.update({name: change(state[name]).contiguous()}))
    refused(folder, name, str(wanted), str(given))


def test_shapes_are_looked_at_before_any_memory_is_asked_for(copy_model, no_memory):
    folder = retensor(copy_model(), lambda state: state.update({"transformer.ln_f.weight": torch.zeros(23)}))
    refused(folder, "transformer.ln_f.weight", "(23,)", "(21,)")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_weights_that_are_no_plain_floats_are_named(copy_model, dtype):
    name = "transformer.h.1.mlp.c_fc.weight"
    folder = retensor(
        copy_model(), lambda state: state.update({name: torch.ones(state[name].shape).to(dtype)})
    )
    refused(folder, name)


@pytest.mark.parametrize("family", ["gpt2", "bart", "qwen2"])
def test_a_tied_configuration_with_two_different_matrices_is_refused(copy_model, family):
    embedding = {
        "gpt2": "transformer.wte.weight",
        "bart": "model.shared.weight",
        "qwen2": "model.embed_tokens.weight",
    }[family]
    twice = retensor(
        copy_model(family, "twice"), lambda state: state.update({"lm_head.weight": state[embedding].clone()})
    )
    assert same(
        kl.load(twice)[0], kl.load(copy_model(family, "once"))[0]
    )  # a second copy of the same is no contradiction
    folder = retensor(
        copy_model(family), lambda state: state.update({"lm_head.weight": state[embedding] + 1})
    )
    refused(folder, "lm_head.weight", "tie_word_embeddings")


def test_an_untied_configuration_without_an_output_matrix_is_refused(copy_model):
    refused(edit(copy_model(), tie_word_embeddings=False), "lm_head.weight")


def test_the_directory_is_left_as_it_was_when_loading_is_refused(copy_model):
    folder = edit(copy_model(), n_head=5)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    refused(folder, "heads")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# paths ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_refused_with_a_word_on_converting(copy_model, name):
    folder = copy_model()
    (folder / ONE).rename(folder / name)
    refused(folder, name, "pickle", "Convert", "save_pretrained")
    (folder / "a.bin").write_bytes(b"another")
    refused(folder / name, str(folder / name), "pickle", "Convert", "save_pretrained")


def test_a_directory_without_weights_is_refused(copy_model):
    folder = copy_model()
    (folder / ONE).unlink()
    refused(folder, str(folder), ONE, INDEX)


def test_the_weights_alone_are_no_model(copy_model):
    folder = copy_model()
    refused(folder / ONE, str(folder / ONE), "directory")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"version": "1.0", "model": {"type": "BPE"}}', b"\xff"]
)
def test_a_broken_tokenizer_is_named(copy_model, content):
    folder = copy_model()
    (folder / "tokenizer.json").write_bytes(content)
    refused(folder, str(folder / "tokenizer.json"), "tokenizer")


@pytest.mark.parametrize(
    "path", ["nowhere", "./no/where", "/no/where", "~/nowhere", "no/where/at/all", "nowhere.gguf"]
)
def test_a_path_that_does_not_exist_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(path, path, error=FileNotFoundError)
    refused(tmp_path / "absent", str(tmp_path / "absent"), error=FileNotFoundError)


def test_a_name_of_the_commands_is_no_path_and_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(
        "SmolLM2-135M-Instruct",
        "there is no model directory SmolLM2-135M-Instruct, and that is no OWNER/NAME on the hub: give",
        "`keepleft doctor` prints those of the installed models",
        error=FileNotFoundError,
    )
    (tmp_path / "translator").mkdir()  # as in a clone of the repository
    refused("translator", "`keepleft doctor` prints its path", error=FileNotFoundError)


def test_a_hub_name_without_the_hub_package_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused("nobody/nothing", "nobody/nothing", "pip install 'keepleft[hub]'", error=FileNotFoundError)


def test_a_hub_name_without_a_network_is_named_with_the_reason(tmp_path, monkeypatch):
    import huggingface_hub

    class OfTheirOwn(Exception):  # noqa: N818
        """Not derived from any of Python's own, as those of HTTP clients."""

    monkeypatch.chdir(tmp_path)
    for reason in (
        kind("name resolution failed") for kind in (OfTheirOwn, ConnectionError, TimeoutError, ValueError)
    ):

        def fetch(*words, reason=reason, **how):
            raise reason

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
        refused("nobody/nothing", "nobody/nothing", "name resolution failed", error=FileNotFoundError)


def test_a_hub_name_that_is_not_in_the_cache_is_named_when_offline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    refused("nobody/nothing", "nobody/nothing", error=FileNotFoundError)


def test_a_hub_name_is_loaded_from_where_the_hub_package_puts_it(copy_model, tmp_path, monkeypatch):
    import huggingface_hub

    folder = copy_model()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **how: str(folder) if name == "some/body" else None
    )
    assert kl.load("some/body")[0].design == DESIGNS["gpt2"]


# GGUF -----------------------------------------------------------------------------------------


METADATA = {
    "context_length": 64,
    "embedding_length": 12,
    "block_count": 1,
    "feed_forward_length": 20,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}
SHAPES = {
    "token_embd.weight": (11, 12),
    "output_norm.weight": (12,),
    "blk.0.attn_norm.weight": (12,),
    "blk.0.attn_q.weight": (12, 12),
    "blk.0.attn_k.weight": (6, 12),
    "blk.0.attn_v.weight": (6, 12),
    "blk.0.attn_output.weight": (12, 12),
    "blk.0.ffn_norm.weight": (12,),
    "blk.0.ffn_gate.weight": (20, 12),
    "blk.0.ffn_up.weight": (20, 12),
    "blk.0.ffn_down.weight": (12, 20),
}
TOKENIZER_METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *"▁abcdefg"],
    "tokenizer.ggml.scores": [0.0] * 11,
    "tokenizer.ggml.token_type": [2, 3, 3] + [1] * 8,
    "tokenizer.ggml.bos_token_id": 1,
}


def write_gguf(path: Path, architecture: str = "llama", metadata=(), shapes=(), tokenizer=()) -> Path:
    """A small GGUF file; None leaves an entry out."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {f"{architecture}.{name}": value for name, value in (METADATA | dict(metadata)).items()}
    for name, value in {**numbers, **TOKENIZER_METADATA, **dict(tokenizer)}.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    rng = np.random.default_rng(13)
    for name, shape in (SHAPES | dict(shapes)).items():
        if shape is not None:
            writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_small_gguf_file_is_sound(tmp_path):
    model, tokenizer = kl.load(write_gguf(tmp_path / "x.gguf"))
    assert model.design.vocab == 11
    assert tokenizer.get_vocab_size() == 11


def test_a_gguf_file_cut_off_anywhere_is_refused(tmp_path):
    path = write_gguf(tmp_path / "x.gguf")
    intact = path.read_bytes()
    # after that there is only padding
    end = max(tensor.data_offset + tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
    begin = gguf.GGUFReader(path).data_offset
    rng = random.Random(17)
    for cut in sorted(
        {*range(32), *rng.sample(range(32, begin), 61), *rng.sample(range(begin, end), 31), end - 1}
    ):
        path.write_bytes(intact[:cut])
        with within(5):
            refused(path, str(path), "copy or download it again")


def test_a_flipped_bit_in_a_gguf_header_gives_a_model_or_a_sentence(tmp_path):
    """The format has no checksums, so a number may change unnoticed; but nothing may crash or hang."""
    path = write_gguf(tmp_path / "x.gguf")
    intact = path.read_bytes()
    rng = random.Random(19)
    complaints = []
    for at in (*range(24), *rng.sample(range(24, gguf.GGUFReader(path).data_offset), 307)):
        path.write_bytes(intact)
        bit = rng.randrange(8)
        flip(path, at, bit)
        _, error = attempt(path, seconds=2)
        if error is not None and (type(error) is not ValueError or str(path) not in str(error)):
            complaints.append(f"byte {at}, bit {bit}: {type(error).__name__}: {error}")
    assert complaints == []


def test_a_gguf_array_without_end_is_refused_at_once(tmp_path):
    path = write_gguf(tmp_path / "x.gguf")
    raw = bytearray(path.read_bytes())
    key = b"tokenizer.ggml.token_type"
    at = raw.index(key) + len(key) + 4  # after the type of the value, an array
    raw[at : at + 12] = (0).to_bytes(4, "little") + (1 << 60).to_bytes(8, "little")  # of 2^60 bytes
    path.write_bytes(raw)
    with within(3):
        refused(path, str(path), "copy or download it again")


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"GGML" + bytes(97), b"{}", b"GGUF\x09\0\0\0" + bytes(97), bytes(997)]
)
def test_what_is_not_gguf_is_refused(tmp_path, content):
    (tmp_path / "x.gguf").write_bytes(content)
    refused(tmp_path / "x.gguf", str(tmp_path / "x.gguf"), "copy or download it again")


def test_a_directory_may_be_called_anything(saved_models, tmp_path):
    folder = Path(shutil.copytree(saved_models / "gpt2", tmp_path / "gpt2.gguf"))
    assert kl.load(folder)[0].design == DESIGNS["gpt2"]


def test_a_gguf_file_without_the_gguf_package_says_what_to_install(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "x.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(path, "the gguf package: pip install 'keepleft[gguf]'", error=ImportError)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2", "bert"])
def test_another_architecture_in_gguf_is_named(tmp_path, architecture):
    path = write_gguf(tmp_path / "x.gguf", architecture)
    refused(path, str(path), repr(architecture), "'llama'")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata": {"block_count": None}}, ["llama.block_count"]),
        ({"metadata": {"context_length": None}}, ["llama.context_length"]),
        ({"metadata": {"embedding_length": None}}, ["llama.embedding_length"]),
        ({"metadata": {"attention.head_count": None}}, ["llama.attention.head_count"]),
        ({"metadata": {"attention.head_count": 0}}, ["head_count", "0"]),
        ({"metadata": {"attention.head_count": 5}}, ["5", "heads"]),
        ({"metadata": {"attention.head_count": "two"}}, ["head_count", "'two'"]),
        ({"metadata": {"attention.head_count": [2, 1]}}, ["head_count", "[2, 1]"]),
        ({"metadata": {"attention.head_count_kv": 0}}, ["kv", "0"]),
        ({"metadata": {"feed_forward_length": [20, 20]}}, ["feed_forward_length", "[20, 20]"]),
        ({"metadata": {"feed_forward_length": 19}}, ["blk.0.ffn_", "19", "20"]),
        ({"metadata": {"feed_forward_length": 0}}, ["feed_forward_length", "0"]),
        ({"metadata": {"embedding_length": 16}}, ["token_embd.weight", "(11, 16)", "(11, 12)"]),
        ({"metadata": {"block_count": 2}}, ["blk.1."]),
        ({"metadata": {"block_count": 1 << 31}}, [str(1 << 31)]),
        ({"metadata": {"embedding_length": (1 << 32) - 4}}, [str((1 << 32) - 4)]),
        ({"metadata": {"expert_count": 8}}, ["8", "experts"]),
        ({"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}}, ["yarn"]),
        ({"metadata": {"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}}, ["factor", "0.0"]),
        ({"metadata": {"rope.freq_base": 0.0}}, ["base", "0.0"]),
        ({"shapes": {"token_embd.weight": None}}, ["token_embd.weight"]),
        ({"shapes": {"blk.0.ffn_up.weight": None}}, ["blk.0.ffn_up.weight"]),
        ({"shapes": {"blk.0.attn_q.bias": (12,)}}, ["blk.0.attn_q.bias"]),
        ({"shapes": {"blk.0.attn_k.weight": (12, 12)}}, ["blk.0.attn_k.weight", "(12, 12)", "(6, 12)"]),
        ({"shapes": {"rope_freqs.weight": (3,)}}, ["rope_freqs.weight"]),
        ({"shapes": {"rope_freqs.weight": (5,)}}, ["rope_freqs.weight"]),
        ({"tokenizer": {"tokenizer.ggml.model": "rwkv"}}, ["rwkv", "gpt2 and llama"]),
        ({"tokenizer": {"tokenizer.ggml.model": "gpt2"}}, ["tokenizer.ggml.merges"]),
        (
            {
                "tokenizer": {
                    "tokenizer.ggml.model": "gpt2",
                    "tokenizer.ggml.pre": "odd",
                    "tokenizer.ggml.merges": ["a b"],
                    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *"▁abcdef", "ab"],
                }
            },
            ["'odd'"],
        ),
        (
            {"tokenizer": {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["ab"]}},
            ["tokenizer.ggml.merges", "ab"],
        ),
        ({"tokenizer": {"tokenizer.ggml.tokens": None}}, ["tokenizer.ggml.tokens"]),
        (
            {
                "tokenizer": {
                    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *"▁abcdefgh"],
                    "tokenizer.ggml.scores": [0.0] * 12,
                    "tokenizer.ggml.token_type": [1] * 12,
                }
            },
            ["tokenizer.ggml.tokens", "12", "11"],
        ),
        ({"tokenizer": {"tokenizer.ggml.scores": None}}, ["tokenizer.ggml.scores"]),
        ({"tokenizer": {"tokenizer.ggml.scores": [0.0] * 7}}, ["tokenizer.ggml.scores", "7", "11"]),
        ({"tokenizer": {"tokenizer.ggml.token_type": [1] * 7}}, ["tokenizer.ggml.token_type", "7", "11"]),
        ({"tokenizer": {"tokenizer.ggml.bos_token_id": 97}}, ["bos_token_id", "97"]),
        ({"tokenizer": {"tokenizer.ggml.unknown_token_id": 97}}, ["unknown_token_id", "97"]),
    ],
)
def test_a_gguf_file_that_does_not_fit_together_is_refused_by_name(
    tmp_path, no_memory_unless_tokens, changes, words
):
    path = write_gguf(tmp_path / "x.gguf", **changes)
    no_memory_unless_tokens(changes)
    with within(5):
        refused(path, str(path), *words)


@pytest.fixture
def no_memory_unless_tokens(request):
    """A tokenizer may be checked last; weights must be checked before memory is allocated."""
    return lambda changes: None if "tokenizer" in changes else request.getfixturevalue("no_memory")


# precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_file_of_any_precision_loads_as_float32_unless_asked_otherwise(saved_models, tmp_path, dtype):
    model, _ = kl.load(saved_models / "gpt2", dtype=dtype)
    kl.save(model, None, tmp_path)
    assert all(tensor.dtype == dtype for tensor in load_file(tmp_path / ONE).values())
    assert json.loads((tmp_path / CONFIG).read_text())["dtype"] == str(dtype).removeprefix("torch.")
    plain, _ = kl.load(tmp_path)
    for asked in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        other, _ = kl.load(tmp_path, dtype=asked)
        for name, tensor in model.state_dict().items():
            assert torch.equal(plain.state_dict()[name], tensor.to(torch.float32))
            assert torch.equal(other.state_dict()[name], tensor.to(asked))
            assert other.state_dict()[name].dtype == asked


def test_a_file_of_several_precisions_loads_as_one(copy_model):
    folder = copy_model()
    whole, _ = kl.load(folder)
    halves = retensor(
        folder, lambda state: state.update({name: t.half() for name, t in state.items() if "mlp" in name})
    )
    model, _ = kl.load(halves)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}
    for name, tensor in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor.half().float() if ".feed." in name else tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_that_do_not_lie_in_one_piece_are_saved_as_they_are_meant(saved_models, tmp_path, dtype):
    model, _ = kl.load(saved_models / "gpt2", dtype=dtype)
    model.token.weight.data = torch.randn(21, 53).to(dtype).T
    model.decoder.norm.weight.data = torch.randn(42).to(dtype)[::2]
    model.decoder.layers[0].feed.up.weight.data = torch.randn(1, 21).to(dtype).expand(43, 21)
    kl.save(model, None, tmp_path)
    assert same(kl.load(tmp_path, dtype=dtype)[0], model)


# saving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DESIGNS)
def test_a_fresh_model_of_any_family_is_saved_and_loaded(name, tmp_path):
    model = kl.build(DESIGNS[name])
    kl.save(model, None, tmp_path)
    assert same(kl.load(tmp_path)[0], model)


def test_a_model_with_two_vocabularies_is_saved_and_loaded(tmp_path):
    model = kl.build(DESIGNS["marian"].but(source_vocab=59))
    kl.save(model, None, tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["model_type"] == "marian"
    assert same(kl.load(tmp_path)[0], model)


def other() -> nn.Module:
    """A model that shares no shape with the saved one."""
    return kl.build(DESIGNS["gpt2"].but(vocab=59, dim=33, decoder=kl.StackDesign(3, (causal,))))


def same_shapes(model: nn.Module, **changes) -> nn.Module:
    """A model with the shapes of another, and other numbers."""
    return kl.build(model.design.but(**changes), generator=torch.Generator().manual_seed(23))


@pytest.mark.parametrize("before", [MANY, ALL])
@pytest.mark.parametrize("after", [MANY, 2 * MANY, ALL])
def test_saving_over_another_layout_leaves_just_what_was_saved(saved_models, tmp_path, before, after):
    kl.save(other(), None, tmp_path, shard=before)
    (tmp_path / "README.md").write_text("mine")
    model, _ = kl.load(saved_models / "gpt2")
    kl.save(model, None, tmp_path, shard=after)
    assert same(kl.load(tmp_path)[0], model)
    on_disk = {path.name for path in tmp_path.glob("*.safetensors*")}
    indexed = (
        set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) | {INDEX}
        if after < ALL
        else {ONE}
    )
    assert on_disk == indexed
    assert parts(tmp_path) == []
    assert (tmp_path / "README.md").read_text() == "mine"


def test_saving_over_a_sentence_encoder_leaves_what_was_saved(copy_model):
    folder = copy_model("bert")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / CONFIG).write_text('{"pooling_mode_mean_tokens": true}')
    assert kl.load(folder)[0].design.head == kl.PoolingHead("mean")
    model = kl.build(DESIGNS["bert"].but(head=kl.ClassificationHead(5, "tanh")))
    kl.save(model, None, folder)
    assert same(kl.load(folder)[0], model)


def full_disk(save) -> bool:
    """Whether saving ends with a full disk."""
    try:
        save()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return True
    return False


class FailingCall:
    """A function that raises a full disk from its nth call on, and works before."""

    def __init__(self, function, at: int) -> None:
        self.function = function
        self.at = at
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls >= self.at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("before", [MANY, ALL])
@pytest.mark.parametrize("after", [MANY, ALL])
@pytest.mark.parametrize("where", ["os.fsync", "safetensors.torch.save_file", "pathlib.Path.write_text"])
def test_a_disk_that_fills_up_while_saving_leaves_the_old_model(
    saved_models, tmp_path, monkeypatch, before, after, where
):
    old, _ = kl.load(saved_models / "gpt2")
    new = other()
    new.notes["generation"] = {"max_length": 7}
    owner, name = where.rsplit(".", 1)
    target = {"os": os, "safetensors.torch": sys.modules["safetensors.torch"], "pathlib.Path": Path}[owner]
    for at in range(1, 40):
        kl.save(old, None, tmp_path, shard=before)
        with monkeypatch.context() as patch:
            failing = FailingCall(getattr(target, name), at)
            patch.setattr(target, name, lambda *args, failing=failing, **kwargs: failing(*args, **kwargs))
            if not full_disk(lambda: kl.save(new, None, tmp_path, shard=after)):
                break
        loaded, _ = kl.load(tmp_path)
        assert same(loaded, old), f"call {at}"
        assert "generation" not in loaded.notes, f"call {at}"
    else:
        raise AssertionError("saving never came to its end")
    assert at > 1 or failing.calls == 0
    assert same(kl.load(tmp_path)[0], new)
    assert parts(tmp_path) == []


@pytest.mark.parametrize("changes", [{}, {"norm": kl.LayerNorm(1e-3)}])
@pytest.mark.parametrize("before", [MANY, ALL])
@pytest.mark.parametrize("after", [MANY, 2 * MANY, ALL])
def test_an_end_between_two_renames_never_leaves_a_mixture(
    saved_models, tmp_path, monkeypatch, before, after, changes
):
    """The old model, the new one, or an error: a mixture of models of the same shapes would go unnoticed."""
    old, _ = kl.load(saved_models / "gpt2")
    new = same_shapes(old, **changes)
    for at in range(1, 40):
        kl.save(old, None, tmp_path, shard=before)
        with monkeypatch.context() as patch:
            for name in ("replace", "rename"):
                patch.setattr(os, name, FailingCall(getattr(os, name), at))
            if not full_disk(lambda: kl.save(new, None, tmp_path, shard=after)):
                break
        loaded, error = attempt(tmp_path)
        if loaded is None:
            assert type(error) in (ValueError, FileNotFoundError), (
                f"rename {at}: {type(error).__name__}: {error}"
            )
        else:
            assert same(loaded, old) or same(loaded, new), f"rename {at}"
    else:
        raise AssertionError("saving never came to its end")
    assert at > 1
    kl.save(new, None, tmp_path, shard=after)
    assert same(kl.load(tmp_path)[0], new)
    assert parts(tmp_path) == []


def test_a_model_that_cannot_be_written_leaves_the_old_one(saved_models, tmp_path):
    old, _ = kl.load(saved_models / "gpt2")
    kl.save(old, None, tmp_path, shard=MANY)
    odd = kl.build(
        DESIGNS["gpt2"].but(decoder=kl.StackDesign(2, (kl.Where("mine", lambda b, h, q, k: k <= q),)))
    )
    with pytest.raises(ValueError, match="mine"):
        kl.save(odd, None, tmp_path)
    new = other()
    new.extra = nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match="extra"):
        kl.save(new, None, tmp_path)
    assert same(kl.load(tmp_path)[0], old)


def test_what_a_crash_left_behind_is_gone_after_the_next_saving(saved_models, tmp_path):
    for name in ("model-00001.part", "model-00007.part", "config.json.part", "model.safetensors.part"):
        (tmp_path / name).write_bytes(b"half of something")
    model, _ = kl.load(saved_models / "gpt2")
    kl.save(model, None, tmp_path)
    assert parts(tmp_path) == []
    assert same(kl.load(tmp_path)[0], model)


def test_saving_where_there_is_a_file_is_refused_and_leaves_it(saved_models, tmp_path):
    (tmp_path / "out").write_text("mine")
    model, _ = kl.load(saved_models / "gpt2")
    with pytest.raises((ValueError, FileExistsError), match="out"):
        kl.save(model, None, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"
