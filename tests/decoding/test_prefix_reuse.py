"""A KV cache kept for the next prompt changes nothing but the time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from decoding.models import V, decoder, pair
from keepleft.decoding.prefix_reuse import PrefixReuseModel, shared_prefix_length

MODEL = decoder(0, decoder=kl.StackDesign(2, (kl.causal & kl.window(4),))).double()
PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=25, deadline=None)
@given(prompts=PROMPTS, steps=st.integers(0, 3), cache=st.sampled_from(["dynamic", "offloaded", "ring"]))
def test_the_logits_are_those_of_a_fresh_start(prompts, steps, cache):
    """After any prompts and steps before; a ring cache cannot go back, and starts anew."""
    model = MODEL
    reusing = PrefixReuseModel(model)
    with torch.no_grad():
        for prompt in prompts:
            logits, state = reusing.start(torch.tensor([prompt]), cache=cache)
            sequence = list(prompt)
            for _ in range(steps):
                sequence.append(int(logits.argmax()) % V)
                logits = reusing.step(torch.tensor([sequence[-1:]]), state)
            expected, _ = model.start(torch.tensor([sequence]))
            torch.testing.assert_close(logits, expected)
            assert reusing.tokens == sequence


def test_what_is_shared_is_not_prefilled_again():
    model = decoder(0)
    widths = []
    extend = model.extend
    model.extend = lambda tokens, *given, **named: (
        widths.append(tokens.shape[1]) or extend(tokens, *given, **named)
    )
    reusing = PrefixReuseModel(model)
    with torch.no_grad():
        for prompt in ([3, 4, 5, 6], [3, 4, 5, 6, 7, 8], [3, 4, 9], [3, 4, 9], [3, 4], [5]):
            reusing.start(torch.tensor([prompt]))
    assert widths == [4, 2, 1, 1, 1, 1]  # the last token is always given again


def test_what_was_interrupted_is_forgotten():
    model = decoder(0)
    reusing = PrefixReuseModel(model)
    reusing.start(torch.tensor([[3, 4, 5]]))
    step = model.step

    def interrupt(tokens, state):
        step(tokens, state)
        raise KeyboardInterrupt

    model.step = interrupt
    with pytest.raises(KeyboardInterrupt):
        reusing.start(torch.tensor([[3, 4, 5, 6]]))
    model.step = step
    logits, _ = reusing.start(torch.tensor([[3, 4, 5, 6]]))
    assert reusing.num_reused == 0
    torch.testing.assert_close(logits, model.start(torch.tensor([[3, 4, 5, 6]]))[0])


def test_an_encoder_decoder_keeps_its_source():
    model = pair(1).double()
    memory = model.encode_memory(torch.tensor([[3, 4, 5]]))
    reusing = PrefixReuseModel(model)
    with torch.no_grad():
        for prompt in ([1, 3], [1, 3, 4], [1, 5]):
            logits, _ = reusing.start(torch.tensor([prompt]), memory=memory)
            torch.testing.assert_close(logits, model.start(torch.tensor([prompt]), memory=memory)[0])


def test_the_shared_prefix():
    assert shared_prefix_length([], [1]) == 0
    assert shared_prefix_length([1, 2], [1, 2, 3]) == 2
    assert shared_prefix_length([1, 2, 3], [1, 3]) == 1
