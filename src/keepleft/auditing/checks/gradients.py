"""Through what a reader gives, nothing may flow back to what it does not see."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from keepleft.auditing import rounding, strain
from keepleft.auditing.checks import told
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.subject import Call, CallError
from keepleft.auditing.ways import Way


def gradients(inquiry: Inquiry, way: Way, length: int) -> None:
    """Through what a reader gives, nothing may flow back to what it does not see."""
    subject = inquiry.subject
    if inquiry.quantised:
        inquiry.skip("future by gradients", "a quantised model has none")
        return
    allowed = inquiry.allowed(length)
    base = subject.call(1, length, seed=length + 1)
    with inquiry.trying(f"future by gradients, {way.named(1, length)}"), subject.on(way):
        try:
            out, leaf = strain.traced(subject, base, way)
        except strain.UntracedError as error:
            inquiry.skip("future by gradients", error)
            return
        inquiry.took(way, 1, length)
        for reader, flow in _flows(out, leaf, range(length)):
            hidden = ~allowed[reader]
            largest = float(flow.max())
            if largest <= 0 or not hidden.any() or not float(flow[hidden].max()) > 0:
                continue
            source = int(torch.where(hidden, flow, -1.0).argmax())
            relative = float(flow[source]) / largest
            if relative < 1e-4 and not _lasting(inquiry, way, base, reader, source, relative):
                continue
            pair = base.but(tokens=base.tokens.clone())
            pair.tokens[0, source] = subject.words.others(base.tokens, 11)[0, source]
            size = rounding.again(inquiry, way, base, pair, 0, reader)
            seen = way if size or not inquiry.double else way.but(dtype=torch.float64)  # too small for its own precision
            with subject.on(seen):
                told.ahead(inquiry, seen, base, pair, 0, reader, source, size or relative, "gradient")
            return


def _flows(out: Tensor, leaf: Tensor, readers: range) -> Iterator[tuple[int, Tensor]]:
    """(T,) for each reader: how much of a random direction of its output flows back to each position."""
    chance = torch.Generator().manual_seed(5)
    for reader in readers:
        piece = out[0, reader].flatten()
        direction = torch.randn(piece.shape, generator=chance).to(piece)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                flow, = torch.autograd.grad((piece * direction).sum(), leaf, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            raise CallError(f"no gradients: {str(error)[:160]}") from error
        if flow is None:
            continue
        yield reader, torch.nan_to_num(flow[0].abs().reshape(len(flow[0]), -1).amax(1).double(), nan=0.0).cpu()


def _lasting(inquiry: Inquiry, way: Way, base: Call, reader: int, source: int, relative: float) -> bool:
    """Does a small gradient stay when rounding becomes finer?"""
    if not inquiry.double:
        return relative > 1e-6
    finer = way.but(dtype=torch.float64)
    try:
        with inquiry.subject.on(finer):
            out, leaf = strain.traced(inquiry.subject, base, finer)
            (_, flow), = _flows(out, leaf, range(reader, reader + 1))
    except (CallError, strain.UntracedError, ValueError):
        return relative > 1e-6
    now = float(flow[source]) / max(float(flow.max()), 1e-300)
    return now > relative / 100 and (inquiry.pure(finer) or now > 1e-6 or now < 1e-9)
