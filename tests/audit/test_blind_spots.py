"""No probe is redundant: for each there is a leak that it finds and no other does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing.session import PROBES

VOCAB, WIDTH = 23, 14


class Causal(nn.Module):
    """An honest model with a place for one leak."""

    class Leak(nn.Module):
        def forward(self, x, tokens):
            return x

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.leak = self.Leak()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.head(self.leak(x + past, tokens))


class HardChoice(Causal):
    """The second position depends on the id of the third: without a gradient, and whatever the magnitude or
    the length.
    """

    class Leak(nn.Module):
        def forward(self, x, tokens):
            kind = (tokens[:, 2:3] % 3).to(x.dtype)[..., None]
            return torch.cat([x[:, :1], x[:, 1:2] + kind, x[:, 2:]], 1) if x.shape[1] > 2 else x


class BelowRounding(Causal):
    """The mean of all positions, scaled so small that no bit of a float32 changes."""

    class Leak(nn.Module):
        def forward(self, x, tokens):
            return x + 1e-13 * x.mean(1, keepdim=True)


class ByLength(Causal):
    """Depends on the length of the sequence and nothing else."""

    class Leak(nn.Module):
        def forward(self, x, tokens):
            return x * (1 + 1 / x.shape[1])


class FiniteMask(Causal):
    """Scores of hidden keys become 10,000 less: nothing of them is left, until a score is larger than
    that.
    """

    class Leak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(WIDTH, WIDTH)
            self.k = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, tokens):
            hidden = torch.ones(x.shape[1], x.shape[1]).triu(1)
            scores = self.q(x) @ self.k(x).transpose(1, 2) - 1e4 * hidden
            return x + scores.softmax(-1) @ x


class Alarm(Causal):
    """Replaces everything as soon as anything is NaN, anywhere in the sequence."""

    class Leak(nn.Module):
        def forward(self, x, tokens):
            sound = torch.isfinite(x).flatten(1).all(1)[:, None, None]
            return torch.where(sound, x, torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) * 0.5)


ONLY = {
    "substitution": HardChoice,
    "gradient": BelowRounding,
    "length": ByLength,
    "magnitude": FiniteMask,
    "poison": Alarm,
}


def test_the_table_is_whole():
    assert set(ONLY) == set(PROBES)


def test_the_model_without_a_leak_is_clean():
    assert kl.audit(Causal(), budget="quick").ok


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("leak", ONLY)
def test_only_its_own_probe_finds_it(leak, probe):
    report = kl.audit(ONLY[leak](), budget="quick", checks=["future"], probes=[probe])
    # a choice among all positions is another one in a shorter sequence
    is_found = leak == probe or (leak, probe) == ("substitution", "length")
    assert bool(report.findings) == is_found, report.text()
    if leak == probe:
        assert report.findings[0].module == "leak"
        assert report.findings[0].probe == probe


@pytest.mark.parametrize("leak", ONLY)
def test_all_probes_together_find_each(leak):
    report = kl.audit(ONLY[leak](), budget="quick")
    assert {finding.kind for finding in report.findings} == {"future"}, report.text()
