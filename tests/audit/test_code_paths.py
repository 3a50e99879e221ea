"""Leaks on one code path alone, three for each kind of path, and an honest computation on the same path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import keepleft as kl

VOCAB, WIDTH = 50, 16
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
LEAKS = {
    "the mean": lambda x: x + x.mean(1, keepdim=True),
    "the next": lambda x: x + F.pad(x[:, 1:], (0, 0, 0, 1)),
    "the last": lambda x: x + 0.5 * x[:, -1:],
}


def honest(x: Tensor) -> Tensor:
    return x + 0.5 * F.pad(x[:, :-1], (0, 0, 1, 0))


class Switching(nn.Module):
    """Two computations: one of them on a single code path."""

    def __init__(self, other: Any = honest) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.other = other

    def read(self, x: Tensor, is_other: bool) -> Tensor:
        x = self.other(x) if is_other else x
        return self.head(x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))


class Training(Switching):
    def forward(self, tokens):
        return self.read(self.embed(tokens), self.training)


class Dropping(Switching):
    def __init__(self, other: Any = honest) -> None:
        super().__init__(other)
        self.dropout = 0.1

    def forward(self, tokens):
        drops = self.training and self.dropout > 0
        return self.read(F.dropout(self.embed(tokens), self.dropout, drops), drops)


class Labels(Switching):
    def forward(self, tokens, labels=None):
        logits = self.read(self.embed(tokens), labels is not None)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"logits": logits, "loss": loss}


class Embeddings(Switching):
    def forward(self, input_ids=None, inputs_embeds=None):
        if inputs_embeds is None:
            return self.read(self.embed(input_ids), False)
        return self.read(inputs_embeds, True)


class LeftOut(Switching):
    def forward(self, tokens, bias=None):
        x = self.embed(tokens)
        return self.read(x if bias is None else x + bias, bias is None)


class Compiling(Switching):
    def forward(self, tokens):
        return self.read(self.embed(tokens), torch.compiler.is_compiling())


class Flag(Switching):
    def __init__(self, other: Any = honest) -> None:
        super().__init__(other)
        self.use_flash = False

    def forward(self, tokens):
        return self.read(self.embed(tokens), self.use_flash)


class Named(Switching):
    """An implementation that is chosen by its name."""

    def __init__(self, other: Any = honest) -> None:
        super().__init__(other)
        self.attn_impl = "sdpa"

    def forward(self, tokens):
        return self.read(self.embed(tokens), self.attn_impl == "eager")


class WeightsArgument(Switching):
    def forward(self, tokens, output_attentions=False):
        return self.read(self.embed(tokens), output_attentions)


class FurtherOutputs(Switching):
    def forward(self, tokens, return_hidden=False):
        return self.read(self.embed(tokens), return_hidden)


class MaskOfOnes(Switching):
    def forward(self, tokens, attention_mask=None):
        return self.read(self.embed(tokens), attention_mask is not None)


class ThreeRows(Switching):
    def forward(self, tokens):
        return self.read(self.embed(tokens), len(tokens) == 3)


class HalfPrecision(Switching):
    def forward(self, tokens):
        x = self.embed(tokens)
        return self.read(x, x.dtype == torch.bfloat16)


class Autocast(Switching):
    def forward(self, tokens):
        return self.read(self.embed(tokens), torch.is_autocast_enabled("cpu"))


QUICK = {
    Training: (None, "train"),
    Dropping: (None, "train with dropout"),
    Labels: (None, "labels given"),
    Embeddings: (None, "embeddings given"),
    LeftOut: ({"tokens": TOKENS, "bias": torch.ones(WIDTH)}, "without bias"),
    Compiling: (None, "as under torch.compile"),
    Flag: (None, "use_flash=True"),
    Named: (None, "attn_impl=eager"),
    WeightsArgument: (None, "output_attentions=True"),
    FurtherOutputs: (None, "return_hidden=True"),
    MaskOfOnes: (None, "a mask of ones"),
    ThreeRows: (None, "batch 3"),
    HalfPrecision: (None, "bfloat16"),
    Autocast: (None, "autocast to bfloat16"),
}


@pytest.mark.parametrize("leak", LEAKS)
@pytest.mark.parametrize("model", QUICK)
def test_a_leak_on_one_path_is_found_there_in_a_quick_audit(model, leak):
    example, path = QUICK[model]
    report = kl.audit(model(LEAKS[leak]), example, vocab=VOCAB, budget="quick", checks=["future"])
    found, *others = report.findings
    assert not others, report.text()
    assert found.kind == "future"
    assert path in found.path


@pytest.mark.parametrize("model", QUICK)
def test_another_honest_computation_on_one_path_is_clean(model):
    report = kl.audit(model(), QUICK[model][0], vocab=VOCAB, budget="quick", checks=["future"])
    assert report.ok, report.text()
    assert any(QUICK[model][1] in path for path in report.paths), report.paths


# -- paths of the thorough budgets -------------------------------------------------------------


class OneRow(Switching):
    def forward(self, tokens):
        return self.read(self.embed(tokens), len(tokens) == 1 and self.training)


class MaskOfOneRow(Switching):
    def forward(self, tokens, attention_mask=None):
        return self.read(self.embed(tokens), attention_mask is not None and len(tokens) == 1)


class BooleanMask(Switching):
    def forward(self, tokens, attention_mask=None):
        is_boolean = attention_mask is not None and attention_mask.dtype == torch.bool
        return self.read(self.embed(tokens), is_boolean)


class WithoutCache(Switching):
    def forward(self, tokens, use_cache=None):
        return self.read(self.embed(tokens), use_cache is False)


class MaskInTraining(Switching):
    def forward(self, tokens, attention_mask=None):
        return self.read(self.embed(tokens), self.training and attention_mask is not None)


class LabelsInTraining(Labels):
    def forward(self, tokens, labels=None):
        logits = self.read(self.embed(tokens), self.training and labels is not None)
        return {"logits": logits, "loss": logits.sum()}


STANDARD = {
    OneRow: "train, no mask, batch 1",
    MaskOfOneRow: "a mask of ones, batch 1",
    BooleanMask: "a boolean mask of ones",
    WithoutCache: "use_cache=False",
    MaskInTraining: "train, a mask of ones",
    LabelsInTraining: "train, labels given",
}


@pytest.mark.parametrize("model", STANDARD)
def test_a_leak_on_one_path_is_found_there_in_a_standard_audit(model):
    probes = ["substitution"]
    for leak in ("the mean", "the next"):
        report = kl.audit(model(LEAKS[leak]), vocab=VOCAB, checks=["future"], probes=probes)
        assert report.findings, report.text()
        assert STANDARD[model] in report.findings[0].path
    report = kl.audit(model(), vocab=VOCAB, checks=["future"], probes=probes)
    assert report.ok, report.text()


# -- wrappers and implementations --------------------------------------------------------------


class DataParallel(nn.Module):
    """Named as torch's wrapper is, which needs GPUs to do more than this."""

    def __init__(self, module: nn.Module, other: Any) -> None:
        super().__init__()
        self.module = module
        self.other = other

    def forward(self, tokens):
        return self.other(self.module(tokens))


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_of_a_wrapper_is_found_as_wrapped(leak):
    model = DataParallel(Training(), LEAKS[leak])
    report = kl.audit(model, vocab=VOCAB, budget="quick", checks=["future"])
    assert "as wrapped" in report.findings[0].path, report.text()


def test_an_honest_wrapper_is_clean():
    report = kl.audit(DataParallel(Training(), honest), vocab=VOCAB, budget="quick", checks=["future"])
    assert report.ok, report.text()
    assert any("as wrapped" in path for path in report.paths)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_a_leak_under_a_square_mask_is_found_there(monkeypatch):
    forward = transformers.GPT2Model.forward

    def leaking(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            out.last_hidden_state = LEAKS["the next"](out.last_hidden_state)
        return out

    options = {"checks": ["future"], "probes": ["substitution"]}
    assert kl.audit(gpt2(), **options).ok
    monkeypatch.setattr(transformers.GPT2Model, "forward", leaking)
    report = kl.audit(gpt2(), **options)
    assert "a 4-D mask" in report.findings[0].path, report.text()


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_a_leak_in_one_implementation_of_attention_is_found_there(name, monkeypatch):
    model = gpt2()
    model.set_attn_implementation("sdpa" if name == "eager" else "eager")
    forward = transformers.GPT2Model.forward

    def leaking(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if self.config._attn_implementation == name:
            out.last_hidden_state = LEAKS["the mean"](out.last_hidden_state)
        return out

    assert kl.audit(model, budget="quick", checks=["future"]).ok
    monkeypatch.setattr(transformers.GPT2Model, "forward", leaking)
    report = kl.audit(model, budget="quick", checks=["future"])
    assert f"{name} attention" in report.findings[0].path, report.text()
