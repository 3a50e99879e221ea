"""Step by step from a cache, in pieces of any size: is it what one pass gives?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from keepleft.auditing import place, rounding, sentences
from keepleft.auditing.checks.padding import kept, laid
from keepleft.auditing.checks.told import spot, where
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.stepping import Stepper, stepper
from keepleft.auditing.subject import Call, CallError
from keepleft.auditing.ways import Way


def cache(inquiry: Inquiry, ways: Sequence[Way], prefill: Callable[..., Any] | None, step: Callable[..., Any] | None,
          reorder: Callable[..., Any] | None) -> None:
    subject = inquiry.subject
    try:
        with subject.on(ways[0]):
            found = stepper(subject, prefill, step, reorder)
    except CallError as error:
        inquiry.skip("cache", error)
        return
    if found is None:
        inquiry.skip("cache", "the model takes no cache (past_key_values, start and step …); give prefill= and step= to check "
                     "one")
        return
    if inquiry.found("future"):
        inquiry.skip("cache", "one pass itself looks ahead, so step by step must differ: mend that first")
        return
    plain = [way for way in ways if not way.train and way.mask == "absent" and not way.asked]
    for n, way in enumerate(inquiry.timely(plain, "cache, further paths")):
        thorough = inquiry.budget.broad and n == 0
        for kind in found.kinds[:1] if inquiry.brief else found.kinds:
            with inquiry.trying(f"cache, {kind}, {way.named(2)}"):
                for there in dict.fromkeys([inquiry.fine(way), way][:1 + thorough]):
                    with subject.on(there):
                        if not Trial(inquiry, found, kind, there, thorough).whole():
                            break


@dataclass(frozen=True)
class Trial:
    inquiry: Inquiry
    stepper: Stepper
    kind: str
    way: Way
    thorough: bool

    def whole(self) -> bool:
        """Every cutting into pieces; a longer text before a shorter one; rows in another order."""
        t = self.inquiry.subject.length
        cuttings = [[5] + [1] * (t - 5), [4, 3, 2, t - 9], [1, 2, t - 3], [1] * t, [t - 3, 1, 2], [3, 5, t - 8]]
        if not self.thorough or self.stepper.single:
            cuttings = cuttings[:1 if self.stepper.single else 3]
        for n, sizes in enumerate(cuttings):
            with self.inquiry.trying(f"cache, {self.kind}, {self.way.named(2, t)}, pieces of {_said(sizes)}"):
                if not self.pieces(sizes, seed=120 + n):
                    return False
        many = 4 if self.thorough else 0 if self.inquiry.brief else 2
        longer = [n for n in self.inquiry.lengths if t < n < self.inquiry.refused][:many]
        for n in longer:
            for sizes in ([n - 2, 1, 1], [3] + [1] * (n - 3) if n <= 40 else [n // 2, n - n // 2], [2, n // 2, n - 2 - n // 2]):
                with self.inquiry.trying(f"cache, {self.kind}, {self.way.named(2, n)}"):
                    if not self.pieces(sizes, seed=140 + n):
                        return False
        with self.inquiry.trying(f"cache, {self.kind}, {self.way.named(1, t)}"):
            if not self.pieces([t - 3, 1, 1, 1], seed=150, batch=1) or not self.pieces([2, 1, 1], seed=151, batch=2):  # shorter
                return False
        for what, go in (("positions given", self.placed), ("padding on the left", self.padded),
                         ("rows in another order", self.ordered), ("cut back", self.cropped)):
            with self.inquiry.trying(f"cache, {self.kind}, {what}"):
                if not go():
                    return False
        return True

    def pieces(self, sizes: list[int], seed: int, batch: int = 2) -> bool:
        """Give a text in pieces, and compare what comes of each piece with one pass."""
        sizes = [n for n in sizes if n > 0]
        return self.given(self.inquiry.subject.call(batch, sum(sizes), seed), sizes)

    def placed(self) -> bool:
        """The same where the caller says at which positions the tokens stand."""
        subject, t = self.inquiry.subject, self.inquiry.subject.length
        if subject.positions is None or not self.stepper.told or t < 6:
            return True
        call = subject.call(2, seed=170)
        return self.given(call.but(positions=torch.arange(t).expand(2, t)), [t - 5, 1, 2, 1, 1])

    def padded(self) -> bool:
        """Rows of different lengths, padded on the left: what was padding in the cache stays padding."""
        subject, t = self.inquiry.subject, self.inquiry.subject.length
        if subject.reader is None or subject.reader.form not in ("keep", "drop") or not self.stepper.told or t < 8:
            return True
        call = laid(subject, subject.call(2, seed=180), kept(torch.tensor([t, t - 2]), t, "left"), "left", False)
        return self.given(call, [t - 5, 1, 1, 1, 2])

    def given(self, call: Call, sizes: list[int]) -> bool:
        subject = self.inquiry.subject
        sizes = [1] * sum(sizes) if self.stepper.single else sizes
        whole, state, at = subject.run(call, self.way), None, 0
        for n, size in enumerate(sizes):
            scores, state = self.stepper.go(call, at, size, state, self.kind, self.way)
            if not self.same(whole, scores, call, at, size, sizes[:n + 1]):
                return False
            at += size
        return True

    def same(self, whole: Tensor, scores: Tensor, call: Call, at: int, size: int, sizes: list[int]) -> bool:
        """Do the scores of one piece agree with those of one pass?"""
        inquiry = self.inquiry
        got = _shaped(scores, whole, size)
        here = slice(at + size - got.shape[1], at + size)
        want, told = whole[:, here], ""
        move, large = rounding.moved(want, got).cpu(), rounding.scale(want)
        if call.keep is not None:
            move, told = torch.where(call.keep[:, here], move, 0.0), ", with padding on the left"
        elif call.positions is not None:
            told = ", with positions given"
        path = inquiry.took(self.way, *call.tokens.shape[:2]) + f", {self.kind}, in pieces of {_said(sizes)}{told}"
        limit = rounding.tolerance(inquiry, self.way)
        if not float(move.max()) / large > limit:
            return True
        if (self.way.dtype or inquiry.subject.dtype) not in (torch.float32, torch.float64) and \
                float(move.median()) / large <= limit:
            return True
        row, n = divmod(int(move.argmax()), move.shape[1])
        reader = here.start + n
        found, line = self.place(call, sizes, row, reader)
        relative = float(move[row, n]) / large
        inquiry.add(Finding("cache", reader, at, relative, path, found.module,
                            f"position {reader}, reached in pieces of {_said(sizes)} from a cache{told}, differs from one pass "
                            f"{sentences.size(relative)}, through {found.module or inquiry.subject.name}; "
                            f"{sentences.remedy('cache', found.sort)}.", "comparison", line, self.shown(call, sizes, reader)))
        return False

    def place(self, call: Call, sizes: list[int], row: int, reader: int) -> tuple[place.Place, str]:
        """One pass against the last piece alone."""
        subject, size = self.inquiry.subject, sizes[-1]
        at = sum(sizes) - size

        def before() -> Any:
            state = None
            for n, one in enumerate(sizes[:-1]):
                _, state = self.stepper.go(call, sum(sizes[:n]), one, state, self.kind, self.way)
            return state

        def last(state: Any) -> Any:
            return self.stepper.go(call, at, size, state, self.kind, self.way)

        other = place.Spot(last, call.tokens.shape[0], size, row, reader - at, subject.widths, before)
        return where(self.inquiry, spot(self.inquiry, self.way, call, row, reader), other,
                     rounding.tolerance(self.inquiry, self.way))

    def ordered(self) -> bool:
        """Rows in another order, as beams need them."""
        subject = self.inquiry.subject
        call = subject.call(2, seed=160)
        half = subject.length - 4
        _, state = self.stepper.go(call, 0, half, None, self.kind, self.way)
        rows = torch.tensor([1, 0])
        state = self.stepper.turned(state, rows)
        if state is None:
            return True
        turned = call.rows(rows)
        scores, _ = self.stepper.go(turned, half, 1, state, self.kind, self.way)
        whole = subject.run(turned, self.way)
        got = _shaped(scores, whole, 1)
        move, large = rounding.moved(whole[:, half:half + 1], got).cpu(), rounding.scale(whole)
        return self.alike(float(move.max()) / large, half, "rows in another order",
                          "its rows were put into another order, the cache still has them as they were",
                          "reorder every tensor that the cache keeps")

    def cropped(self) -> bool:
        """Half of what was read is taken back, as after a guess that was wrong, and another text goes on from there."""
        subject, half = self.inquiry.subject, self.inquiry.subject.length // 2
        call = subject.call(2, seed=190)
        guess = call.but(tokens=torch.cat([call.tokens[:, :half], subject.words.others(call.tokens, 191)[:, half:].to(
            call.tokens.dtype)], 1))
        _, state = self.stepper.go(guess, 0, 2 * half, None, self.kind, self.way)
        state = self.stepper.cropped(state, half)
        if state is None:
            return True
        scores, _ = self.stepper.go(call, half, 1, state, self.kind, self.way)
        whole = subject.run(call, self.way)[:, half:half + 1]
        relative = float(rounding.moved(whole, _shaped(scores, whole, 1)).max()) / rounding.scale(whole)
        return self.alike(relative, half, f"cut back from {2 * half} to {half}",
                          f"it was cut back from {2 * half} positions to {half}, the cache still knows of the others",
                          "take back every tensor and every count that the cache keeps")

    def alike(self, relative: float, reader: int, what: str, fault: str, remedy: str) -> bool:
        """Is what comes after something was done to the cache what one pass gives?"""
        path = self.inquiry.took(self.way, 2, reader + 1) + f", {self.kind}, {what}"
        if relative <= rounding.tolerance(self.inquiry, self.way):
            return True
        self.inquiry.add(Finding("cache", reader, None, relative, path, "", f"after {fault}: the next step differs "
                                 f"{sentences.size(relative)}; {remedy}.", "comparison"), what.partition(" ")[0])
        return False

    def shown(self, call: Call, sizes: list[int], reader: int) -> str:
        if call.tokens.is_floating_point():
            return ""
        more = "" if call.keep is None else f"keep = torch.tensor({call.keep.long().tolist()})  # 0: padding\n"
        more += "" if call.positions is None else f"positions = torch.tensor({call.positions.tolist()})\n"
        return (f"a = torch.tensor({call.tokens.tolist()})\n{more}# in one pass, then in pieces of {_said(sizes)} from a "
                f"cache: the scores at position {reader} must be the same up to rounding")


def _shaped(scores: Tensor, whole: Tensor, size: int) -> Tensor:
    """(B, n, …): scores of every position of a piece, or of its last one."""
    if scores.dim() == whole.dim() - 1:
        scores = scores[:, None]
    if scores.dim() != whole.dim() or scores.shape[0] != whole.shape[0] or scores.shape[1] not in (1, size) or \
            scores.shape[2:] != whole.shape[2:]:
        raise CallError(f"a step of {size} tokens gives {tuple(scores.shape)}, one pass {tuple(whole.shape)}: they cannot be "
                        "compared")
    return scores


def _said(sizes: list[int]) -> str:
    """5, 1 × 8"""
    out: list[str] = []
    n = 0
    while n < len(sizes):
        same = 1
        while n + same < len(sizes) and sizes[n + same] == sizes[n]:
            same += 1
        out.append(f"{sizes[n]}" if same == 1 else f"{sizes[n]} × {same}")
        n += same
    return ", ".join(out)
