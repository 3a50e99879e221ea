"""The fast encoder gives the token ids that the tokenizer gives."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepleft.data.fast_encode import PieceTable, encoder, fast_encoder
from keepleft.data.tokenizer import (
    SPECIAL_TOKENS,
    TOKENIZER_KINDS,
    special_tokens,
    train_tokenizer,
    vocab_size,
)

TEXTS = [
    "The sea is calm, and the ship's crew sleeps.",
    "Où est l’école ? « Là-bas », dit-il à 10h30.",
    "आप कैसे हैं। मैं ठीक हूँ।",
    "tabs\tand  double   spaces \n\n\n new line \r\n end ",
    "x = [1, 2, 12345]; y = {'a': 3}",
] * 4
TYPE = np.dtype(np.uint16)


TOKENIZERS = {
    (kind, running_text): train_tokenizer(kind, TEXTS, 600, running_text=running_text, min_frequency=1)
    for kind in TOKENIZER_KINDS
    for running_text in (False, True)
}
blanks = st.lists(
    st.sampled_from([" ", "  ", "   ", "\n", "\t", "\r\n", "a", "1", ".", "é"]), max_size=12
).map("".join)
any_text = blanks | st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from("  \n\t\r.,'’«»।abcé१1̀हैं\x00\x85\u2028▁")
    ),
    max_size=60,
)


@pytest.mark.parametrize("key", TOKENIZERS, ids=str)
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(any_text, max_size=4))
def test_fast_encoding_gives_what_the_tokenizer_gives(key, texts):
    tokenizer = TOKENIZERS[key]
    rows = [np.frombuffer(row, TYPE) for row in encoder(tokenizer, TYPE)(texts)]
    expected = [
        [special_to_unknown(token_id, tokenizer) for token_id in encoding.ids]
        for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
    ]
    assert [row.tolist() for row in rows] == expected


def special_to_unknown(token_id: int, tokenizer) -> int:
    """A special token cannot come from a text: there it is an unknown word."""
    return special_tokens(tokenizer).unknown if token_id in special_tokens(tokenizer).ids() else token_id


@pytest.mark.parametrize("key", TOKENIZERS, ids=str)
def test_the_fast_path_is_taken(key):
    assert fast_encoder(TOKENIZERS[key], json.loads(TOKENIZERS[key].to_str()), TYPE) is not None


@pytest.mark.parametrize("running_text", [False, True])
@settings(deadline=None)
@given(text=any_text)
def test_byte_level_pieces_lose_nothing(running_text, text):
    tokenizer = TOKENIZERS["bpe", running_text]
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("key", TOKENIZERS, ids=str)
def test_a_special_token_cannot_be_written_in_a_text(key):
    tokenizer = TOKENIZERS[key]
    (row,) = encoder(tokenizer, TYPE)(["</s> <pad> a<mask>b <s>"])
    assert not special_tokens(tokenizer).ids() & set(np.frombuffer(row, TYPE).tolist())


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_special_words_in_training_text_leave_no_gap_in_the_vocabulary(kind):
    tokenizer = train_tokenizer(
        kind, [*TEXTS, "the <unk> of <unk> and </s> <unk> <pad>"], 600, min_frequency=1
    )
    assert sorted(tokenizer.get_vocab().values()) == list(range(tokenizer.get_vocab_size()))
    assert [tokenizer.token_to_id(word) for word in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    if kind == "word":
        (row,) = encoder(tokenizer, TYPE)(["<unk> </s> The"])
        assert np.frombuffer(row, TYPE).tolist() == [3, 3, tokenizer.token_to_id("The")]


def test_the_vocabulary_size_counts_gaps():
    from tokenizers import Tokenizer, models

    assert vocab_size(Tokenizer(models.WordLevel({"a": 0, "b": 7}, "a"))) == 8


def test_prefix_and_suffix_go_around_each_text():
    rows = encoder(TOKENIZERS["bpe", False], TYPE, prefix=[1], suffix=[2])(["sea", ""])
    first, second = (np.frombuffer(row, TYPE).tolist() for row in rows)
    assert (first[0], first[-1], second) == (1, 2, [1, 2])


def test_a_vocabulary_too_small_is_refused():
    with pytest.raises(ValueError, match="a vocabulary of 100 is too small"):
        train_tokenizer("bpe", TEXTS, 100)
    with pytest.raises(ValueError, match="no tokenizer is called 'sound'"):
        train_tokenizer("sound", TEXTS, 1000)


def test_pieces_are_tokenized_once_until_the_table_is_cleared(monkeypatch):
    tokenized = []

    def tokenize(words: list[str]) -> list[list[int]]:
        tokenized.extend(words)
        return [[len(word), sum(map(ord, word)) % 1000] for word in words]

    table = PieceTable(tokenize, TYPE)
    words = [f" w{n * 7919 % 100_003}" for n in range(30_000)]
    text = "".join(words).encode()
    starts = np.cumsum([0, *map(len, words)])
    for _ in range(2):
        tokens, counts = table(np.frombuffer(text, np.uint8), starts[:-1], starts[1:])
        assert tokens.tolist() == [n for word in words for n in (len(word), sum(map(ord, word)) % 1000)]
        assert set(counts.tolist()) == {2}
    assert len(tokenized) == len(set(words))
    monkeypatch.setattr("keepleft.data.fast_encode.MAX_CACHED_PIECES", 10)
    tokens, _ = table(np.frombuffer(text, np.uint8), starts[:-1], starts[1:])
    assert len(tokens) == 60_000
    assert len(tokenized) == 2 * len(set(words))
