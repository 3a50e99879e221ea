"""Tokens as text: what each adds, and never a character that only vocabularies write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import keepleft as kl
from keepleft.data.token_text import token_pieces, token_texts

TEXTS = ["the sea is calm, and the ship sails on", "आप कैसे हैं", '12 345 {"a": 1}'] * 3
TOKENIZERS = {
    (kind, running_text): kl.train_tokenizer(kind, TEXTS, 340, running_text=running_text)
    for kind in ("bpe", "unigram", "char")
    for running_text in (False, True)
}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text("theszqkआ \t", max_size=12))
def test_no_piece_is_written_as_in_the_vocabulary(kind, text):
    """The space that a decoder strips from the beginning is a space, and not Ġ or ▁."""
    tokenizer = TOKENIZERS[kind]
    tokens = tokenizer.encode(text).ids
    pieces = [*token_pieces(tokenizer, tokens), *token_texts(tokenizer, [], tokens[:1])]
    assert not any(mark in piece for piece in pieces for mark in "Ġĉ▁")


def test_the_first_space_of_a_text_is_a_space():
    for kind in ("bpe", "unigram"):
        tokenizer = TOKENIZERS[kind, False]
        tokens = tokenizer.encode("zebra").ids
        assert token_pieces(tokenizer, tokens)[0] == " "
        assert tokenizer.id_to_token(tokens[0]) in ("Ġ", "▁")
    assert token_pieces(TOKENIZERS["bpe", False], tokens=[1])[0] == "<s>"  # special tokens keep their names
