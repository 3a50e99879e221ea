"""Caches as people write them: each is found without being named, a bug in it is reported, and the correct
version is clean.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import keepleft as kl
from keepleft.auditing import localize
from keepleft.auditing.model_adapter import CallError

VOCAB = 37
WIDTH = 16
HEADS = 2


def turned(x, at):
    """Rotary embedding of x (B, H, T, D) at positions (T,) or (B, 1, T)."""
    half = x.shape[-1] // 2
    angle = at[..., None].to(x.dtype) * (50.0 ** (-torch.arange(half) / half)).to(x)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angle.cos() - right * angle.sin(), left * angle.sin() + right * angle.cos()], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, past=None, at=None, keep=None):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        before = 0 if past is None else past[0].shape[2]
        at = torch.arange(before, before + length) if at is None else at
        q, k = turned(q, at), turned(k, at)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        own = torch.arange(before, before + length)[:, None]
        seen = torch.arange(before + length)[None] <= own
        if keep is not None:
            seen = seen & keep[:, None, None] | (torch.arange(before + length)[None] == own)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)), (
            k,
            v,
        )


class Language(nn.Module):
    """Two layers of attention; `wrong` plants the bug."""

    def __init__(self, wrong=False):
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.layers = nn.ModuleList([Attention(), Attention()])

    def body(self, tokens, past=None, **more):
        x, new = self.embed(tokens), []
        for n, layer in enumerate(self.layers):
            y, held = layer(F.normalize(x, dim=-1), None if past is None else past[n], **more)
            x = x + y
            new.append(held)
        return self.head(x), tuple(new)


def read(past):
    return 0 if past is None else past[0][0].shape[2]


class PadsInTheCache(Language):
    """Wrong: padding in the cache is taken for real tokens."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None):
        keep, before = None, read(past_key_values)
        if attention_mask is not None:
            keep = attention_mask.bool()
            if self.wrong:
                keep = F.pad(keep[:, before:], (before, 0), value=True)
        at = None if position_ids is None else position_ids[:, None]
        logits, new = self.body(input_ids, past_key_values, keep=keep, at=at)
        return {"logits": logits, "past_key_values": new}


class PositionsOfPads(Language):
    """Wrong: positions come from the mask in one pass, and from the cache's length in steps."""

    def forward(self, input_ids, attention_mask=None, past_key_values=None):
        keep = None
        at = None
        before = read(past_key_values)
        if attention_mask is not None:
            keep = attention_mask.bool()
            at = (keep.long().cumsum(1) - 1).clamp(min=0)[:, None, before:]
            if self.wrong and before:
                at = torch.arange(before, before + input_ids.shape[1])
        logits, new = self.body(input_ids, past_key_values, keep=keep, at=at)
        return {"logits": logits, "past_key_values": new}


class PositionsTwice(Language):
    """Wrong: explicit positions are shifted by the length of the cache once more."""

    def forward(self, input_ids, position_ids=None, past_key_values=None):
        at = (
            None
            if position_ids is None
            else position_ids[:, None] + (read(past_key_values) if self.wrong else 0)
        )
        return self.body(input_ids, past_key_values, at=at)


class ReorderedByTheModel(Language):
    """Wrong: reordering moves the keys and not the values."""

    def forward(self, tokens, past_key_values=None):
        return self.body(tokens, past_key_values)

    def _reorder_cache(self, past, beams):
        return tuple((k[beams], v if self.wrong else v[beams]) for k, v in past)


class Incremental(Language):
    """As in fairseq: takes the whole sequence so far, computes its last token, and fills a dict.

    Wrong: at position 0.
    """

    def forward(self, prev_output_tokens, incremental_state=None):
        if incremental_state is None:
            return self.body(prev_output_tokens)[0], {"attn": None}
        at = torch.tensor([0 if self.wrong else prev_output_tokens.shape[1] - 1])
        logits, incremental_state["past"] = self.body(
            prev_output_tokens[:, -1:], incremental_state.get("past"), at=at
        )
        return logits, {"attn": None}


class CountedByTheModel(Language):
    """inference_params, advanced by the model. Wrong: by calls, not by tokens."""

    def forward(self, input_ids, inference_params=None):
        if inference_params is None:
            return self.body(input_ids)[0]
        at = torch.arange(input_ids.shape[1]) + inference_params.seqlen_offset
        logits, new = self.body(input_ids, inference_params.key_value_memory_dict.get("all"), at=at)
        inference_params.key_value_memory_dict["all"] = new
        inference_params.seqlen_offset += 1 if self.wrong else input_ids.shape[1]
        return logits


class CountedByTheCaller(Language):
    """inference_params, advanced by the caller. Wrong: by one too many."""

    def forward(self, input_ids, inference_params=None):
        if inference_params is None:
            return self.body(input_ids)[0]
        before = inference_params.seqlen_offset
        at = torch.arange(input_ids.shape[1]) + before + (1 if self.wrong and before else 0)
        logits, inference_params.key_value_memory_dict[0] = self.body(
            input_ids, inference_params.key_value_memory_dict.get(0), at=at
        )
        return logits


class InputPos(Language):
    """gpt-fast's way: a cache inside, and the caller says where.

    Wrong: the cache's own idea of it, one short.
    """

    past = None

    def forward(self, idx, input_pos=None):
        if input_pos is None:
            return self.body(idx)[0]
        self.past = None if int(input_pos[0]) == 0 else self.past
        logits, self.past = self.body(
            idx, self.past, at=input_pos - 1 if self.wrong and self.past else input_pos
        )
        return logits


class Kept:
    def __init__(self, wrong):
        self.layers = None
        self.count = 0
        self.wrong = wrong

    def crop(self, length):
        self.layers = tuple((k[:, :, :length], v[:, :, :length]) for k, v in self.layers)
        self.count = self.count if self.wrong else length


class Cropped(Language):
    """Wrong: cropping leaves the count of tokens as it was."""

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        if past_key_values is None and not use_cache:
            return {"logits": self.body(input_ids)[0]}
        kept = Kept(self.wrong) if past_key_values is None else past_key_values
        logits, kept.layers = self.body(
            input_ids, kept.layers, at=torch.arange(input_ids.shape[1]) + kept.count
        )
        kept.count += input_ids.shape[1]
        return {"logits": logits, "past_key_values": kept}


class Shift(nn.Module):
    """Each token is mixed with the one before it, and summed up with a decay.

    Wrong: the state holds another vector.
    """

    def __init__(self, wrong):
        super().__init__()
        self.wrong = wrong
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, state, raw):
        last, total = (torch.zeros_like(x[:, :1]), torch.zeros_like(x[:, 0])) if state is None else state
        y, out = self.inner(x + 0.5 * torch.cat([last, x[:, :-1]], 1)), []
        for t in range(x.shape[1]):
            total = 0.7 * total + y[:, t]
            out.append(total)
        return torch.stack(out, 1), ((raw if self.wrong else x)[:, -1:], total)


class Recurrent(nn.Module):
    def __init__(self, wrong=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = Shift(wrong)
        self.head = nn.Linear(WIDTH, VOCAB)

    def body(self, tokens, state=None):
        x = self.embed(tokens)
        y, state = self.mix(self.norm(x), state, x)
        return self.head(x + y), state

    def forward(self, tokens, state=None):
        return self.body(tokens, state)


class Begun(Recurrent):
    """init_state and step of (B, 1)."""

    def forward(self, tokens):
        return self.body(tokens)[0]

    def init_state(self, batch_size):
        return torch.zeros(batch_size, 1, WIDTH), torch.zeros(batch_size, WIDTH)

    def step(self, token, state):
        scores, state = self.body(token, state)
        return scores[:, -1], state


class Allocated(Begun):
    """allocate_inference_cache, and a step of (B,) that takes and gives each part of the state."""

    init_state = None

    def allocate_inference_cache(self, batch_size, max_seqlen, dtype=None):
        return torch.zeros(batch_size, 1, WIDTH, dtype=dtype), torch.zeros(batch_size, WIDTH, dtype=dtype)

    def step(self, token, last, total):
        assert token.dim() == 1
        scores, (last, total) = self.body(token[:, None], (last, total))
        return scores[:, 0], last, total


class Gru(nn.Module):
    """hx in, and the new state as second output. Wrong: the states of the layers are swapped."""

    def __init__(self, wrong=False):
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.GRU(WIDTH, 8, 2, batch_first=True)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, x, hx=None):
        y, h = self.rnn(self.embed(x), hx)
        return self.head(y), h.flip(0) if self.wrong else h


class Lstm(nn.Module):
    """h0 and c0 in, h_n and c_n out. Wrong: they are returned in the wrong order."""

    def __init__(self, wrong=False):
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.rnn = nn.LSTM(WIDTH, 8, batch_first=True)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, x, h0=None, c0=None):
        y, (h, c) = self.rnn(self.embed(x), None if h0 is None else (h0, c0))
        return {"logits": self.head(y), "h_n": c if self.wrong else h, "c_n": h if self.wrong else c}


CASES = {
    PadsInTheCache: None,
    PositionsOfPads: None,
    PositionsTwice: None,
    ReorderedByTheModel: "",
    Incremental: None,
    CountedByTheModel: "layers.0",
    CountedByTheCaller: "layers.0",
    InputPos: "layers.0",
    Cropped: "",
    Recurrent: "mix",
    Begun: "mix",
    Allocated: "mix",
    Gru: "rnn",
    Lstm: "rnn",
}


def audited(model, *checks):
    return kl.audit(
        model,
        torch.randint(1, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0)),
        budget="quick",
        checks=checks or ["cache"],
    )


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_a_fault_in_the_cache_is_told(model):
    report = audited(model(wrong=True))
    assert {finding.kind for finding in report.findings} == {"cache"}, report.text()
    assert CASES[model] in (None, report.findings[0].module)


@pytest.mark.parametrize("model", CASES, ids=lambda model: model.__name__)
def test_its_honest_twin_is_clean_and_was_looked_at(model):
    report = audited(model())
    assert report.ok, report.text()
    assert report.checked == ("cache",)


class Weights(Language):
    """hidden is returned and accepted, but it is the encoding of another sequence, not a cache."""

    def forward(self, tokens, encoder_hidden_states=None):
        logits, past = self.body(tokens)
        return logits if encoder_hidden_states is None else logits + encoder_hidden_states.mean(), past[0][0]


class Forgetful(Language):
    """input_pos gives positions only; there is no cache."""

    def forward(self, idx, input_pos=None):
        return self.body(idx, at=input_pos)[0]


@pytest.mark.parametrize("model", [Weights, Forgetful])
def test_what_is_no_cache_is_not_taken_for_one(model):
    report = audited(model(), "future", "cache")
    assert report.ok, report.text()
    assert "cache" not in report.checked


def test_what_could_not_be_compared_does_not_count(monkeypatch):
    def fails(*_):
        raise CallError("they cannot be compared")

    monkeypatch.setattr("keepleft.auditing.checks.cache._align_shape", fails)
    report = audited(Gru())
    assert "cache" not in report.checked


class Prompted(nn.Module):
    """Three learned vectors are prepended to the sequence. The mask is padded on the wrong side."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.prompt = nn.Parameter(torch.randn(3, WIDTH))
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.first = Mixed()
        self.mix = Mixed()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        x = torch.cat([self.prompt.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        right = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        x = x + self.first(x, right)
        wrong = torch.cat([right[:3], F.pad(right[:-3, :-3], (0, 3), value=True)])
        return self.head((x + self.mix(x, wrong))[:, 3:])


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x, seen):
        q, k, v = self.qkv(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


class Chopped(nn.Module):
    """A convolution padded on both sides and cut by its caller: on the wrong side, which is the caller's
    fault.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2)

    def forward(self, tokens):
        return self.head(self.conv(self.embed(tokens).transpose(1, 2))[..., 2:].transpose(1, 2))


class WithGradients(nn.Module):
    """Unmasked where gradients are enabled."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mix = Opened()
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.head(self.mix(self.embed(tokens)))


class Opened(Mixed):
    def forward(self, x):
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return super().forward(x, seen | torch.is_grad_enabled())


@pytest.mark.parametrize(("model", "module"), [(Prompted, "mix"), (Chopped, ""), (WithGradients, "mix")])
def test_a_leak_is_placed(model, module):
    report = audited(model(), "future")
    assert [(finding.kind, finding.module) for finding in report.findings] == [("future", module)], (
        report.text()
    )


@pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning")
def test_a_part_that_takes_no_hooks_ends_nothing():
    tokens = torch.arange(1, 6)[None]
    scripted = torch.jit.script(nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 3)))
    spots = [localize.Probe(lambda tokens=tokens + n: scripted(tokens), 1, 5, 0, 2) for n in range(2)]
    assert localize.locate(scripted, *spots) == localize.Location()
    assert localize.source_line(scripted, *spots) == ""
    assert localize.first_nan_module(scripted, spots[0]) == ""
    assert localize.submodule(scripted, "1") is not None


class Root(nn.Module):
    def forward(self, x):
        return torch.where(x > 0, x.clamp(min=0).sqrt(), 0.0)


def test_where_gradients_turn_to_nan_is_told_and_nothing_is_left_behind():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.ReLU(), Root()), nn.Linear(5, 1))
    before = [copy.copy(vars(part)) for part in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert localize.first_nan_backward(model, lambda: model(torch.randn(7, 5)).sum()) == "1.1"
    for part, was in zip(model.modules(), before, strict=True):
        assert vars(part)["_is_full_backward_hook"] is was["_is_full_backward_hook"] is None
        assert not [*part._forward_hooks, *part._forward_pre_hooks, *part._backward_hooks]


class Raising(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x):
        raise self.error(f"after {x.exp().sum():g}")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_no_torch_mode_is_left_on_where_a_traced_module_raises(error):
    model = nn.Sequential(nn.Linear(5, 5), Raising(error))
    probe = localize.Probe(lambda: model(torch.ones(1, 3, 5)), 1, 3, 0, 1)
    for trace in (localize.module_kind, lambda module, probe: localize.source_line(module, probe, probe)):
        if error is RuntimeError:
            assert trace(model[1], probe) == ""
        else:
            with pytest.raises(KeyboardInterrupt):
                trace(model[1], probe)
        assert not torch.overrides._get_current_function_mode_stack()
        assert not _get_current_dispatch_mode_stack()
        assert not [*model[1]._forward_hooks, *model[1]._forward_pre_hooks]
