"""Model directories with SentencePiece files and no tokenizer.json: T5, LLaMA, Marian."""

from __future__ import annotations

import io
import json
import warnings

import pytest
import torch

import keepleft as kl
from keepleft.cli import main
from keepleft.pipelines.loading import load_for_inference
from keepleft.weights.sentencepiece_files import read_sentencepiece_files

spm = pytest.importorskip("sentencepiece")

ENGLISH = ["the sea is calm, and the ship sails on", "where is the station?", "12 ships & 345 fish"] * 5
FRENCH = ["la mer est calme, et le navire vogue", "où est la gare ?", "12 navires & 345 poissons"] * 5
TEXTS = ["the sea", "Where is the ship?", "ﬁsh, 12 ½", " zebra  é ", "la gare", ""]


def train(sentences, **options) -> bytes:
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=out,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 90, **options},
    )
    return out.getvalue()


def save_model(folder, preset, vocab, **changes):
    design = kl.presets.small(preset).but(vocab=vocab, initial=kl.NormalInit(0.3), **changes)
    model = kl.build(design, generator=torch.Generator().manual_seed(0)).eval()
    model.notes = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    kl.save(model, None, folder)
    return model


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5")
    content = train(ENGLISH, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    peer = spm.SentencePieceProcessor(model_proto=content)
    save_model(folder, kl.presets.t5, peer.vocab_size() + 100)
    (folder / "spiece.model").write_bytes(content)
    return folder, peer


def test_t5_reads_its_pieces_and_ends_a_text(t5):
    folder, peer = t5
    _, tokenizer = kl.load(folder)
    for text in TEXTS:
        assert tokenizer.encode(text).ids == [*peer.encode(text), 1]
    assert tokenizer.decode([*peer.encode("the sea"), 1]) == "the sea"
    assert tokenizer.get_vocab_size() == peer.vocab_size() + 100
    for n in (0, 1, 99):
        assert tokenizer.token_to_id(f"<extra_id_{n}>") == peer.vocab_size() + 99 - n
    assert tokenizer.encode("the <extra_id_0> sea").ids.count(peer.vocab_size() + 99) == 1


def test_t5_may_name_its_own_added_tokens(t5, tmp_path):
    folder, peer = t5
    read = lambda: read_sentencepiece_files(tmp_path, "t5").tokenizer
    (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"extra_ids": 3}))
    assert read().get_vocab_size() == peer.vocab_size() + 3
    size = peer.vocab_size()
    entries = {size + 1: {"content": "<b>", "special": True}, size: {"content": "<a>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": entries}))
    tokenizer = read()
    assert (tokenizer.token_to_id("<a>"), tokenizer.token_to_id("<b>")) == (size, size + 1)
    assert tokenizer.decode([size, size + 1]) == "<a>"
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<c>": size + 7}))
    with pytest.raises(ValueError, match=f"'<c>' with the id {size + 7}: the next free id is {size}"):
        read()


def test_a_t5_directory_works_from_the_command_line(t5, capsys):
    folder, _ = t5
    assert main(["translate", str(folder), "the sea", "--max-new-tokens", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["tokens"]) <= 4


def test_a_llama_begins_a_text_and_falls_back_to_bytes(tmp_path):
    options = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 350,
    }
    content = train(ENGLISH, **options)
    peer = spm.SentencePieceProcessor(model_proto=content)
    save_model(tmp_path, kl.presets.llama, peer.vocab_size())
    (tmp_path / "tokenizer.model").write_bytes(content)
    _, tokenizer = kl.load(tmp_path)
    for text in [*TEXTS, "日本 \n\n  x"]:
        assert tokenizer.encode(text).ids == [1, *peer.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"add_bos_token": False, "add_eos_token": True})
    )
    _, tokenizer = kl.load(tmp_path)
    assert tokenizer.encode("the sea").ids == [*peer.encode("the sea"), 2]


@pytest.fixture(scope="module", params=["shared", "separate"])
def marian(request, tmp_path_factory):
    """Two models; their pieces have the ids of one vocabulary, or of one each."""
    folder = tmp_path_factory.mktemp(f"marian_{request.param}")
    (folder / "source.spm").write_bytes(source := train(ENGLISH))
    (folder / "target.spm").write_bytes(target := train(FRENCH))
    pieces = lambda content: [
        peer.id_to_piece(n)
        for peer in [spm.SentencePieceProcessor(model_proto=content)]
        for n in range(peer.vocab_size())
        if peer.id_to_piece(n) not in ("<unk>", "<s>", "</s>")
    ]
    vocab = lambda *contents: {
        token: n
        for n, token in enumerate(
            dict.fromkeys(
                ["</s>", "<unk>", ">>fra<<", *(piece for part in contents for piece in pieces(part)), "<pad>"]
            )
        )
    }
    is_separate = request.param == "separate"
    source_vocab = vocab(source) if is_separate else vocab(source, target)
    target_vocab = vocab(target) if is_separate else source_vocab
    (folder / "vocab.json").write_text(json.dumps(source_vocab))
    if is_separate:
        (folder / "target_vocab.json").write_text(json.dumps(target_vocab))
    config = {"separate_vocabs": is_separate, "source_lang": "en", "target_lang": "fr"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    changes = {"source_vocab": len(source_vocab)} if is_separate else {}
    save_model(folder, kl.presets.marian, len(target_vocab), **changes)
    return folder, is_separate


def test_marian_gives_the_ids_of_transformers(marian):
    folder, is_separate = marian
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import MarianTokenizer

        peer = MarianTokenizer.from_pretrained(folder)
    loaded = load_for_inference(str(folder))
    for text in [*ENGLISH[:3], *TEXTS[:3], "sails & ships"]:
        assert loaded.source_tokenizer.encode(text).ids == peer(text)["input_ids"]
    for text in FRENCH[:3]:
        expected = peer(text_target=text)["input_ids"]
        assert loaded.tokenizer.encode(text).ids == expected
        assert loaded.tokenizer.decode(expected) == text
    tagged = peer(">>fra<< the sea")["input_ids"]
    assert loaded.source_tokenizer.encode(">>fra<< the sea").ids == tagged
    _, tokenizer = kl.load(folder)
    expected = loaded.tokenizer if is_separate else loaded.source_tokenizer
    assert tokenizer.to_str() == expected.to_str()


def test_a_marian_directory_translates_and_takes_its_tag(marian, capsys):
    folder, _ = marian
    options = ["--max-new-tokens", "4", "--json"]
    assert main(["translate", str(folder), "the sea", "--tag", ">>fra<<", *options]) == 0
    tagged = json.loads(capsys.readouterr().out)
    assert main(["translate", str(folder), ">>fra<< the sea", *options]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == tagged["tokens"]


def test_files_that_do_not_fit_together_are_refused(marian, tmp_path):
    folder, _ = marian
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for vocab, message in [
        (None, "vocab.json is missing, or its ids are not 0, 1, 2"),
        ({"a": 0, "b": 2}, "its ids are not 0, 1, 2"),
        ({"a": 0, "b": "1"}, "its ids are not 0, 1, 2"),
        ({"a": 0, "</s>": 1}, "has no <unk>"),
        ({"<unk>": 0}, "'eos_token' is '</s>'"),
        ([1], "is JSON, but not an object"),
    ]:
        if vocab is not None:
            (tmp_path / "vocab.json").write_text(json.dumps(vocab))
        with pytest.raises(ValueError, match=message):
            read_sentencepiece_files(tmp_path, "marian")


def test_a_tokenizer_json_is_preferred_and_other_models_have_none(t5, tmp_path):
    folder, _ = t5
    assert read_sentencepiece_files(folder, "pegasus") is None  # its ids are shifted
    assert read_sentencepiece_files(tmp_path, "t5") is None
    save_model(tmp_path, kl.presets.t5, 300)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, and no SentencePiece files"):
        load_for_inference(str(tmp_path))
    tokenizer = kl.train_tokenizer("bpe", ENGLISH, 300)
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    (tmp_path / "spiece.model").write_bytes(b"damaged")
    assert kl.load(tmp_path)[1].encode("the sea").ids == tokenizer.encode("the sea").ids
