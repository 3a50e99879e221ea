"""What cannot be audited is reported as such and never as clean, and an audit leaves the model as it was."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import keepleft as kl
from keepleft.auditing.isolation import BoundsCheck

IDS = torch.randint(0, 19, (2, 11), generator=torch.Generator().manual_seed(0))


class Honest(nn.Module):
    """A running mean over each position and those before it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(19, 6)
        self.head = nn.Linear(6, 19)

    def hidden(self, tokens):
        x = self.embed(tokens)
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def model(**methods):
    return type("Bad", (Honest,), methods)()


def crashes(self, tokens):
    raise RuntimeError("the tensor is on fire")


def exits(self, tokens):
    raise SystemExit(3)


def sleeps(self, tokens):
    try:
        time.sleep(30)
    except Exception:
        time.sleep(30)


def broken(self, tokens):
    return Honest.forward(self, tokens) * float("nan")


def partly_broken(self, tokens):
    out = Honest.forward(self, tokens)
    return torch.cat([out[:, :1], out[:, 1:] * float("nan")], 1)


def pooled(self, tokens):
    return self.head(self.hidden(tokens).mean(1))


def changes_input(self, tokens):
    out = Honest.forward(self, tokens)
    tokens.fill_(1)
    return out


def remembers(self, tokens):
    self.times = getattr(self, "times", 0) + 1
    return Honest.forward(self, tokens) + self.times


def remembers_elsewhere(self, tokens, seen=[]):  # noqa: B006
    seen.append(1)
    return Honest.forward(self, tokens) + len(seen)


def rolls_dice(self, tokens):
    return Honest.forward(self, tokens) + torch.rand(())


def needs_a_gpu(self, tokens):
    return Honest.forward(self, tokens.to("cuda:7"))


def says_nothing(self, tokens):
    return None


def constant(self, tokens):
    return torch.ones(*tokens.shape, 3)


def changes_weights(self, tokens):
    with torch.no_grad():
        self.head.weight.mul_(0.9)
    return Honest.forward(self, tokens)


BAD = {
    crashes: "on fire",
    exits: "SystemExit",
    sleeps: "longer than",
    broken: "nothing but NaN",
    partly_broken: "NaN",
    pooled: "one vector for each text",
    changes_input: "in place",
    remembers_elsewhere: "keeps state",
    rolls_dice: "random numbers",
    needs_a_gpu: "CUDA",
    says_nothing: "for each position",
    constant: "whatever it is given",
    changes_weights: "own weights",
}


@pytest.mark.parametrize("forward", BAD, ids=lambda forward: forward.__name__)
def test_what_cannot_be_audited_is_never_clean(forward):
    if forward is needs_a_gpu and torch.cuda.device_count() > 7:
        pytest.skip("there are eight GPUs here")
    report = kl.audit(model(forward=forward), IDS, budget="quick", limit=1.0, checks=["future", "batch"])
    assert report.verdict == "unchecked", report.text()
    assert not report.ok
    assert BAD[forward] in " ".join(report.blocked), report.text()
    with pytest.raises(kl.UncheckedError):
        report.raise_for_leaks()


def test_state_in_an_attribute_does_not_pass_for_clean_either():
    report = kl.audit(model(forward=remembers), IDS, budget="quick")
    assert not report.ok, report.text()


def test_a_check_that_was_asked_for_and_could_not_be_made_leaves_no_verdict():
    def prefill(tokens):
        raise ValueError("no")

    report = kl.audit(Honest(), IDS, budget="quick", checks=["cache"], prefill=prefill, step=prefill)
    assert report.verdict == "unchecked", report.text()


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ([1, 2], "list"),
        (np.zeros((2, 3)), "ndarray"),
        ("text", "str"),
        ({}, "dict"),
        (torch.zeros(5), "shape"),
        (torch.zeros(0, 5, dtype=torch.long), "shape"),
        (torch.zeros(2, 3, dtype=torch.complex64), "complex64"),
    ],
)
def test_a_wrong_example_is_named(example, said):
    with pytest.raises((TypeError, ValueError), match=said):
        kl.audit(Honest(), example)


@pytest.mark.parametrize(
    "options",
    [
        {"checks": ["futur"]},
        {"budget": "small"},
        {"probes": ["x"]},
        {"vocab": -1},
        {"time": 2},
        {"limit": -1},
        {"layers": 0},
        {"prefill": lambda tokens: tokens},
    ],
)
def test_a_wrong_option_is_named(options):
    ((name, _),) = options.items()
    with pytest.raises(ValueError, match=name.rstrip("s")):
        kl.audit(Honest(), IDS, **options)


def test_a_claim_that_is_no_mask_is_named():
    with pytest.raises(TypeError, match="claim"):
        kl.audit(Honest(), IDS, claim="causal")


def test_what_is_no_model_is_named():
    with pytest.raises(TypeError, match="int cannot be audited"):
        kl.audit(3)


def test_an_unknown_input_asks_for_an_example():
    with pytest.raises(ValueError, match="give an example"):
        kl.audit(nn.Linear(3, 3))


class Lazy(Honest):
    """Registers a table on its first call, and keeps a running mean in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.longest = 0

    def forward(self, tokens):
        x = self.hidden(tokens)
        if tokens.shape[1] > self.longest:
            self.longest = tokens.shape[1]
            self.register_buffer("table", torch.arange(self.longest, dtype=x.dtype), persistent=False)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.head(x + self.table[: tokens.shape[1], None] * 0.01)


def test_afterwards_everything_is_as_it_was():
    lazy = Lazy().train()
    lazy.head.eval()
    lazy(IDS)
    lazy.embed.weight.grad = torch.ones_like(lazy.embed.weight)
    state = {name: value.clone() for name, value in lazy.state_dict().items()}
    table = lazy.table
    keys = set(vars(lazy))
    modes = [part.training for part in lazy.modules()]
    chance = (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate())
    report = kl.audit(lazy, budget="quick")
    assert report.ok, report.text()
    assert all(torch.equal(value, state[name]) for name, value in lazy.state_dict().items())
    assert lazy.table is table
    assert set(vars(lazy)) == keys
    assert lazy.longest == 11
    assert [part.training for part in lazy.modules()] == modes
    assert torch.equal(lazy.embed.weight.grad, torch.ones_like(lazy.embed.weight))
    assert lazy.head.weight.grad is None
    assert torch.equal(torch.get_rng_state(), chance[0])
    assert np.array_equal(np.random.get_state()[1], chance[1])
    assert random.getstate() == chance[2]
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in lazy.modules())
    lazy(torch.randint(0, 19, (2, 30)))


def test_two_audits_say_the_same():
    one, other = (kl.audit(Honest(), IDS, budget="quick") for _ in range(2))
    assert (one.findings, one.skipped, one.paths, one.measured) == (
        other.findings,
        other.skipped,
        other.paths,
        other.measured,
    )


def test_it_works_where_gradients_are_off():
    honest = Honest()
    with torch.inference_mode():
        report = kl.audit(honest, IDS, budget="quick")
    assert report.ok
    assert not any("gradient" in line for line in report.skipped)


def test_a_millionth_is_found_in_float32():
    class Tiny(Honest):
        def forward(self, tokens):
            out = super().forward(tokens)
            return out + 1e-6 * out.abs().max() * torch.tanh(
                self.hidden(tokens).roll(-1, 1).sum(-1, keepdim=True)
            )

    report = kl.audit(Tiny(), IDS, budget="quick", checks=["future"])
    assert {finding.kind for finding in report.findings} == {"future"}
    assert report.findings[0].size < 1e-5


def test_a_leak_under_compile_and_on_another_thread_is_found():
    import threading

    compiled = torch.compile(
        model(forward=lambda self, tokens: self.head(self.hidden(tokens).flip(1))), backend="eager"
    )
    found = []
    worker = threading.Thread(
        target=lambda: found.append(kl.audit(compiled, IDS, budget="quick", checks=["future"]))
    )
    worker.start()
    worker.join(60)
    assert found
    assert not found[0].ok


def test_what_a_gpu_would_stumble_over_is_refused_before():
    scores, inside = torch.zeros(3, 5), torch.tensor([0, 4, -100])
    with BoundsCheck():
        torch.nn.functional.cross_entropy(scores, inside)
        torch.nn.functional.cross_entropy(scores, inside.clamp(min=-1), ignore_index=-1)
        torch.nn.functional.nll_loss(scores, inside)
        torch.nn.functional.cross_entropy(scores, torch.zeros(3, 5))  # probabilities, not labels
        torch.nn.CrossEntropyLoss()(scores.T[None], torch.tensor([[0, 4, 2]]))
        for labels, options in ((inside, {"ignore_index": -1}), (inside.clamp(min=-1), {}), (inside + 1, {})):
            with pytest.raises(IndexError, match="is out of bounds: there are 5 classes"):
                torch.nn.functional.cross_entropy(scores, labels, **options)
        with pytest.raises(IndexError, match="5 is beyond the end of a table of 5"):
            torch.nn.functional.embedding(torch.tensor([5]), scores.T)
