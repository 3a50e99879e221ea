"""A beam of one is greedy; a beam wide enough finds the best of all texts; scores are those of a full
pass.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
import torch
from scipy.stats import chisquare

import keepleft as kl
from decoding.models import END, START, decoder, pair


def last(texts):
    for now in texts:
        out = now
    return out


def score(model, prompt: list[int], text: list[int], source=None) -> float:
    """Log-probability of a text after a prompt, by one full pass."""
    tokens = torch.tensor([[*prompt, *text[:-1]]])
    with torch.no_grad():
        scores = model(tokens) if source is None else model(source, tokens)
    chances = scores[0, len(prompt) - 1 :].double().log_softmax(-1)
    return float(chances.gather(1, torch.tensor(text)[:, None]).sum())


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_of_one_is_greedy(seed):
    model, prompts = decoder(seed), [[3, 4], [5, 6]]
    one = kl.decode(model, torch.tensor(prompts), kl.beam(1, eos_ids=[END]), max_new_tokens=8)
    plain = kl.decode(model, torch.tensor(prompts), kl.greedy(eos_ids=[END]), max_new_tokens=8)
    assert [[w.tokens for w in row] for row in kl.beam(1, eos_ids=[END]).results(last(one))] == [
        [w.tokens for w in row] for row in kl.greedy(eos_ids=[END]).results(last(plain))
    ]


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_of_full_width_finds_the_best_of_all_texts(seed, penalty):
    vocab, limit = 5, 4
    model = pair(seed, vocab)
    source = torch.randint(vocab, (1, 4), generator=torch.Generator().manual_seed(seed))
    (found,) = kl.completions(
        model,
        None,
        source.tolist(),
        max_new_tokens=limit,
        eos_token_id=END,
        num_beams=vocab**limit,
        length_penalty=penalty,
        early_stopping="never",
        num_return_sequences=5,
    )
    others = [t for t in range(vocab) if t != END]
    texts = [[*text, END] for n in range(limit) for text in product(others, repeat=n)]
    texts += [list(text) for text in product(others, repeat=limit)]  # cut off at the limit
    ranked = sorted(texts, key=lambda text: -score(model, [START], text, source) / len(text) ** penalty)
    assert [answer.tokens for answer in found] == ranked[:5]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [1, 2])
def test_a_score_is_that_of_a_full_pass_and_texts_are_sorted_and_distinct(seed, groups):
    model, prompts = decoder(seed), [[3, 4, 5], [6, 7, 8]]
    found = kl.completions(
        model,
        None,
        prompts,
        max_new_tokens=7,
        eos_token_id=END,
        num_beams=6,
        num_beam_groups=groups,
        diversity_penalty=0.0,
        length_penalty=0.7,
        num_return_sequences=6,
    )
    for prompt, several in zip(prompts, found, strict=True):
        scores = [answer.score for answer in several]
        assert scores == sorted(scores, reverse=True)
        assert len({tuple(answer.tokens) for answer in several}) == len(several)
        for answer in several:
            assert answer.score == pytest.approx(
                score(model, prompt, answer.tokens) / len(answer.tokens) ** 0.7, abs=1e-4
            )


def test_groups_that_are_kept_apart_begin_differently():
    model = decoder(3)
    texts = kl.decode(
        model, torch.tensor([[3, 4]]), kl.beam(4, groups=4, diversity_penalty=100.0), max_new_tokens=1
    )
    assert len(set(last(texts).tokens[:, -1].tolist())) == 4


def test_beams_that_draw_are_distinct_and_the_same_for_the_same_seed():
    model = decoder(1)
    draw = lambda seed: [
        answer.tokens
        for answer in kl.completions(
            model,
            None,
            [[3, 4]],
            do_sample=True,
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=5,
            eos_token_id=END,
            temperature=2.0,
            seed=seed,
        )[0]
    ]
    assert draw(1) == draw(1)
    assert len({tuple(text) for text in draw(1)}) == len(draw(1))
    assert len({str(draw(seed)) for seed in range(6)}) > 1


def test_beams_draw_the_first_tokens_one_after_another_without_putting_back():
    model, count = decoder(1), 3000
    with torch.no_grad():
        p = model(torch.tensor([[3, 4]]))[0, -1].double().softmax(-1)
    found = kl.completions(
        model,
        None,
        [[3, 4]] * count,
        do_sample=True,
        num_beams=2,
        num_return_sequences=2,
        max_new_tokens=1,
        seed=list(range(count)),
        batch_size=count,
    )
    drawn = Counter(frozenset(answer.tokens[0] for answer in several) for several in found)
    wanted = {
        frozenset((a, b)): float(p[a] * p[b] * (1 / (1 - p[a]) + 1 / (1 - p[b]))) * count
        for a, b in combinations(range(len(p)), 2)
    }
    often = [two for two, times in wanted.items() if times >= 5]
    counts = [
        [*(side[two] for two in often), count - sum(side[two] for two in often)] for side in (drawn, wanted)
    ]
    assert chisquare(*counts).pvalue > 1e-3


def test_a_search_that_is_left_early_shows_what_was_going_on():
    strategy = kl.beam(3, num_sequences=3)
    texts = next(iter(kl.decode(decoder(), torch.tensor([[3]]), strategy, max_new_tokens=5)))
    (found,) = strategy.results(texts)
    assert len(found) == 3
    assert all(len(text.tokens) == 1 for text in found)


def test_a_beam_of_none_is_refused():
    with pytest.raises(ValueError, match="a beam of 0 is none"):
        kl.beam(0)
    with pytest.raises(ValueError, match="4 beams cannot be 3 groups"):
        kl.beam(4, groups=3)
