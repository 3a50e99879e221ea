"""Ensembles: one model is itself, twins are one, and a score is the log of the averaged distribution."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from decoding.models import END, V, decoder, pair
from keepleft.evaluation.perplexity import token_nll

STRATEGIES = st.sampled_from(
    [
        {},
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.7},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"do_sample": True, "seed": 3},
        {"do_sample": True, "seed": 4, "temperature": 0.7, "top_p": 0.8, "num_return_sequences": 2},
        {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
        {"penalty_alpha": 0.6, "top_k": 3},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 2},
        {"cache_implementation": "static"},
        {"cache_implementation": "offloaded", "num_beams": 2},
    ]
)
PROMPTS = st.lists(st.lists(st.integers(3, V - 1), min_size=1, max_size=6), min_size=1, max_size=3)
MODELS = {kind: [make(seed) for seed in range(3)] for kind, make in (("decoder", decoder), ("pair", pair))}
DOUBLES = {
    kind: [make(seed).double() for seed in range(3)] for kind, make in (("decoder", decoder), ("pair", pair))
}


def completions(model, prompts, **options):
    return kl.completions(model, None, prompts, max_new_tokens=7, eos_token_id=END, **options)


@settings(max_examples=40)
@given(kind=st.sampled_from(["decoder", "pair"]), prompts=PROMPTS, options=STRATEGIES)
def test_an_ensemble_of_one_is_the_model_bit_for_bit(kind, prompts, options):
    model = MODELS[kind][0]
    for average in ("probabilities", "logprobs"):
        alone = kl.ensemble([model], average=average)
        assert completions(alone, prompts, **options) == completions(model, prompts, **options)


@settings(max_examples=40)
@given(
    kind=st.sampled_from(["decoder", "pair"]),
    prompts=PROMPTS,
    options=STRATEGIES,
    count=st.integers(2, 3),
    average=st.sampled_from(["probabilities", "logprobs"]),
)
def test_an_ensemble_of_a_model_with_itself_gives_its_tokens(kind, prompts, options, count, average):
    model = DOUBLES[kind][0]
    twins = kl.ensemble([model] * count, average=average)
    found, expected = completions(twins, prompts, **options), completions(model, prompts, **options)
    assert [[text.tokens for text in texts] for texts in found] == [
        [text.tokens for text in texts] for texts in expected
    ]
    for texts, other_texts in zip(found, expected, strict=True):
        for text, other in zip(texts, other_texts, strict=True):
            assert text.score == pytest.approx(other.score, abs=1e-4)


def averaged_logprob(models, average, prompt, tokens, kind) -> float:
    """The log-probability of tokens under the averaged distribution, token by token, from whole passes."""
    total = 0.0
    context = [1] if kind == "pair" else list(prompt)
    for token in tokens:
        rows = torch.tensor([context])
        logits = [model(torch.tensor([prompt]), rows) if kind == "pair" else model(rows) for model in models]
        probabilities = torch.stack([part[0, -1].softmax(-1) for part in logits])
        if average == "probabilities":
            distribution = probabilities.mean(0)
        else:
            distribution = probabilities.log().mean(0).softmax(-1)
        total += math.log(float(distribution[token]))
        context.append(token)
    return total


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["decoder", "pair"]),
    prompt=st.lists(st.integers(3, V - 1), min_size=1, max_size=5),
    average=st.sampled_from(["probabilities", "logprobs"]),
    options=st.sampled_from(
        [{}, {"num_beams": 3, "num_return_sequences": 3}, {"do_sample": True, "seed": 1}]
    ),
)
@torch.no_grad()
def test_a_score_is_the_log_of_the_averaged_distribution(kind, prompt, average, options):
    models = DOUBLES[kind]
    together = kl.ensemble(models, average=average)
    for text in completions(together, [prompt], **options)[0]:
        expected = averaged_logprob(models, average, prompt, text.tokens, kind)
        length = len(text.tokens) if "num_beams" in options else 1  # beams are ranked by the score per token
        assert text.score * length == pytest.approx(expected, abs=1e-5)
        scored = kl.score_tokens(
            together,
            [1] if kind == "pair" else prompt,
            text.tokens,
            source=prompt if kind == "pair" else None,
        )
        assert sum(entry.logprob for entry in scored) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=20)
@given(kind=st.sampled_from(["decoder", "pair"]), prompts=PROMPTS, beams=st.integers(1, 3))
def test_a_batch_gives_what_each_prompt_gives_alone(kind, prompts, beams):
    together = kl.ensemble(DOUBLES[kind])
    batch = completions(together, prompts, num_beams=beams)
    for prompt, texts in zip(prompts, batch, strict=True):
        assert texts[0].tokens == completions(together, [prompt], num_beams=beams)[0][0].tokens


def test_an_ensemble_goes_into_decode_and_stream():
    models = MODELS["decoder"]
    together = kl.ensemble(models)
    beam = kl.beam(3, eos_ids=[END])
    *_, last = kl.decode(together, torch.tensor([[3, 4, 5]]), beam, max_new_tokens=7)
    best = completions(together, [[3, 4, 5]], num_beams=3)[0][0]
    assert beam.results(last)[0][0].tokens == best.tokens
    translating = kl.ensemble(MODELS["pair"])
    memory = translating.encode_memory(torch.tensor([[3, 4, 5]]))
    *_, last = kl.decode(
        translating, torch.tensor([[1]]), kl.greedy(eos_ids=[END]), max_new_tokens=7, memory=memory
    )
    assert last.tokens[0, 1:].tolist() == completions(translating, [[3, 4, 5]])[0][0].tokens


def test_each_member_has_a_kv_cache_and_reads_a_token_once():
    models = [decoder(seed) for seed in range(2)]
    widths: list[list[int]] = [[], []]
    for model, seen in zip(models, widths, strict=True):
        extend = model.extend
        model.extend = lambda tokens, *args, extend=extend, seen=seen, **kwargs: (
            seen.append(tokens.shape[1]) or extend(tokens, *args, **kwargs)
        )
    list(kl.decode(kl.ensemble(models), torch.tensor([[3, 4, 5]]), kl.greedy(), max_new_tokens=5))
    assert widths == [[3, 1, 1, 1, 1]] * 2


def test_the_likelihood_of_a_text_is_averaged_too():
    models = DOUBLES["decoder"]
    tokens = [3, 4, 5, 6, 7, 3]
    found = token_nll(kl.ensemble(models), tokens)
    probabilities = torch.stack([(-token_nll(model, tokens)).exp() for model in models])
    torch.testing.assert_close(found, -probabilities.mean(0).log())


def test_members_may_have_other_sizes():
    small = decoder(0)
    design = kl.presets.small(kl.presets.gpt2).but(vocab=V, dim=24, heads=2, position=kl.LearnedPositions(9))
    other = kl.build(design, generator=torch.Generator().manual_seed(1)).eval()
    together = kl.ensemble([small, other])
    assert together.design.max_positions == 9
    texts = kl.completions(together, None, [[3, 4, 5]], max_new_tokens=50)[0]
    assert len(texts[0].tokens) == 6  # as far as the shorter one reads


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (list, "at least one model"),
        (
            lambda: [decoder(0), decoder(0, vocab=13)],
            "model 1 and model 0 differ: the vocabulary is 13 and 11",
        ),
        (lambda: [pair(0), decoder(0)], "the kind is decoder and encoder-decoder"),
        (lambda: [pair(0), pair(0, source_vocab=13)], "the vocabulary of the source is 13 and None"),
        (lambda: [kl.build(kl.presets.small(kl.presets.bert))], "model 0 is an encoder"),
    ],
)
def test_models_that_do_not_fit_are_refused(models, message):
    with pytest.raises(ValueError, match=message):
        kl.ensemble(models())
    with pytest.raises(ValueError, match="average is 'median': it must be probabilities or logprobs"):
        kl.ensemble([decoder(0)], average="median")
    with pytest.raises(ValueError, match="these models have no source"):
        kl.ensemble([decoder(0)]).encode_memory(torch.tensor([[3]]))


def test_an_ensemble_among_the_models_counts_as_its_members():
    models = MODELS["decoder"]
    assert kl.ensemble([kl.ensemble(models[:2]), models[2]]).models == models
