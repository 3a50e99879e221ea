"""GGUF files that we write read back as the same model and tokenizer, here, in transformers and llama.cpp."""

from __future__ import annotations

import json
import os
import warnings

import numpy as np
import pytest
import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import keepleft as kl
import peers
from keepleft.data.tokenizer import train_tokenizer
from keepleft.disk.split_regexes import LLAMA3_SPLIT_REGEX
from keepleft.runs import parity
from keepleft.weights import to_gguf
from keepleft.weights.gguf import GGUFFile
from keepleft.weights.gguf_tokenizer import HF_TOKENIZER_KEY, read_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
V = 400
TEXTS = [*parity.SAMPLES, "hello hello world 12345", "<|begin|>hello<think> world<|end|>"]
POSITIONS = {
    "plain": kl.Rotary(),
    "linear": kl.Rotary(10_000.0, 128, kl.LinearRopeScaling(3.0)),
    "llama 3.1": kl.Rotary(500_000.0, 128, kl.Llama3RopeScaling()),
    "llama 3.2": kl.Rotary(500_000.0, 128, kl.Llama3RopeScaling(32.0)),
}


def design(**changes) -> kl.Design:
    return kl.presets.small(kl.presets.llama3).but(**{"vocab": V, "dim": 64, "heads": 4, **changes})


def model(**changes) -> kl.Decoder:
    made = kl.build(design(**changes), generator=torch.Generator().manual_seed(1)).eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return made


def train(pre: str) -> Tokenizer:
    level = pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = {
        "gpt-2": level(add_prefix_space=False),
        "smollm": pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), level(add_prefix_space=False)]
        ),
        "llama-bpe": pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA3_SPLIT_REGEX), "isolated"),
                level(add_prefix_space=False, use_regex=False),
            ]
        ),
    }[pre]
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
        initial_alphabet=sorted(level.alphabet()),
    )
    tokenizer.train_from_iterator([text * 3 for text in TEXTS], trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """As LLaMA 2's: byte fallback, and a merge for each way to split a piece in two, best piece first."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"), ("w", "o")]
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{n:02X}>" for n in range(256)]
    tokens = [*special, *byte_tokens, *"▁helowrd", *(a + b for a, b in merges)]
    tokenizer = Tokenizer(
        models.BPE(
            {token: n for n, token in enumerate(tokens)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


# weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", to_gguf.DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_every_type_reads_back_as_near_as_it_can(tmp_path, dtype, tied):
    ours = model(head=kl.LMHead(tied=tied))
    to_gguf.write(ours, None, tmp_path / "x.gguf", dtype=dtype)
    weights, scores, tokenizer = parity.gguf(ours, None, tmp_path / "x.gguf", dtype, [3, 5, 7], None)
    assert weights.ok, weights
    assert scores.ok, scores
    assert tokenizer.ok is None
    again, _ = kl.load(tmp_path / "x.gguf")
    assert again.design.head == ours.design.head
    if dtype == "f32":
        assert all(
            torch.equal(tensor, ours.state_dict()[name]) for name, tensor in again.state_dict().items()
        )


@pytest.mark.parametrize(
    "changes",
    [
        *({"position": position} for position in POSITIONS.values()),
        {"head_dim": 10},
        {"kv_heads": None},
        {"kv_heads": 1},
        {"norm": kl.RMSNorm(1e-6)},
        {"dim": 40, "heads": 4},
    ],
)
def test_every_number_of_the_design_reads_back(tmp_path, changes):
    ours = model(**changes)
    to_gguf.write(ours, None, tmp_path / "x.gguf", dtype="q8_0")  # rows of 40 are no blocks of 32
    assert kl.load(tmp_path / "x.gguf")[0].design == ours.design
    assert all(
        check.ok is not False for check in parity.gguf(ours, None, tmp_path / "x.gguf", "q8_0", None, None)
    )


@pytest.mark.parametrize(
    "other",
    [
        kl.presets.gpt2,
        kl.presets.qwen2_0_5b,
        kl.presets.mistral,
        kl.presets.t5,
        kl.presets.bert,
        kl.presets.llama.but(bias=True),
        kl.presets.llama.but(head=kl.ClassificationHead(3, "last")),
        kl.presets.llama.but(position=kl.Rotary(scaling=kl.Llama3RopeScaling(original=4096))),
    ],
)
def test_other_families_are_refused_by_name(tmp_path, other):
    with pytest.raises(ValueError, match=r"LLaMA family alone.*it(s| is)"):
        to_gguf.write(kl.build(kl.presets.small(other)), None, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_other_weights_are_found(tmp_path):
    ours = model()
    to_gguf.write(ours, None, tmp_path / "x.gguf", dtype="q8_0")
    with torch.no_grad():
        ours.decoder.layers[0].self.qkv.weight[3, 5] += 0.1
    assert not next(iter(parity.gguf(ours, None, tmp_path / "x.gguf", "q8_0", None, None))).ok


def test_transformers_reads_it(tmp_path):
    ours = model()
    ours.notes = {"bos_token_id": 0, "eos_token_id": 1}
    to_gguf.write(ours, train("gpt-2"), tmp_path / "x.gguf", dtype="f32")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        peer = transformers.LlamaForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf").eval()
    tokens = torch.randint(V, (2, 11))
    with torch.no_grad():
        want = ours(tokens)
        assert (peer(tokens).logits - want).abs().max() <= 2e-5 * want.abs().max()


@pytest.mark.parametrize("position", ["plain", "linear", "llama 3.1"])
def test_llama_cpp_reads_it(tmp_path, position):
    llama_cpp = pytest.importorskip("llama_cpp")
    ours, tokenizer = model(position=POSITIONS[position]), train("llama-bpe")
    ours.notes = {"bos_token_id": 0, "eos_token_id": 1, "chat_template": "{{ messages }}"}
    to_gguf.write(ours, tokenizer, tmp_path / "x.gguf", dtype="f32")
    llama = llama_cpp.Llama(
        os.fspath(tmp_path / "x.gguf"), logits_all=True, n_ctx=64, n_threads=1, verbose=False
    )
    tokens = torch.randint(V, (17,)).tolist()
    llama.eval(tokens)
    with torch.no_grad():
        want = ours(torch.tensor([tokens]))[0].numpy()
    # its KV cache is float16
    assert np.abs(np.array(llama.scores[:17]) - want).max() <= 1e-2 * np.abs(want).max()
    for text in TEXTS:
        assert llama.tokenize(text.encode(), add_bos=False, special=True) == tokenizer.encode(text).ids, text
    assert llama.metadata["tokenizer.chat_template"] == "{{ messages }}"
    llama.close()


# the tokenizer --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "llama-bpe", "pieces"])
def test_the_tokenizer_is_written_as_json_and_for_llama_cpp(tmp_path, kind):
    ours, tokenizer = model(), sentence_pieces() if kind == "pieces" else train(kind)
    ours.notes = {"bos_token_id": 1, "eos_token_id": 2, "chat_template": "{{ messages }}"}
    to_gguf.write(ours, tokenizer, tmp_path / "x.gguf", dtype="f16")
    again, tokenizer_again = kl.load(tmp_path / "x.gguf")
    assert tokenizer_again.to_str() == tokenizer.to_str()
    assert again.notes == {
        **ours.notes,
        "model_type": "llama",
        **({"unk_token_id": 0} if kind == "pieces" else {}),
    }
    metadata = GGUFFile(tmp_path / "x.gguf").metadata
    rebuilt = read_tokenizer({name: value for name, value in metadata.items() if name != HF_TOKENIZER_KEY})
    for text in TEXTS:
        assert rebuilt.encode(text).ids == tokenizer.encode(text).ids, text
        assert rebuilt.decode(rebuilt.encode(text).ids) == tokenizer.decode(tokenizer.encode(text).ids)


def test_a_pre_tokenizer_without_a_name_is_reported(tmp_path):
    ours = model()
    tokenizer = train_tokenizer("bpe", ["नमस्ते दुनिया", "hello world"] * 9, 390, running_text=True)
    to_gguf.write(ours, tokenizer, tmp_path / "x.gguf", dtype="f32")
    *_, check = parity.gguf(ours, tokenizer, tmp_path / "x.gguf", "f32", None, None)
    assert check.ok is False
    assert "texts fall into the same tokens; not" in check.found
    assert kl.load(tmp_path / "x.gguf")[1].to_str() == tokenizer.to_str()  # from its JSON


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (train_tokenizer("word", ["a b c"] * 3, 60), "WordLevel"),
        (train_tokenizer("bpe", ["a b c"] * 3, 300), None),
    ],
)
def test_a_tokenizer_that_cannot_be_written_is_refused(tmp_path, tokenizer, why):
    ours = model() if why else model(vocab=50)
    with pytest.raises(ValueError, match=why or "do not belong together"):
        to_gguf.write(ours, tokenizer, tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_a_damaged_tokenizer_in_the_file_is_refused():
    with pytest.raises(ValueError, match="is not a tokenizer"):
        read_tokenizer({HF_TOKENIZER_KEY: json.dumps({"version": "1.0"})})


def test_a_saved_directory_of_transformers_goes_through_unchanged(tmp_path):
    ours, _ = kl.load(peers.save(peers.DECODERS["llama"](), tmp_path / "hf"))
    to_gguf.write(ours, None, tmp_path / "x.gguf", dtype="f32")
    again, _ = kl.load(tmp_path / "x.gguf")
    tokens = torch.randint(53, (2, 11))
    with torch.no_grad():
        assert torch.equal(again(tokens), ours(tokens))
