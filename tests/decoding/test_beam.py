"""A beam of one is greedy; a beam wide enough finds the best of all texts."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import keepleft as kl

V, END, START = 5, 2, 1


def model(seed: int):
    design = kl.presets.small(kl.presets.pegasus).but(vocab=V, dim=16, heads=2, dropout=0.0, initial=kl.Xavier())
    return kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()


@pytest.mark.parametrize("seed", range(12))
@torch.no_grad()
def test_a_beam_of_one_without_normalisation_is_greedy(seed):
    one, source, prompt = model(seed), torch.randint(V, (3, 4)), torch.full((3, 1), START)
    found = kl.beam(one, prompt, 1, limit=6, end=END, penalty=0.0, memory=one.read(source))
    plain = torch.stack(list(kl.greedy(one, prompt, limit=6, end=[END], memory=one.read(source))), 1).tolist()
    for row, tokens in enumerate(plain):
        assert found[row] == (tokens[:tokens.index(END)] if END in tokens else tokens)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_a_wide_beam_finds_the_best_of_all_texts(seed, penalty):
    one, source, limit = model(seed), torch.randint(V, (2, 4)), 4
    found = kl.beam(one, torch.full((2, 1), START), V ** limit, limit=limit, end=END, penalty=penalty, memory=one.read(source))
    texts = [[*text, END] for n in range(limit) for text in product([t for t in range(V) if t != END], repeat=n)]
    for row in range(2):
        best = max(texts, key=lambda text: score(one, source[row:row + 1], text) / len(text) ** penalty)
        assert found[row] == best[:-1]


def score(one, source, text) -> float:
    chances = one(source, torch.tensor([[START, *text[:-1]]]))[0].log_softmax(-1)
    return float(chances.gather(1, torch.tensor(text)[:, None]).sum())


def test_a_beam_of_none_is_refused():
    with pytest.raises(ValueError, match="a beam of 0 over 5 tokens is none"):
        kl.beam(model(0), torch.tensor([[START]]), 0, limit=5, end=END)
