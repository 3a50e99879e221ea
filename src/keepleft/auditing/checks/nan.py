"""A row with nothing to see: NaN in what comes out, or only in what flows back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from keepleft.auditing import place, sentences
from keepleft.auditing.checks.padding import kept, laid
from keepleft.auditing.checks.told import broken
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call, CallError
from keepleft.auditing.ways import COARSE, Way

LONG = 192  # tokens: half of something, so often, is nothing in single precision


def nan(inquiry: Inquiry, ways: Sequence[Way], every: Sequence[Way] = ()) -> None:
    """In the model's own precision, forward and backward; in coarser ones, forward and only where a mask makes it NaN."""
    for way in inquiry.timely([way for way in ways if way.dtype not in COARSE], "nan, further paths"):
        for told, call, real in _calls(inquiry):
            with inquiry.trying(f"nan, {told}, {way.named(*call.tokens.shape[:2])}"), inquiry.subject.on(way):
                if _forward(inquiry, way, told, call) and (call.keep is not None or not inquiry.brief):
                    _backward(inquiry, way, told, call, real)
    if not inquiry.brief:
        _long(inquiry)
    if any(way.dtype in COARSE for way in (*ways, *every)):  # a copy in another precision is not too much to ask
        for kind in inquiry.timely([kind for kind in COARSE if kind != inquiry.subject.dtype], "nan in coarser numbers"):
            way = Way(dtype=kind)
            if ("nan", way) not in inquiry.tried:
                inquiry.tried.add(("nan", way))
                with inquiry.trying(f"nan, {way.named()}"), inquiry.subject.on(way):
                    _coarse(inquiry, way)


def _calls(inquiry: Inquiry) -> Iterator[tuple[str, Call, Tensor]]:
    """What may leave a query with nothing to see, with the places whose outputs are wanted."""
    subject = inquiry.subject
    for length in (1, 2, subject.length):
        yield f"{length} positions", subject.call(2, length, seed=70), torch.ones(2, length, dtype=torch.bool)
    yield "one row", subject.call(1, seed=70), torch.ones(1, subject.length, dtype=torch.bool)
    yield from _masked(inquiry)


def _masked(inquiry: Inquiry) -> Iterator[tuple[str, Call, Tensor]]:
    """Those of them that have padding."""
    subject = inquiry.subject
    whole = subject.length
    if subject.reader is not None:
        left = kept(torch.tensor([whole, whole - 4]), whole, "left")
        if subject.reader.form != "lengths":
            yield "padding on the left", laid(subject, subject.call(2, seed=71), left, "left", False), left
        none = kept(torch.tensor([whole, whole - 4, 0]), whole, "right")
        yield "a row of nothing but padding", laid(subject, subject.call(3, seed=72), none, "right", False), none
    if subject.source_reader is not None:
        none = kept(torch.tensor([subject.source_length, 0]), subject.source_length, "right")
        yield ("a source of nothing but padding", subject.call(2, seed=73).but(source_keep=none),
               torch.ones(2, whole, dtype=torch.bool))


def _long(inquiry: Inquiry) -> None:
    """One long text: products of many decays come to nothing, sums to infinity. A table of positions may end before."""
    subject, way = inquiry.subject, Way()
    longest = sorted({max(LONG, inquiry.budget.longest), *inquiry.lengths}, reverse=True)
    for length in [n for n in longest if subject.length < n < inquiry.refused][:4]:
        if ("nan", length) in inquiry.tried:
            return
        try:
            with subject.on(way):
                _forward(inquiry, way, f"{length} positions", subject.call(1, length, seed=74))
        except CallError:
            continue
        inquiry.tried.add(("nan", length))
        return


def _coarse(inquiry: Inquiry, way: Way) -> None:
    """A model that never claimed a precision may leave its range, but not for want of something to see."""
    subject = inquiry.subject
    if subject.run(subject.call(2, 1, seed=70), way).isnan().any():
        return
    if not inquiry.silent and not _forward(inquiry, way, "3 positions", subject.call(2, 3, seed=70)):  # the first hides nothing
        return
    for told, call, _ in _masked(inquiry):
        open_ = call.but(keep=None, source_keep=None, positions=None)
        if subject.run(open_, way).isnan().any() or not _forward(inquiry, way, told, call):
            return


def _forward(inquiry: Inquiry, way: Way, told: str, call: Call) -> bool:
    out = inquiry.subject.run(call, way)
    inquiry.took(way, *call.tokens.shape[:2])
    return not broken(inquiry, way, call, out, f"with {told}", told)


def _backward(inquiry: Inquiry, way: Way, told: str, call: Call, real: Tensor) -> None:
    """Only what is wanted is judged; the gradients of weights must still be numbers."""
    subject = inquiry.subject
    if subject.module is None:
        return
    weights = [p for p in subject.module.parameters() if p.requires_grad]
    if not weights or subject.selector is None:
        return

    def loss() -> Tensor:
        with torch.enable_grad():
            out = subject.chosen(subject.raw(call, way), *call.tokens.shape[:2])
            wanted = out[real.to(out.device)]
            direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3)).to(wanted)
            return (wanted * direction).sum()

    value = loss()
    if not value.requires_grad:
        return
    before = [p.grad for p in weights]
    try:
        for p in weights:
            p.grad = None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.autograd.backward(value)
        except RuntimeError as error:
            raise CallError(f"no gradients: {error}") from error
        if all(p.grad is None or p.grad.isfinite().all() for p in weights):
            return
        for p in weights:
            p.grad = None
        name = place.broken_backward(subject.module, loss)
    finally:
        for p, grad in zip(weights, before, strict=True):
            p.grad = grad
    path = inquiry.took(way, *call.tokens.shape[:2]) + f", {told}"
    inquiry.add(Finding("nan", None, None, float("inf"), path, name,
                        f"what comes out are numbers, but gradients are NaN or infinite with {told}, through "
                        f"{name or subject.name}; {sentences.remedy('nan', '')}, and choose between values before they are "
                        "computed, not after.", "gradient"), "backward")
