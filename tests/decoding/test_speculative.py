"""Guessing ahead never changes the text, and saves passes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

import keepleft as kl
from decoding.models import END, decoder, pair
from keepleft.decoding.sampling import SamplingStrategy
from keepleft.decoding.speculative import DraftModel, prompt_lookup, speculative_decode

SAID = st.fixed_dictionaries(
    {
        "do_sample": st.booleans(),
        "temperature": st.sampled_from([0.5, 1.0, 2.0]),
        "repetition_penalty": st.sampled_from([None, 1.3]),
        "no_repeat_ngram_size": st.sampled_from([None, 3]),
        "eos_token_id": st.sampled_from([None, END]),
        "seed": st.integers(0, 1000),
    }
)


@settings(max_examples=25, deadline=None)
@given(
    said=SAID,
    prompt=st.lists(st.integers(3, 10), min_size=1, max_size=8),
    both=st.booleans(),
    seed=st.integers(0, 3),
    kind=st.sampled_from(["lookup", "draft", "itself"]),
)
@pytest.mark.filterwarnings("ignore:do_sample is not set")
def test_the_text_is_the_one_written_alone(said, prompt, kind, both, seed):
    make = pair if both else decoder
    model = make(seed)
    plain = kl.completions(model, None, [prompt], max_new_tokens=14, **said)
    ahead = (
        {"prompt_lookup_num_tokens": 4}
        if kind == "lookup"
        else {"draft_model": model if kind == "itself" else make(seed + 9)}
    )
    assert (
        kl.completions(model, None, [prompt], max_new_tokens=14, **ahead, **said)[0][0].tokens
        == plain[0][0].tokens
    )


def test_the_distribution_is_the_models_own():
    """The same by counting: what is drawn with guesses, against what is drawn without, from other seeds."""
    model, draft = decoder(1), decoder(5)
    count = lambda seeds, **ahead: torch.bincount(
        torch.tensor(
            [
                kl.completions(model, None, [[3, 4]], do_sample=True, max_new_tokens=3, seed=seed, **ahead)[
                    0
                ][0].tokens[-1]
                for seed in seeds
            ]
        ),
        minlength=11,
    )
    table = torch.stack([count(range(200), draft_model=draft), count(range(1000, 1200))])
    assert chi2_contingency(table[:, table.sum(0) > 0].numpy()).pvalue > 1e-3


def test_good_guesses_save_passes():
    model = decoder(0)
    passes = 0
    extend = model.extend

    def counted(*given, **named):
        nonlocal passes
        passes += 1
        return extend(*given, **named)

    model.extend = counted
    list(kl.decode(model, torch.tensor([[3, 4]]), kl.greedy(), max_new_tokens=20))
    alone, passes = passes, 0
    strategy = SamplingStrategy()
    *_, plain = kl.decode(decoder(0), torch.tensor([[3, 4]]), kl.greedy(), max_new_tokens=20)
    known = plain.tokens[0, 2:].tolist()
    guess = lambda texts, most: known[texts.new_width : texts.new_width + min(4, most)]
    texts = list(speculative_decode(model, torch.tensor([[3, 4]]), strategy, guess, max_new_tokens=20))
    assert texts[-1].tokens[0, 2:].tolist() == known
    assert passes <= alone / 4


@pytest.mark.parametrize("kind", ["decoder", "pair"])
def test_a_draft_guesses_as_if_it_read_each_text_anew(kind):
    """What it holds of guesses that were refused is dropped, to the token."""
    model = decoder(4) if kind == "decoder" else pair(4)
    given_ = {} if kind == "decoder" else {"memory": model.encode_memory(torch.tensor([[3, 4, 5]]))}
    strategy = SamplingStrategy()
    texts = lambda tokens: strategy.begin(torch.tensor([tokens]), None, torch.tensor([40]))[0]
    draft, text = DraftModel(model, strategy, 5, given_), [3, 4]
    for agreed in (0, 2, 5, 4, 1, 0, 3):
        guesses = draft(texts(text), 9)
        assert guesses == DraftModel(model, strategy, 5, given_)(texts(text), 9)
        text += [*guesses[:agreed], 3 + (guesses[min(agreed, 4)] - 2) % 8]  # another token where they part


def test_a_look_up_finds_what_followed_the_last_time():
    class Texts:
        tokens = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])

    assert prompt_lookup(3, 2)(Texts, 9) == [7, 8, 9]
    assert prompt_lookup(3, 2)(Texts, 2) == [7, 8]
    Texts.tokens = torch.tensor([[5, 6, 7]])
    assert prompt_lookup(3, 2)(Texts, 9) == []
    assert prompt_lookup(2, 2, torch.tensor([[6, 7, 1, 2]]))(Texts, 9) == [1, 2]


def test_guessing_with_beams_is_refused():
    with pytest.raises(ValueError, match="speculative decoding is for greedy and sampled texts"):
        kl.completions(decoder(), None, [[3]], num_beams=2, prompt_lookup_num_tokens=3, max_new_tokens=4)
