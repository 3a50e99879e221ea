"""Text as it is streamed: whole characters, and never the beginning of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from decoding.words import byte_tokens
from keepleft.data.tokenizer import train_tokenizer
from keepleft.decoding.detokenizer import IncrementalDetokenizer, held_back_length

TOKENIZER = byte_tokens()
KINDS = {
    "bytes": TOKENIZER,
    "unigram": train_tokenizer("unigram", ["the sea is calm and blue", "the ship sails on"] * 9, 80),
    "words": train_tokenizer("word", ["the sea is calm and blue"] * 3, 40),
    "letters": train_tokenizer("char", ["the sea is calm"] * 3, 40, running_text=True),
}


def reference(tokenizer, tokens, stops):
    """The slow definition: after each token the whole text is read again."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count], skip_special_tokens=True)
        # the next token may make a character whole
        stable = text if count == len(tokens) else text.rstrip("\ufffd")
        if places := [at for stop in stops if (at := stable.find(stop)) >= 0]:
            return stable[: min(places)]
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_is_streamed_is_the_text_up_to_its_first_stop_string(kind, data):
    tokenizer = KINDS[kind]
    tokens = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=24))
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    pieces = [
        text[a : a + b]
        for a, b in data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=3))
    ]
    stops = [
        stop
        for stop in [*pieces, *data.draw(st.lists(st.text("ae s", min_size=1, max_size=4), max_size=2))]
        if stop and "\ufffd" not in stop
    ]
    detokenizer = IncrementalDetokenizer(tokenizer, stops)
    shown = ""
    for token in tokens:
        shown += detokenizer.add(token)
        assert not any(stop in shown for stop in stops)
        assert "".join(shown) == detokenizer.text[: len(shown)]
    shown += detokenizer.end()
    assert shown == reference(tokenizer, tokens, stops)


@given(text=st.text("ab", max_size=12), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_what_is_held_back_is_the_longest_end_that_begins_a_stop_string(text, stops):
    if any(stop in text for stop in stops):
        return  # it would have ended there
    size = held_back_length(text, stops)
    begins = [
        n
        for n in range(1, len(text) + 1)
        if any(len(stop) > n and stop.startswith(text[-n:]) for stop in stops)
    ]
    assert size == max(begins, default=0)


def test_a_token_that_changes_how_those_before_it_read_does_not_end_the_stream():
    words = {"[UNK]": 0, "do": 1, "n": 2, "'": 3, "t": 4}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join([*map(detokenizer.add, [1, 2, 3, 4, 1]), detokenizer.end()])
    assert text.startswith("do")
    assert text.endswith("do")


def test_a_text_that_was_told_to_begin_is_not_stopped_by_its_beginning():
    row = TOKENIZER.encode("the sea is calm").ids
    detokenizer = IncrementalDetokenizer(TOKENIZER, ["sea"])
    assert detokenizer.begin(row) == "the sea is calm"
    assert "".join(map(detokenizer.add, TOKENIZER.encode(" and the sea").ids)) == " and the "
    assert detokenizer.stopped
    assert detokenizer.end() == ""
