"""Whatever a model takes and returns: a leak behind each interface is found, and its twin is clean."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import keepleft as kl

VOCAB, WIDTH = 50, 16
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


class Base(nn.Module):
    """A convolution that looks back, or to both sides."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.padding = (1, 1) if peeks else (2, 0)

    def mix(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x.transpose(1, 2), self.padding)).transpose(1, 2)

    def logits(self, tokens: Tensor, side: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) if side is None else self.embed(tokens) + side
        return self.head(self.mix(x))


def next_token_loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options)


class RowsAndPositions(Base):
    def forward(self, tokens):
        return self.logits(tokens).flatten(0, 1)


class PositionsAndRows(Base):
    def forward(self, tokens):
        return self.logits(tokens).transpose(0, 1).reshape(-1, VOCAB)


class TimeFirst(Base):
    def forward(self, tokens):
        return self.logits(tokens).transpose(0, 1)


class ChannelsBeforeTime(Base):
    def forward(self, tokens):
        return self.logits(tokens).transpose(1, 2)


class Distribution(Base):
    def forward(self, tokens):
        return torch.distributions.Categorical(logits=self.logits(tokens))


class Mixture(Base):
    def forward(self, tokens):
        means, scales, weights = self.logits(tokens)[..., :12].chunk(3, -1)
        return torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=weights),
            torch.distributions.Normal(means, F.softplus(scales) + 0.1),
        )


class Attributes(Base):
    def forward(self, tokens):
        return SimpleNamespace(values=SimpleNamespace(main=self.logits(tokens)))


class DictBatch(Base):
    def forward(self, batch):
        return {"out": {"scores": self.logits(batch["tokens"])}}


@dataclass
class Batch:
    tokens: Tensor
    weights: Tensor


class DataclassBatch(Base):
    def forward(self, batch):
        return self.logits(batch.tokens, batch.weights[..., None])


class Codebooks(Base):
    def forward(self, codes):
        x = self.mix(sum(self.embed(codes[..., k]) for k in range(codes.shape[2])))
        return torch.stack([self.head(x), self.head(-x)], 2)


class TrainingStep(Base):
    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.logits(x).flatten(0, 1), y.flatten(), ignore_index=-100)


class LossAlone(Base):
    def forward(self, tokens, labels):
        return next_token_loss(self.logits(tokens), labels)


class LossByHand(Base):
    def forward(self, tokens, labels):
        logprobs = self.logits(tokens)[:, :-1].log_softmax(-1)
        judged = labels[:, 1:] != -100
        found = logprobs.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return -(found * judged).sum() / judged.sum().clamp(min=1)


class LossOfSums(Base):
    """No loss function of PyTorch takes part: the losses of single labels are audited."""

    def forward(self, tokens, labels):
        odds = self.logits(tokens)[:, :-1].exp()
        chances = odds / odds.sum(-1, keepdim=True)
        judged = labels[:, 1:] != -100
        found = chances.gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
        return -(found.log() * judged).sum() / judged.sum().clamp(min=1)


class ChunkedLoss(Base):
    def forward(self, tokens, labels):
        logits, goals = self.logits(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        parts = zip(logits.split(5), goals.split(5), strict=True)
        total = sum(F.cross_entropy(scores, goal, reduction="sum") for scores, goal in parts)
        return total / (goals != -100).sum().clamp(min=1)


class LabelsFeedDecoder(nn.Module):
    """An encoder-decoder that makes the decoder's input of its labels."""

    def __init__(self, peeks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.peeks = peeks

    def forward(self, input_ids, labels):
        shifted = labels if self.peeks else F.pad(labels[:, :-1], (1, 0))
        hidden = self.rnn(self.target(shifted.clamp(min=0)))[0] + self.source(input_ids).mean(1, True)
        logits = self.head(hidden)
        return {"loss": F.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


class Actions(Base):
    """What stands beside a token is read one step early."""

    def __init__(self, peeks: bool) -> None:
        super().__init__(False)
        self.action = nn.Embedding(5, WIDTH)
        self.early = peeks

    def forward(self, tokens, actions):
        side = self.action(actions)
        return self.logits(tokens, torch.roll(side, -1, 1) if self.early else side)


class CountsPositions(Base):
    """Takes the position of each token, which must be given."""

    def forward(self, tokens, input_pos):
        return self.logits(tokens, torch.sin(input_pos.float())[None, :, None])


LABELLED = {"tokens": TOKENS, "labels": TOKENS}
CASES = {
    RowsAndPositions: TOKENS,
    PositionsAndRows: TOKENS,
    TimeFirst: TOKENS,
    ChannelsBeforeTime: TOKENS,
    Distribution: TOKENS,
    Mixture: TOKENS,
    Attributes: TOKENS,
    DictBatch: {"tokens": TOKENS},
    DataclassBatch: Batch(TOKENS, torch.rand(TOKENS.shape)),
    Codebooks: torch.stack([TOKENS, TOKENS.flip(1)], 2),
    TrainingStep: (TOKENS[:, :-1], TOKENS[:, 1:]),
    LossAlone: LABELLED,
    LossByHand: LABELLED,
    LossOfSums: LABELLED,
    ChunkedLoss: LABELLED,
    LabelsFeedDecoder: {"input_ids": TOKENS, "labels": TOKENS},
    Actions: {"tokens": TOKENS, "actions": TOKENS % 5},
    CountsPositions: TOKENS,
}


@pytest.mark.parametrize("peeks", [True, False])
@pytest.mark.parametrize("model", CASES)
def test_a_leak_is_found_behind_each_interface_and_its_twin_is_clean(model, peeks):
    report = kl.audit(model(peeks), CASES[model], vocab=VOCAB, budget="quick")
    assert report.verdict == ("leak" if peeks else "clean"), report.text()
    if peeks:
        # of a loss that is taken apart label by label, position t has the scores of t - 1
        kinds = {"labels"} if model is LossOfSums else {"future"}
        assert {finding.kind for finding in report.findings} == kinds, report.text()


def test_a_batch_may_be_an_argument_by_name_too():
    assert kl.audit(DictBatch(True), {"batch": {"tokens": TOKENS}}, vocab=VOCAB, budget="quick").findings
    assert kl.audit(DictBatch(True), ({"tokens": TOKENS},), vocab=VOCAB, budget="quick").findings


class Listed(Base):
    """Takes lists, and gives a list of what stands at each position."""

    def play(self, games):
        return list(self.logits(torch.tensor(games)).unbind(1))


@pytest.mark.parametrize("peeks", [True, False])
def test_an_adapter_says_how_any_other_model_is_called(peeks):
    adapter = kl.AuditAdapter(
        call=lambda model, tokens: model.play(tokens.tolist()), read=lambda scores: torch.stack(scores, 1)
    )
    report = kl.audit(Listed(peeks), vocab=VOCAB, adapter=adapter, budget="quick")
    assert report.verdict == ("leak" if peeks else "clean"), report.text()


# one vector for each text -------------------------------------------------------------------------


class Pooled(Base):
    """The mean over real tokens, or over all."""

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens)
        if attention_mask is None or self.padding == (1, 1):
            return x.mean(1)
        weights = attention_mask[..., None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1)


def test_a_pooled_output_is_held_to_padding():
    leaking = kl.audit(Pooled(True), TOKENS, claim=kl.full, vocab=VOCAB, budget="quick")
    assert {finding.kind for finding in leaking.findings} == {"padding"}
    honest = kl.audit(Pooled(False), TOKENS, claim=kl.full, vocab=VOCAB, budget="quick")
    assert honest.ok, honest.text()
    assert "padding" in honest.checked


def test_a_pooled_output_is_never_called_causal():
    report = kl.audit(Pooled(False), TOKENS, vocab=VOCAB, budget="quick")
    assert report.verdict == "unchecked"
    assert "claim=kl.full" in " ".join(report.blocked)


# paths --------------------------------------------------------------------------------------------


class UnderDropout(Base):
    """Looks to both sides while dropout is on."""

    def __init__(self) -> None:
        super().__init__(False)
        self.dropout = 0.1

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.training and self.dropout > 0:
            x = F.dropout(x, self.dropout, self.training)
            x = x + x.roll(-1, 1)
        return self.head(self.mix(x))


class WithLabels(Base):
    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        logits = self.head(self.mix(x if labels is None else x + x.mean(1, True)))
        return (logits,) if labels is None else (next_token_loss(logits, labels), logits)


class WithEmbeddings(Base):
    def forward(self, input_ids=None, inputs_embeds=None):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds + inputs_embeds.mean(1, True)
        return self.head(self.mix(x))


class WithoutBias(Base):
    """Looks to both sides where an option of the example is left out."""

    def forward(self, tokens, bias=None):
        x = self.embed(tokens)
        return self.head(self.mix(x + x.mean(1, True) if bias is None else x + bias))


class UnderCompile(Base):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.mix(x + x.mean(1, True) if torch.compiler.is_compiling() else x))


class UnderAutocast(Base):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.mix(x + x.mean(1, True) if torch.is_autocast_enabled("cpu") else x))


LIMIT = 29  # a constant of the file, which a function of the file reads


def pool_long(x: Tensor) -> Tensor:
    return x.mean(1, True) if x.shape[1] > LIMIT else torch.zeros_like(x[:, :1])


class BeyondLimit(Base):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.mix(x + pool_long(x)))


PATHS = {
    UnderDropout: (TOKENS, "train with dropout"),
    WithLabels: (TOKENS, "labels given"),
    WithEmbeddings: (TOKENS, "embeddings given"),
    WithoutBias: ({"tokens": TOKENS, "bias": torch.ones(WIDTH)}, "without bias"),
    UnderCompile: (TOKENS, "as under torch.compile"),
    UnderAutocast: (TOKENS, "autocast"),
    BeyondLimit: (TOKENS, "length 3"),
}


@pytest.mark.parametrize("model", PATHS)
def test_a_leak_on_one_path_alone_is_found_in_a_quick_audit(model):
    instance = model() if model is UnderDropout else model(False)
    example, path = PATHS[model]
    report = kl.audit(instance, example, vocab=VOCAB, budget="quick")
    assert report.verdict == "leak", report.text()
    assert path in report.findings[0].path


class DropsByExpert(Base):
    """Dropout on as many tokens as an expert gets: random numbers that depend on the tokens are no leak."""

    def forward(self, tokens):
        x = self.embed(tokens)
        chosen = (tokens % 2).bool()
        out = torch.zeros_like(x)
        out[chosen] = F.dropout(x[chosen], 0.1, self.training)
        out[~chosen] = F.dropout(x[~chosen], 0.1, self.training)
        return self.head(self.mix(out))


def test_random_numbers_that_depend_on_tokens_are_no_leak():
    report = kl.audit(DropsByExpert(False), TOKENS, vocab=VOCAB, budget="quick")
    assert report.ok, report.text()


class FloatMask(nn.Module):
    """Makes a mask of float32 whatever the queries are, as much code does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.chunk_size = 40  # so that sequences of 41 are tried

    def forward(self, tokens):
        heads = self.qkv(self.embed(tokens)).unflatten(-1, (2, -1)).transpose(1, 2)
        mask = torch.full((tokens.shape[1], tokens.shape[1]), float("-inf")).triu(1)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1), attn_mask=mask)
        return mixed.transpose(1, 2).flatten(2)


def test_what_a_kernel_of_float64_gets_wrong_is_no_leak():
    """On CPUs, PyTorch 2.13 misreads float32 masks under float64 queries, from 33 keys on."""
    report = kl.audit(FloatMask(), vocab=VOCAB)
    assert report.ok, report.text()
