"""SentencePiece models: the ids of a text are those of the sentencepiece package, whatever is in it."""

from __future__ import annotations

import io
import struct
import unicodedata
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepleft.data.tokenizer import load_tokenizer
from keepleft.disk.encode_text import EncodingError, encode_text
from keepleft.disk.sentencepiece_charsmap import Charsmap
from keepleft.disk.sentencepiece_model import (
    ModelType,
    Piece,
    PieceType,
    SentencePieceModel,
    parse_sentencepiece_model,
    read_sentencepiece_model,
)
from keepleft.disk.sentencepiece_tokenizer import METASPACE, SEPARATOR, convert_sentencepiece
from keepleft.disk.tokenizer_cost import quick_text_length
from keepleft.disk.tokenizer_json import parse_tokenizer

spm = pytest.importorskip("sentencepiece")

SENTENCES = [
    "the sea is calm, and the ship sails on",
    "où est la gare ? L’été, “déjà” vu",
    "आप कैसे हैं, मैं ठीक हूँ",
    "12 345 {a: 1} <b>bold</b>",
    "한국어 텍스트와 日本語のガイド",
] * 8
SYMBOLS = {"user_defined_symbols": ["<sep>", "②", "\n", "<s"], "control_symbols": ["<cls>"], "pad_id": 3}
OPTIONS = {
    "nmt_nfkc": {},
    "nfkc": {"normalization_rule_name": "nfkc"},
    "casefold": {"normalization_rule_name": "nmt_nfkc_cf"},
    "identity": {"normalization_rule_name": "identity"},
    "bytes": {"byte_fallback": True, "vocab_size": 480},
    "spaces": {"remove_extra_whitespaces": False},
    "llama": {
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 480,
    },
    "no_prefix": {"add_dummy_prefix": False},
    "symbols": SYMBOLS,
    "whole_lines": {"split_by_whitespace": False},
}
CASES = [(kind, name) for kind in ("unigram", "bpe") for name in OPTIONS]


@cache
def trained(kind: str, name: str) -> bytes:
    out = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=out,
        model_type=kind,
        hard_vocab_limit=False,
        minloglevel=2,
        num_threads=1,
        **{"vocab_size": 210, **OPTIONS[name]},
    )
    return out.getvalue()


@cache
def pair(kind: str, name: str):
    """The package's processor, and our tokenizer."""
    content = trained(kind, name)
    tokenizer = convert_sentencepiece(parse_sentencepiece_model(content, name), name)
    tokenizer.encode_special_tokens = True  # "</s>" in a text is four characters
    return spm.SentencePieceProcessor(model_proto=content), tokenizer


def ids_differ(kind: str, name: str, text: str) -> str:
    """What differs, in words; empty where nothing does."""
    peer, tokenizer = pair(kind, name)
    expected = peer.encode(text)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if ids != expected:
        return f"{text!a}: {peer.encode(text, out_type=str)} and {[tokenizer.id_to_token(n) for n in ids]}"
    if peer.unk_id() not in ids and tokenizer.decode(ids) != peer.decode(ids):
        return f"{text!a}: {peer.decode(ids)!a} and {tokenizer.decode(ids)!a}"
    return ""


def is_covered(kind: str, name: str, text: str) -> bool:
    """Whether the ids are promised to be the same: see the docstring of the module."""
    normalized = pair(kind, name)[0].normalize(text)
    if text and normalized == METASPACE:  # nothing is left of it
        return False
    if (
        kind == "bpe"
        and name == "symbols"
        and text.strip(" \t\u00a0\u3000") in SYMBOLS["user_defined_symbols"]
    ):
        return False
    if name == "casefold" and not unicodedata.is_normalized("NFC", text):
        return False
    is_identity = OPTIONS[name].get("normalization_rule_name") == "identity"
    return is_identity or unicodedata.is_normalized("NFC", normalized)


TEXTS = st.one_of(
    st.text(
        st.characters(exclude_categories=("Cs",), exclude_characters=[METASPACE, SEPARATOR]), max_size=12
    ),
    st.lists(
        st.sampled_from([*" \t\n\u00a0\u3000", *"the sea", *"ﬁ½²ａ①™…ｶﾞか\u3099é가각\u1100\u1161\u11a8"])
    ).map("".join),
    st.lists(
        st.sampled_from(["<s>", "</s>", "<unk>", "<sep>", "<cls>", "<0x41>", "②", "\n", " ", "a", "<", "s>"])
    ).map("".join),
)


@pytest.mark.parametrize(("kind", "name"), CASES)
@settings(max_examples=60)
@given(text=TEXTS)
def test_the_ids_of_any_text_are_those_of_the_package(kind, name, text):
    if is_covered(kind, name, text):
        assert not ids_differ(kind, name, text)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_ids_of_sentences_are_those_of_the_package(kind, name):
    for text in [*SENTENCES, "  two  spaces ", "", " ", "zebra", "\u3000a\u200b b", "".join(SENTENCES)]:
        assert not ids_differ(kind, name, text)


@pytest.mark.parametrize("name", ["nmt_nfkc", "nfkc", "casefold"])
def test_every_character_is_normalised_as_by_the_package(name):
    """Each assigned character of the basic plane as it is, decomposed, and after a letter."""
    peer, tokenizer = pair("unigram", name)
    prefix = METASPACE
    wrong = []
    for code in range(1, 0xFFF0):
        character = chr(code)
        if unicodedata.category(character) in ("Cs", "Co", "Cn") or character == METASPACE:
            continue
        for text in {character, f"a{character}", unicodedata.normalize("NFD", character)}:
            if not is_covered("unigram", name, text):
                continue
            expected = peer.normalize(text)
            normalized = tokenizer.normalizer.normalize_str(text).replace(SEPARATOR, "")
            if normalized != (expected if expected.startswith(prefix) or not expected else prefix + expected):
                wrong.append((text, expected, normalized))
    assert not wrong, [tuple(map(ascii, entry)) for entry in wrong[:5]]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_tokenizer_can_be_saved_and_its_texts_are_encoded_quickly(kind, name):
    _, tokenizer = pair(kind, name)
    read = parse_tokenizer(tokenizer.to_str().encode(), "x")
    assert read.encode(SENTENCES[1]).ids == tokenizer.encode(SENTENCES[1]).ids
    assert quick_text_length(tokenizer) > 1000


def test_control_symbols_are_special_and_user_defined_ones_are_text():
    for kind in ("unigram", "bpe"):
        peer, tokenizer = pair(kind, "symbols")
        for text in ("<s>", "</s>", "<unk>", "<pad>", "<cls>"):
            assert tokenizer.token_to_id(text) == peer.piece_to_id(text)
        ids = [tokenizer.token_to_id(text) for text in ("<s>", "<sep>", "<cls>", "</s>")]
        assert tokenizer.decode(ids) == "<sep>"


def test_spelled_out_special_tokens_are_found_where_that_is_asked_for():
    _, tokenizer = pair("unigram", "nmt_nfkc")
    found = convert_sentencepiece(parse_sentencepiece_model(trained("unigram", "nmt_nfkc"), "x"), "x")
    end = found.token_to_id("</s>")
    assert end in found.encode("the sea</s>").ids
    assert end not in tokenizer.encode("the sea</s>").ids


def test_a_file_is_loaded_by_its_name(tmp_path):
    for name in ("x.model", "x.spm"):
        (tmp_path / name).write_bytes(trained("unigram", "nmt_nfkc"))
        tokenizer = load_tokenizer(tmp_path / name)
        assert tokenizer.encode("the sea").ids == pair("unigram", "nmt_nfkc")[0].encode("the sea")
        assert tokenizer.encode_special_tokens


def test_the_model_is_read_as_the_package_reads_it():
    pb = pytest.importorskip("sentencepiece.sentencepiece_model_pb2")
    for kind, name in CASES:
        model = parse_sentencepiece_model(trained(kind, name), name)
        peer = pb.ModelProto()
        peer.ParseFromString(trained(kind, name))
        assert [(piece.text, piece.score, piece.type) for piece in model.pieces] == [
            (piece.piece, piece.score, piece.type) for piece in peer.pieces
        ]
        trainer, normalizer = peer.trainer_spec, peer.normalizer_spec
        assert (model.model_type, model.byte_fallback) == (trainer.model_type, trainer.byte_fallback)
        assert model.whitespace_as_suffix == trainer.treat_whitespace_as_suffix
        assert model.charsmap == normalizer.precompiled_charsmap
        for field in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces"):
            assert getattr(model, field) == getattr(normalizer, field)


def assert_reads_or_refuses(read) -> None:
    message = "file.model"
    try:
        encode_text(convert_sentencepiece(read(), "file.model"), "a é ﬁ")
    except EncodingError as error:  # the library panics
        message = f"file.model {error}"
    except ValueError as error:
        message = str(error)
    assert "file.model" in message


@settings(max_examples=200)
@given(data=st.data())
def test_a_damaged_file_is_a_value_error(data):
    """Cut off, or with a byte changed: read, or refused in words, and never anything else."""
    content = bytearray(trained("bpe", "identity"))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    assert_reads_or_refuses(lambda: parse_sentencepiece_model(bytes(content), "file.model"))


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_charsmap_is_a_value_error(data):
    charsmap = bytearray(parse_sentencepiece_model(trained("bpe", "nmt_nfkc"), "x").charsmap)
    for _ in range(3):
        charsmap[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
    size = data.draw(st.sampled_from([len(charsmap), 2000, 7, 3]))
    model = SentencePieceModel(
        [Piece("<unk>", 0.0, PieceType.UNKNOWN), Piece("a", -1.0, PieceType.NORMAL)],
        charsmap=bytes(charsmap[:size]),
    )
    assert_reads_or_refuses(lambda: model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has no pieces"),
        (b"not a model at all", "is not a SentencePiece model"),
        (b"IQ== 0\nIg== 1\n", "is not a SentencePiece model"),  # tiktoken's, of LLaMA 3, has the same name
        (b"\x0a\x05\x0a\x01a\x18\x09", "9 is not a valid PieceType"),
        (b"\x0a\x03\x0a\x01a" * 2, "there twice"),
        (b"\x0a\x03\x0a\x01a", "it has not one piece for what is unknown"),
        (b"\x0a\x08\x0a\x01a\x15" + struct.pack("<f", float("nan"))[:4], "is not a SentencePiece model"),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", "has no end"),
    ],
)
def test_what_is_no_model_is_refused_in_words(content, message):
    with pytest.raises(ValueError, match=f"file.model is not a SentencePiece model: .*{message}|{message}"):
        parse_sentencepiece_model(content, "file.model")


def test_other_kinds_of_models_are_refused(tmp_path):
    model = parse_sentencepiece_model(trained("unigram", "identity"), "x")
    for kind in (ModelType.WORD, ModelType.CHAR):
        with pytest.raises(ValueError, match=f"x is a {kind.name.lower()} model: unigram and BPE"):
            convert_sentencepiece(SentencePieceModel(model.pieces, kind), "x")
    with pytest.raises(ValueError, match="x puts spaces behind words"):
        convert_sentencepiece(SentencePieceModel(model.pieces, whitespace_as_suffix=True), "x")
    (tmp_path / "pipe.model").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="device"):
        read_sentencepiece_model(tmp_path / "pipe.model")


def test_an_unused_piece_keeps_its_id_and_stands_for_no_text():
    model = parse_sentencepiece_model(trained("unigram", "identity"), "x")
    pieces = list(model.pieces)
    unused = convert_sentencepiece(model, "x").encode("the sea").ids[0]
    pieces[unused] = replace(pieces[unused], type=PieceType.UNUSED)
    tokenizer = convert_sentencepiece(SentencePieceModel(pieces), "x")
    assert unused not in tokenizer.encode("the sea").ids
    assert tokenizer.get_vocab_size() == len(pieces)


def test_what_a_charsmap_replaces():
    charsmap = Charsmap(parse_sentencepiece_model(trained("unigram", "nmt_nfkc"), "x").charsmap)
    assert charsmap.replacement("ﬁ") == "fi"
    assert charsmap.replacement("e\u0301") == "é"
    assert charsmap.replacement("\t") == " "
    assert charsmap.replacement("a") is None
    assert charsmap.replacement("e") is None  # the beginning of a key
    assert {"\x01", "\x7f"} <= set(charsmap.removed_characters())
