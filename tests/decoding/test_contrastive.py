"""Contrastive search is its definition, however it is batched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import keepleft as kl
from decoding.models import END, START, decoder, pair


def by_hand(model, prompt: list[int], alpha: float, k: int, limit: int, source=None) -> list[int]:
    """The definition: every candidate is read in a full pass of its own."""
    text = list(prompt)
    given = {} if source is None else {"memory": model.encode_memory(source)}
    hidden = lambda tokens: model.decoder_hidden_states(torch.tensor([tokens]), **given)[0]
    for _ in range(limit):
        chances = model.head(hidden(text)[-1], model.token).softmax(-1)
        values = {}
        for token in chances.topk(k).indices.tolist():
            states = F.normalize(hidden([*text, token]), dim=-1)
            values[token] = (1 - alpha) * float(chances[token]) - alpha * float(
                (states[:-1] @ states[-1]).max()
            )
        text.append(max(values, key=lambda token: values[token]))
        if text[-1] == END:
            break
    return text[len(prompt) :]


@pytest.mark.parametrize("seed", [1, 3, 6])
@pytest.mark.parametrize(("alpha", "k"), [(0.6, 4), (0.2, 2), (1.0, 5)])
@torch.no_grad()
def test_contrastive_search_of_prompts_of_unequal_length_is_its_definition(alpha, k, seed):
    model, prompts = decoder(seed), [[3, 4, 5], [6], [7, 8, 9, 10]]
    found = kl.completions(
        model, None, prompts, penalty_alpha=alpha, top_k=k, max_new_tokens=7, eos_token_id=END
    )
    assert [several[0].tokens for several in found] == [
        by_hand(model, prompt, alpha, k, 7) for prompt in prompts
    ]


@torch.no_grad()
def test_contrastive_search_after_a_source():
    model, source = pair(1), [[3, 4, 5, 6]]
    found = kl.completions(
        model, None, source, penalty_alpha=0.5, top_k=3, max_new_tokens=6, eos_token_id=END
    )
    assert found[0][0].tokens == by_hand(model, [START], 0.5, 3, 6, torch.tensor(source))


def test_without_a_penalty_it_is_greedy():
    model, prompts = decoder(2), [[3, 4, 5], [6]]
    tokens = lambda **said: [
        several[0].tokens for several in kl.completions(model, None, prompts, max_new_tokens=6, **said)
    ]
    assert tokens(penalty_alpha=1e-9, top_k=4) == tokens()


def test_what_is_banned_is_not_chosen_for_being_unlike():
    for seed in range(6):
        found = kl.completions(
            decoder(seed),
            None,
            [[9, 10]],
            penalty_alpha=0.6,
            top_k=4,
            max_new_tokens=6,
            suppress_tokens=list(range(9)),
        )
        assert set(found[0][0].tokens) <= {9, 10}
