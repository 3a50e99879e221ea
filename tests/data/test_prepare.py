"""Preparation: texts become complete token stores or none; skipped records are counted."""

from __future__ import annotations

import errno
import json

import numpy as np
import pytest

from keepleft.data.fast_encode import encoder
from keepleft.data.prepare import EncodedField, label_encoder, prepare
from keepleft.data.token_store import TokenStore, store_writer, token_dtype
from keepleft.data.tokenizer import train_tokenizer

TYPE = token_dtype(300)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer("word", ["a b c d e f g"] * 3, 50, min_frequency=1)


def texts(store: TokenStore, field: str, tokenizer) -> list[str]:
    return [tokenizer.decode(row) for row in store[field].take(np.arange(len(store))).to_lists()]


def test_records_come_back_and_what_does_not_fit_is_counted(tmp_path, tokenizer):
    records = [("a b", "c"), ("", "d"), ("a b c d e", "f"), ("g", "a a")]
    column = lambda name: EncodedField(name, encoder(tokenizer, TYPE), max_length=3)
    store, counts = prepare([(records, [column("src"), column("tgt")])], tmp_path / "store", vocab=300)
    assert texts(store, "src", tokenizer) == ["a b", "g"]
    assert texts(store, "tgt", tokenizer) == ["c", "a a"]
    assert (counts.records, counts.written, counts.empty, counts.overlong) == (4, 2, 1, 1)


def test_long_texts_are_cut_or_broken_up_where_that_is_right(tmp_path, tokenizer):
    records = [("a b c d e",), ("f g",)]
    cut, counts = prepare(
        [(records, [EncodedField("text", encoder(tokenizer, TYPE), 3, overlong="cut")])],
        tmp_path / "cut",
        vocab=300,
    )
    assert texts(cut, "text", tokenizer) == ["a b c", "f g"]
    assert counts.truncated == 1
    prefix, suffix = (np.array([n], TYPE).tobytes() for n in (1, 2))
    stores = {}
    for overlong in ("cut", "break", "flow"):
        column = EncodedField("text", encoder(tokenizer, TYPE), 4, prefix, suffix, overlong)
        stores[overlong], _ = prepare([(records, [column])], tmp_path / overlong, vocab=300)
    rows = {
        overlong: [
            [n if n < 3 else 9 for n in row] for row in store["text"].take(np.arange(len(store))).to_lists()
        ]
        for overlong, store in stores.items()
    }
    assert rows["cut"] == [[1, 9, 9, 2], [1, 9, 9, 2]]
    assert rows["break"] == [[1, 9, 9, 2], [1, 9, 9, 2], [1, 9, 2], [1, 9, 9, 2]]
    assert rows["flow"] == [[1, 9, 9, 9], [9, 9, 2], [1, 9, 9, 2]]


def test_a_label_never_seen_is_named(tmp_path, tokenizer):
    known = label_encoder(["bad", "good"], "dev.tsv", 300)
    message = r"dev\.tsv has the label 'fine', which was never seen in training: there are 'bad', 'good'"
    fields = [EncodedField("text", encoder(tokenizer, TYPE)), EncodedField("label", known)]
    with pytest.raises(ValueError, match=message):
        prepare([([("a", "good"), ("b", "fine")], fields)], tmp_path / "store", vocab=300)
    assert not list(tmp_path.iterdir())  # nothing half-written


def test_nothing_left_is_an_error_and_leaves_nothing(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="of 2 records none is left to train on: 2 are empty"):
        prepare(
            [([("",), (" ",)], [EncodedField("text", encoder(tokenizer, TYPE), 5)])],
            tmp_path / "store",
            vocab=300,
        )
    assert not list(tmp_path.iterdir())


def test_an_incomplete_store_is_refused(tmp_path):
    with store_writer(tmp_path / "s", ["text"], vocab=300) as writer:
        writer.add("text", [np.array([1, 2, 3], TYPE).tobytes(), np.array([4], TYPE).tobytes()])
    store = TokenStore.open(tmp_path / "s")
    assert store["text"].take(np.array([1, 0])).to_lists() == [[4], [1, 2, 3]]
    path = tmp_path / "s" / "text.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"text\.tokens does not hold the 4 numbers"):
        TokenStore.open(tmp_path / "s")
    (tmp_path / "s" / "store.json").write_text("{")
    with pytest.raises(ValueError, match="is not a complete token store"):
        TokenStore.open(tmp_path / "s")


def test_a_crash_while_writing_leaves_the_old_store(tmp_path):
    with store_writer(tmp_path / "s", ["text"], vocab=300) as writer:
        writer.add("text", [np.array([1], TYPE).tobytes()])
    with (
        pytest.raises(RuntimeError, match="crash"),
        store_writer(tmp_path / "s", ["text"], vocab=300) as writer,
    ):
        raise RuntimeError("crash")
    assert len(TokenStore.open(tmp_path / "s")) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_large_vocabulary_has_room(tmp_path):
    dtype = token_dtype(100_000)
    with store_writer(tmp_path / "s", ["text"], vocab=100_000) as writer:
        writer.add("text", [np.array([99_999], dtype).tobytes()])
    assert TokenStore.open(tmp_path / "s")["text"].take(np.array([0])).to_lists() == [[99_999]]
    assert json.loads((tmp_path / "s" / "store.json").read_text())["fields"]["text"]["type"] == "uint32"


def test_parts_of_a_store():
    store = TokenStore.from_lists(text=[[n] * (n + 1) for n in range(10)])
    train, held_out = store.split_random(2, seed=1)
    parts = [part["text"].take(np.arange(len(part))).to_lists() for part in (train, held_out)]
    assert [len(part) for part in parts] == [8, 2]
    assert sorted(parts[0] + parts[1]) == [[n] * (n + 1) for n in range(10)]
    assert store.split_random(2, seed=1)[1]["text"].lengths().tolist() == held_out["text"].lengths().tolist()
    head, tail = store.split_tail(0.2)
    assert tail["text"].tokens.tolist() == [8] + [9] * 10
    assert len(head["text"].tokens) == 44


def test_a_full_disk_is_said_by_name_and_leaves_nothing(tmp_path):
    message = "the token store .*/s could not be written .*: free some space"
    with pytest.raises(OSError, match=message), store_writer(tmp_path / "s", ["text"], vocab=300):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())
