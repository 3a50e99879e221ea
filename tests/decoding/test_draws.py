"""What is drawn has exactly the distribution that the options ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

import keepleft as kl
from decoding.models import decoder
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.decoding.processor_table import PromptContext, make_processors
from keepleft.decoding.sampling import sample_tokens, splitmix64, uniform

DRAWS = 100_000
SCORES = torch.tensor([2.0, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -2.0, -4.0, 0.9])

NARROWED = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"typical_p": 0.7},
    {"epsilon_cutoff": 0.05},
    {"eta_cutoff": 0.1},
    {"top_h": 0.6},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9},
    {"top_k": 7, "min_p": 0.05},
    {"temperature": 1.3, "typical_p": 0.9},
    {"repetition_penalty": 1.5, "top_p": 0.9},
    {"repetition_penalty": 2.5},
    {"presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"logit_bias": {3: 1.5, 0: -2.0}},
    {"suppress_tokens": [1, 2]},
    {"bad_words_ids": [[4], [5, 6]], "temperature": 0.9},
    {"sequence_bias": {(5, 0): -1.0}},
    {"shortlist": [0, 3, 4]},
]


def expected(options: GenerationConfig, text: list[int]) -> np.ndarray:
    """The definition, in plain numpy, of each step in turn."""
    scores = SCORES.double().numpy().copy()
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    for run, added in (options.sequence_bias or {}).items():
        if len(run) == 1 or text[-len(run) + 1 :] == list(run[:-1]):
            scores[run[-1]] += added
    for token, added in (options.logit_bias or {}).items():
        scores[token] += added
    for token in set(text):
        if options.repetition_penalty:
            scores[token] *= (
                options.repetition_penalty if scores[token] < 0 else 1 / options.repetition_penalty
            )
        scores[token] -= (options.presence_penalty or 0) + (options.frequency_penalty or 0) * text.count(
            token
        )
    for run in options.bad_words_ids or []:
        if len(run) == 1 or text[-len(run) + 1 :] == run[:-1]:
            scores[run[-1]] = -np.inf
    for token in options.suppress_tokens or []:
        scores[token] = -np.inf
    if options.shortlist:
        scores[[n for n in range(len(scores)) if n not in options.shortlist]] = -np.inf
    scores = scores / (options.temperature or 1.0)
    best = lambda: np.argsort(-scores, kind="stable")
    if options.top_h:
        p = softmax(scores)[best()]
        entropy = -p * np.log(p)
        keep = max(1, int((np.cumsum(entropy) <= options.top_h * entropy.sum()).sum()))
        scores[best()[keep:]] = -np.inf
    if options.top_k:
        scores[best()[options.top_k :]] = -np.inf
    if options.top_p:
        before = np.cumsum(softmax(scores)[best()]) - softmax(scores)[best()]
        scores[best()[before >= options.top_p]] = -np.inf
    if options.min_p:
        p = softmax(scores)
        scores[p < options.min_p * p.max()] = -np.inf
    if options.typical_p:
        p = softmax(scores)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            far = np.abs(surprise - np.nansum(p * surprise))
        order = np.argsort(far, kind="stable")
        keep = int((np.cumsum(p[order]) < options.typical_p).sum()) + 1
        scores[order[keep:]] = -np.inf
    if options.epsilon_cutoff:
        scores[softmax(scores) < options.epsilon_cutoff] = -np.inf
    if options.eta_cutoff:
        p = softmax(scores)
        entropy = -np.sum(p[p > 0] * np.log(p[p > 0]))
        scores[p < min(options.eta_cutoff, np.sqrt(options.eta_cutoff) * np.exp(-entropy))] = -np.inf
    return softmax(scores)


@pytest.mark.parametrize("said", NARROWED, ids=str)
def test_draws_follow_the_exact_distribution(said):
    options = GenerationConfig(do_sample=True, **said)
    text = [1, 1, 5]
    strategy = kl.sample(3, processors=make_processors(options, PromptContext(prompt_width=1)))
    texts, _ = strategy.begin(torch.tensor([[0]]), None, torch.tensor([9]))
    texts = texts.__class__(
        torch.tensor([[0, *text]]), texts.score, texts.done, texts.lengths, texts.max_new_tokens, 1
    )
    scores = SCORES[None]
    for transform in strategy.processors:
        scores = transform(scores, texts)
    wanted = expected(
        options, [0, *text] if "penalty" not in str(said) or "repetition" in str(said) else text
    )
    seeds = splitmix64(torch.arange(DRAWS), 7)
    found = np.bincount(
        sample_tokens(scores.expand(DRAWS, -1), uniform(seeds, 3)).numpy(), minlength=len(wanted)
    )
    assert not found[wanted == 0].any()
    assert chisquare(found[wanted > 0], wanted[wanted > 0] * DRAWS).pvalue > 1e-3


def test_beams_that_draw_are_left_with_one_token_more_than_there_are_ends():
    for said in (
        {"top_k": 1},
        {"top_p": 0.01},
        {"min_p": 1.0},
        {"typical_p": 0.01},
        {"epsilon_cutoff": 0.99},
    ):
        left = lambda beams, said=said: sum(
            make_processors(
                GenerationConfig(do_sample=True, num_beams=beams, eos_token_id=[2, 5], **said),
                PromptContext(prompt_width=1),
            )[0](SCORES[None], None)
            .isfinite()[0]
            .tolist()
        )
        assert (left(1), left(2)) == (1, 3), said


def test_the_numbers_behind_are_uniform_and_belong_to_their_place():
    seeds = torch.arange(DRAWS)
    for place in (0, 1, 1000):
        assert kstest(uniform(seeds, place).numpy(), "uniform").pvalue > 1e-3
    pairs = torch.stack([uniform(seeds, 0), uniform(seeds, 1)])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02
    places = uniform(torch.tensor([5]), torch.arange(DRAWS))
    assert kstest(places.numpy(), "uniform").pvalue > 1e-3
    assert torch.equal(uniform(torch.tensor([5, 6]), 3)[1:], uniform(torch.tensor([6]), 3))
    assert torch.equal(uniform(torch.tensor([5]), torch.tensor(3)), uniform(torch.tensor([5]), 3))


def test_what_cannot_come_is_not_drawn_even_at_the_edges():
    scores = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    for chance in (0.0, 0.25, 0.5, 1 - 2**-53):
        assert int(sample_tokens(scores, torch.tensor([chance], dtype=torch.float64))) in (1, 3)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(-(2**70), 2**70))
def test_a_request_is_drawn_the_same_whatever_is_beside_it(seed):
    model, said = decoder(2), dict(do_sample=True, max_new_tokens=6, temperature=1.5, seed=seed)
    prompts = [[3, 4], [5], [6, 7, 8, 9], [3, 4]]
    together = [
        answer.tokens for several in kl.completions(model, None, prompts, **said) for answer in several
    ]
    alone = [kl.completions(model, None, [prompt], **said)[0][0].tokens for prompt in prompts]
    assert together == alone
    assert together[0] == together[3]


def test_one_seed_serves_all_prompts():
    model, prompts = decoder(2), torch.tensor([[3, 4], [5, 6], [3, 4]])
    for copies in (1, 3):
        *_, texts = kl.decode(model, prompts, kl.sample(5, num_sequences=copies), max_new_tokens=6)
        first, _, third = kl.sample(5, num_sequences=copies).results(texts)
        assert [text.tokens for text in first] == [text.tokens for text in third]


def test_several_texts_from_one_prompt_differ_and_the_first_is_the_single_one():
    model, said = decoder(2), dict(do_sample=True, max_new_tokens=8, temperature=3.0, seed=9)
    (several,) = kl.completions(model, None, [[3, 4]], num_return_sequences=5, **said)
    assert len({tuple(answer.tokens) for answer in several}) == 5
    assert several[0].tokens == kl.completions(model, None, [[3, 4]], **said)[0][0].tokens
