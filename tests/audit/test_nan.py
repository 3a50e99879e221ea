"""NaN in one row, in a long sequence, in half precision under a mask; it is never reported as another kind of
leak.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepleft as kl

VOCAB, WIDTH = 37, 12


class Decoder(nn.Module):
    """A running mean, with a submodule that may give NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def part(self, x, mask):
        return x

    def forward(self, input_ids, attention_mask=None):
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x = self.embed(input_ids) * mask[..., None].to(self.embed.weight)
        past = x.cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None].to(x)
        return self.head(self.part(x + past, mask))


class OneRow(Decoder):
    """The standard deviation over rows, NaN where there is only one."""

    def part(self, x, mask):
        return x + 0 * x[:, :1].std(0, keepdim=True)


class Decayed(Decoder):
    """A scan by division: the decay over a long sequence underflows to zero."""

    def part(self, x, mask):
        decay = 0.5 ** torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return (x / decay).cumsum(1) * decay


class DecayedStep(Decoder):
    """The same, step by step."""

    def part(self, x, mask):
        out, state = [], torch.zeros_like(x[:, 0])
        for now in x.unbind(1):
            state = state * 0.5 + now
            out.append(state)
        return torch.stack(out, 1)


class HalfMask(Decoder):
    """The bias that hides padding overflows float16, and zero times infinity is NaN."""

    def part(self, x, mask):
        return x + 0 * ((1 - mask)[..., None] * 1e5).to(x.dtype)


class HalfRange(Decoder):
    """Overflows float16 with or without a mask: it does not claim to support that precision."""

    def part(self, x, mask):
        return x + 0 * torch.full_like(x, 300.0).pow(2)


class PadsBreak(Decoder):
    """Divides by zero where the sequence is padded."""

    def part(self, x, mask):
        return x + 0 / mask.to(x.dtype).min(1, keepdim=True).values[..., None]


class PadsRight(Decoder):
    """Hides padding correctly; every output stays finite."""

    def part(self, x, mask):
        return x * mask[..., None].to(x)


def some():
    return torch.randint(1, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (Decoder, False),
        (OneRow, True),
        (Decayed, True),
        (DecayedStep, False),
        (HalfMask, True),
        (HalfRange, False),
        (PadsBreak, True),
        (PadsRight, False),
    ],
)
def test_nan_is_found_where_it_is_the_models_doing(model, found) -> None:
    report = kl.audit(model(), some(), checks=["nan", "padding", "batch"], budget="quick")
    assert {finding.kind for finding in report.findings} == ({"nan"} if found else set()), report.text()
    assert found or report.ok


@pytest.mark.parametrize(("model", "check"), [(OneRow, "batch"), (PadsBreak, "padding")])
def test_nan_is_no_leak_of_another_kind(model, check) -> None:
    report = kl.audit(model(), some(), checks=[check], budget="quick")
    assert not report.findings
    assert any(line.startswith(f"{check} where outputs are NaN") for line in report.skipped)
