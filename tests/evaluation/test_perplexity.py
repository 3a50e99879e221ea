"""Perplexity is its definition, however the window slides; bits per byte count the bytes of the text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import keepleft as kl
import peers
from keepleft.evaluation import token_logprobs
from keepleft.evaluation.perplexity import Perplexity, perplexity, sliding_windows, token_nll

LENGTH = 37  # positions of the peers' GPT-2


@pytest.fixture(scope="module")
def ours_and_theirs(tmp_path_factory):
    peer = peers.DECODERS["gpt2"]()
    ours, _ = kl.load(peers.save(peer, tmp_path_factory.mktemp("gpt2")), dtype=torch.float64)
    return ours, peer.double()


def letters() -> Tokenizer:
    """A token for each letter."""
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS éह"
    return Tokenizer(models.BPE({c: n for n, c in enumerate(alphabet)}, [], unk_token="a"))


def definition(score, text: list[int], window: int) -> torch.Tensor:
    """Each token after the first, given at most `window` tokens before it, one forward pass each."""
    out = []
    for n in range(1, len(text)):
        before = torch.tensor([text[max(0, n - window) : n]])
        out.append(-score(before)[0, -1].log_softmax(-1)[text[n]])
    return torch.stack(out).double()


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_each_token_is_predicted_once_with_as_much_context_as_promised(length, window, data):
    stride = data.draw(st.integers(1, window))
    predicted = []
    for begin, end, first in sliding_windows(length, window, stride):
        assert 0 <= begin < end <= length - 1
        assert end - begin <= window
        for token in range(first, end + 1):
            predicted.append(token)
            assert token - begin >= min(token, window - stride)
    assert predicted == list(range(1, length))


@settings(max_examples=15)
@given(st.integers(2, 50), st.integers(1, 12), st.integers(1, 5))
def test_with_stride_1_it_is_the_definition(ours_and_theirs, length, window, batch):
    ours, peer = ours_and_theirs
    text = torch.randint(peers.V, (length,)).tolist()
    nll = token_nll(ours, text, window=window, stride=1, batch_size=batch)
    with torch.no_grad(), peers.Double():
        for score in (ours, lambda tokens: peer(input_ids=tokens).logits):
            torch.testing.assert_close(nll, definition(score, text, window), rtol=0, atol=1e-9)


@pytest.mark.parametrize("window", [None, 29, LENGTH])
def test_with_a_window_as_long_as_the_text_it_is_one_pass(ours_and_theirs, window):
    ours, peer = ours_and_theirs
    text = torch.randint(peers.V, (29,))
    nll = token_nll(ours, text.tolist(), prefix_token_id=5, window=window)
    with torch.no_grad(), peers.Double():
        logits = peer(input_ids=torch.cat([torch.tensor([5]), text[:-1]])[None]).logits[0]
    expected = -logits.log_softmax(-1).gather(-1, text[:, None])[:, 0]
    torch.testing.assert_close(nll, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("stride", [1, 4, 7])
def test_texts_longer_than_the_positions_are_the_usual_loop_over_transformers(ours_and_theirs, stride):
    ours, peer = ours_and_theirs
    text = torch.randint(peers.V, (100,))
    window = 11
    expected = []
    scored = 0
    with torch.no_grad(), peers.Double():
        while scored < len(text) - 1:
            end = min(window if scored == 0 else scored + stride, len(text) - 1)
            begin = max(0, end - window)
            logprobs = peer(input_ids=text[None, begin:end]).logits[0].log_softmax(-1)
            expected += [-logprobs[n - 1 - begin, text[n]] for n in range(scored + 1, end + 1)]
            scored = end
    nll = token_nll(ours, text.tolist(), window=window, stride=stride, batch_size=3)
    torch.testing.assert_close(nll, torch.stack(expected), rtol=0, atol=1e-9)
    assert len(token_nll(ours, text.tolist())) == 99  # by default as wide as there are positions


def test_bits_per_byte_are_nats_over_ln_2_over_utf_8_bytes(ours_and_theirs):
    ours, _ = ours_and_theirs
    texts = ["abc déf", "ह ह g" * 20, "x"]
    result = perplexity(ours, letters(), texts, prefix_token_id=52, window=9)
    nats = sum(
        float(token_nll(ours, letters().encode(text).ids, prefix_token_id=52, window=9).sum())
        for text in texts
    )
    tokens, size = sum(map(len, texts)), sum(len(text.encode("utf-8")) for text in texts)
    assert result == Perplexity(pytest.approx(nats), tokens, size)
    assert size > tokens
    assert result.perplexity == pytest.approx(math.exp(nats / tokens))
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size)
    single = perplexity(ours, letters(), texts[1])
    assert single.tokens == len(texts[1]) - 1  # without a start the first token follows nothing


def test_logits_computed_in_chunks_give_the_same(ours_and_theirs, monkeypatch):
    ours, _ = ours_and_theirs
    text = torch.randint(peers.V, (50,)).tolist()
    at_once = token_nll(ours, text, window=20)
    monkeypatch.setattr(token_logprobs, "MAX_LOGITS", 3 * peers.V)
    torch.testing.assert_close(token_nll(ours, text, window=20), at_once)


def test_wrong_use_raises(ours_and_theirs):
    ours, _ = ours_and_theirs
    with pytest.raises(ValueError, match="a window of 50 is more than the 37 positions"):
        token_nll(ours, [1] * 60, window=50)
    for stride in (0, 9):
        with pytest.raises(ValueError, match=f"a stride of {stride} in a window of 8"):
            token_nll(ours, [1] * 60, window=8, stride=stride)
    with pytest.raises(ValueError, match="token 53 is not in the vocabulary"):
        token_nll(ours, [1, 53])
    with pytest.raises(ValueError, match="nothing to predict"):
        perplexity(ours, letters(), ["", "a"])
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        token_nll(kl.build(kl.presets.small(kl.presets.gpt2)), [1, 2])
    with pytest.raises(ValueError, match="for an encoder-decoder there is likelihood"):
        token_nll(kl.build(kl.presets.small(kl.presets.t5)).eval(), [1, 2])
