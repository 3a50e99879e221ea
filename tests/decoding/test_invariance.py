"""The same request gives the same text, alone or among others, padded on either side, in pieces, with any
cache.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from decoding.models import END, decoder, pair

CACHES = ["dynamic", "static", "ring", "offloaded"]
prompts = st.lists(st.lists(st.integers(3, 10), min_size=1, max_size=9), min_size=1, max_size=6)


def tokens(model, given, **said):
    return [
        answer.tokens
        for several in kl.completions(model, None, given, eos_token_id=END, max_new_tokens=8, **said)
        for answer in several
    ]


@settings(max_examples=15, deadline=None)
@given(
    given=prompts,
    seed=st.integers(0, 5),
    beams=st.sampled_from([1, 3]),
    chunk=st.none() | st.integers(1, 4),
    cache=st.sampled_from(CACHES),
    windowed=st.booleans(),
)
def test_alone_or_among_others_whole_or_in_pieces_with_any_cache(given, seed, beams, chunk, cache, windowed):
    masks = {"decoder": kl.StackDesign(2, (kl.causal & kl.window(4),))} if windowed else {}
    model = decoder(seed, **masks)
    alone = [text for prompt in given for text in tokens(model, [prompt], num_beams=beams)]
    assert (
        tokens(model, given, num_beams=beams, prefill_chunk_size=chunk, cache_implementation=cache) == alone
    )


@settings(max_examples=10, deadline=None)
@given(
    given=prompts,
    seed=st.integers(0, 5),
    beams=st.sampled_from([1, 3]),
    cache=st.sampled_from(["dynamic", "static"]),
)
def test_sources_of_unequal_length_alone_or_among_others(given, seed, beams, cache):
    model = pair(seed)
    alone = [text for prompt in given for text in tokens(model, [prompt], num_beams=beams)]
    assert tokens(model, given, num_beams=beams, cache_implementation=cache) == alone


@pytest.mark.parametrize("beams", [1, 3])
def test_a_long_prompt_does_not_shorten_the_texts_beside_it(beams):
    model = kl.build(
        kl.presets.small(kl.presets.gpt2).but(
            vocab=11, position=kl.LearnedPositions(14), initial=kl.NormalInit(0.4)
        )
    ).eval()
    given = [[3, 4], [5] * 12, [6, 7, 8], [9] * 13]
    said = dict(num_beams=beams, max_new_tokens=8, forced_eos_token_id=END, eos_token_id=END)
    together = [several[0].tokens for several in kl.completions(model, None, given, **said)]
    assert together == [kl.completions(model, None, [prompt], **said)[0][0].tokens for prompt in given]
    assert all(len(text) <= 14 - len(prompt) for text, prompt in zip(together, given, strict=True))


def test_in_a_batch_of_sixty_four():
    model = decoder(4)
    chance = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (64,), generator=chance).tolist()
    given = [torch.randint(3, 11, (size,), generator=chance).tolist() for size in sizes]
    assert tokens(model, given, batch_size=64) == [
        text for prompt in given for text in tokens(model, [prompt])
    ]


@pytest.mark.parametrize("left", [True, False])
def test_padding_on_either_side_is_invisible(left):
    model, texts = decoder(1), [[3, 4, 5, 6], [7, 8]]
    filled = torch.tensor([texts[0], [9, 9, *texts[1]] if left else [*texts[1], 9, 9]])
    segments = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1] if left else [1, 1, 0, 0]])
    strategy = kl.greedy()
    *_, last = kl.decode(model, filled, strategy, max_new_tokens=5, segments=segments)
    assert [row[0].tokens for row in strategy.results(last)] == [
        kl.completions(model, None, [text], max_new_tokens=5)[0][0].tokens for text in texts
    ]


def test_the_test_can_fail():
    """A model that sees the padding writes something else."""
    model, changed = decoder(1), 0
    for seed in range(8):
        text = torch.randint(3, 11, (1, 3), generator=torch.Generator().manual_seed(seed))
        strategy = kl.greedy()
        *_, alone = kl.decode(model, text, strategy, max_new_tokens=5)
        # no segments
        *_, peeking = kl.decode(
            model, torch.cat([torch.full((1, 4), 9), text], 1), strategy, max_new_tokens=5
        )
        changed += strategy.results(alone)[0][0].tokens != strategy.results(peeking)[0][0].tokens
    assert changed


def test_deterministic_scores_are_the_same_bit_for_bit_in_any_company(one_thread):
    model = decoder(7)
    given = [[3, 4, 5], [6], [7, 8, 9, 10], [3, 3], [5, 4, 3, 6, 7, 8]]
    said = dict(max_new_tokens=8, deterministic=True)
    together = [several[0].score for several in kl.completions(model, None, given, **said)]
    assert together == [kl.completions(model, None, [prompt], **said)[0][0].score for prompt in given]
    for cache in ("static", "ring"):
        assert together == [
            several[0].score
            for several in kl.completions(model, None, given, cache_implementation=cache, **said)
        ]


def test_a_cache_of_8_bits_is_close_and_small():
    model = kl.build(
        kl.presets.small(kl.presets.llama3).but(vocab=97), generator=torch.Generator().manual_seed(0)
    ).eval()
    text = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full, state = model.start(text)
        some, small = model.start(text, cache="quantized")
        for n in range(10):
            full, some = model.step(text[:, n : n + 1], state), model.step(text[:, n : n + 1], small)
    assert (some - full).abs().max() < 0.02 * full.abs().max()
    assert {t.dtype for pair_ in small.caches[0].layers.values() for t in pair_} == {torch.int8}


def test_what_is_dropped_was_never_there():
    model, text = decoder(2), torch.tensor([[3, 4, 5, 6]])
    for cache in ("dynamic", "static", "quantized", "offloaded"):
        with torch.no_grad():
            _, state = model.start(text, cache=cache, **({"capacity": 9} if cache == "static" else {}))
            want = model.step(torch.tensor([[7]]), state)
            state.crop(1)
            model.step(torch.tensor([[8, 9]]), state)
            state.crop(2)
            assert torch.allclose(model.step(torch.tensor([[7]]), state), want)
    with torch.no_grad():
        windowed = decoder(2, decoder=kl.StackDesign(2, (kl.causal & kl.window(3),)))
        _, state = windowed.start(text, cache="ring")
    with pytest.raises(ValueError, match="a ring cache has overwritten"):
        state.crop(1)


def test_prompts_longer_than_the_window_stream_through():
    model = decoder(2, decoder=kl.StackDesign(2, (kl.causal & kl.window(4),)))
    text = torch.randint(3, 11, (1, 50), generator=torch.Generator().manual_seed(0)).tolist()
    assert tokens(model, text, cache_implementation="ring", prefill_chunk_size=4) == tokens(model, text)
