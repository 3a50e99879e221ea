"""Numbers worked out by hand in texts that teach attention, with the right values where a text was wrong."""

from __future__ import annotations

import math

import pytest
import torch

import keepleft as kl

WORDS = ("आप", "कैसे", "हैं")


def weights(scores: list[list[float]], mask: kl.Mask, backend: str) -> list[list[float]]:
    """Values are unit vectors and queries are zero, so that what comes out are the weights of just these
    scores.
    """
    n = len(scores)
    blank = torch.zeros(1, 1, n, n, dtype=torch.float64)
    sight = kl.see(mask, kl.Grid(n, n), backend=backend)
    bias = torch.tensor(scores, dtype=torch.float64)[None, None]
    return kl.attend(blank, blank, torch.eye(n, dtype=torch.float64)[None, None], sight, bias=bias)[
        0, 0
    ].tolist()


def softmax(*scores: float) -> list[float]:
    powers = [math.exp(score) for score in scores]
    return [power / sum(powers) for power in powers]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
class TestWorkedNumbers:
    def test_a_ramp_of_scores(self, backend):
        got = weights([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]], kl.causal, backend)
        assert got[0] == pytest.approx([1, 0, 0])
        assert got[1] == pytest.approx([*softmax(0.4, 0.5), 0])
        assert got[1] == pytest.approx(
            [0.475, 0.525, 0], abs=5e-4
        )  # printed elsewhere, rightly, as 0.47 and 0.53
        assert got[2] == pytest.approx(softmax(0.7, 0.8, 0.9))
        assert got[2] == pytest.approx(
            [0.3006, 0.3322, 0.3672], abs=5e-5
        )  # printed elsewhere as 0.25, 0.33, 0.42: wrong

    def test_scores_that_were_weights_already(self, backend):
        got = weights([[0.30, 0.33, 0.37], [0.26, 0.37, 0.37], [0.25, 0.36, 0.39]], kl.causal, backend)
        assert got[0] == pytest.approx([1, 0, 0])
        assert got[1] == pytest.approx(
            [0.4725, 0.5275, 0], abs=5e-5
        )  # printed elsewhere as 0.30, 0.70: wrong
        assert got[2] == pytest.approx(
            [0.3061, 0.3417, 0.3521], abs=5e-5
        )  # printed elsewhere unchanged: wrong
        renormalised = [0.26 / 0.63, 0.37 / 0.63]  # nor is it the other reading of that text
        assert renormalised == pytest.approx([0.4127, 0.5873], abs=5e-5)

    def test_three_hindi_words(self, backend):
        got = weights([[0.8, 0.6, 0.4], [0.3, 0.7, 0.5], [0.2, 0.4, 0.9]], kl.causal, backend)
        assert got[0] == pytest.approx([1, 0, 0])
        assert got[1] == pytest.approx([*softmax(0.3, 0.7), 0])
        assert got[2] == pytest.approx(softmax(0.2, 0.4, 0.9))
        assert all(
            got[i][j] == 0.0 for i in range(3) for j in range(i + 1, 3)
        )  # exactly nothing, not nearly nothing


def test_minus_a_billion_is_not_minus_infinity():
    """A large finite number instead of −∞, as some texts advise, overflows in half precision and loses to a
    large score.
    """
    with pytest.raises(RuntimeError, match="overflow"):
        torch.zeros(1, dtype=torch.float16).masked_fill(torch.tensor([True]), -1e9)
    leaky = torch.tensor([-2e9, 0.0]).masked_fill(torch.tensor([False, True]), -1e9).softmax(-1)
    assert leaky[1] == 1.0  # the forbidden one takes everything
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        blank, bias = torch.zeros(1, 1, 2, 2, dtype=dtype), torch.full((1, 1, 2, 2), -6e4, dtype=dtype)
        out = kl.attend(
            blank, blank, torch.eye(2, dtype=dtype)[None, None], kl.see(kl.causal, kl.Grid(2, 2)), bias=bias
        )
        assert out[0, 0].tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_the_drawn_masks():
    assert kl.draw(kl.causal, 3) == "■ · ·\n■ ■ ·\n■ ■ ■"
    six = kl.mask_table(kl.causal, 6)
    assert torch.equal(six, torch.ones(6, 6, dtype=torch.bool).tril())
    # the same as numbers to add to the scores
    added = torch.where(kl.mask_table(kl.causal, 5), 0.0, float("-inf"))
    assert torch.equal(added, torch.triu(torch.full((5, 5), float("-inf")), 1))
    four = kl.mask_table(kl.causal, 4)
    assert four.sum() == 10  # a sketch of it elsewhere keeps 13: its first two rows see their future


def test_without_a_mask_the_first_word_reads_the_words_after_it():
    scores = [[0.8, 0.6, 0.4], [0.3, 0.7, 0.5], [0.2, 0.4, 0.9]]
    for n in range(2):
        assert all(weight > 0 for weight in weights(scores, kl.full, "sdpa")[n][n + 1 :])
