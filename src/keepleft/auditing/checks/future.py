"""Does a position move when only what it may not see has changed?"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepleft.auditing import outputs, place, rounding, sentences, strain
from keepleft.auditing.inquiry import Inquiry
from keepleft.auditing.report import Finding
from keepleft.auditing.subject import Call, CallError
from keepleft.auditing.ways import Way

ROWS = 16            # so many changes are tried at once
TOKENS = 4096        # in at most so many tokens


@dataclass(frozen=True)
class Variant:
    """Which positions are changed, and to what."""

    changed: Tensor  # (T,)
    kind: str        # random, or the name of a kind of its own
    seed: int


def variants(allowed: Tensor, seeds: int, kinds: Sequence[str] = ()) -> list[Variant]:
    """For each reader, everything that it may not see is changed at once: that is complete. Readers with the same sight
    share a variant; where time allows, single sources are changed too."""
    cuts = list(dict.fromkeys(tuple(row) for row in (~allowed).tolist() if any(row)))
    out = [Variant(torch.tensor(cut), "random", seed) for seed in range(seeds) for cut in cuts]
    return out + [Variant(torch.tensor(cut), kind, 0) for kind in kinds for cut in cuts]


def singles(allowed: Tensor) -> list[Variant]:
    """One source at a time."""
    length = len(allowed)
    return [Variant(torch.arange(length) == k, "random", 3) for k in range(length) if not allowed[:, k].all()]


def changed(inquiry: Inquiry, tokens: Tensor, variant: Variant) -> Tensor:
    """(1, T, …) one row with the variant's change."""
    subject = inquiry.subject
    new = (subject.words.others(tokens, 101 + 31 * variant.seed) if variant.kind == "random"
           else dict(subject.words.kinds(tokens))[variant.kind])
    where = variant.changed.view(1, -1, *[1] * (tokens.dim() - 2))
    return torch.where(where, new.to(tokens.dtype), tokens)


def future(inquiry: Inquiry, ways: Sequence[Way]) -> None:
    """All probes, on the plain path first."""
    subject = inquiry.subject
    if inquiry.silent:
        return
    kinds = [name for name, _ in subject.words.kinds(subject.call(1).tokens)]
    plain, *others = ways
    if "substitution" in inquiry.probes:
        _path(inquiry, plain, subject.length, 1, inquiry.budget.seeds, kinds)
    for n, way in enumerate([plain, *others]):
        if inquiry.late:
            break
        if "substitution" in inquiry.probes:
            _path(inquiry, way, subject.length, way.batch, 1 if n else inquiry.budget.seeds, ())
    if "gradient" in inquiry.probes:
        for way in [plain, plain.but(train=True)] if inquiry.budget.broad else [plain]:
            _gradients(inquiry, way, subject.length)
    if "magnitude" in inquiry.probes:
        _strained(inquiry, plain)
    if "poison" in inquiry.probes:
        _poisoned(inquiry, plain)
    if "length" in inquiry.probes:
        _lengths(inquiry, plain)
    if "substitution" in inquiry.probes:
        _others(inquiry, plain)
    for n, length in enumerate(inquiry.timely(inquiry.lengths, "future, further lengths")):
        if "substitution" in inquiry.probes and length > 1:
            _path(inquiry, plain, length, ROWS, 1, (), sweep=True)
            if inquiry.budget.broad and n < 8:
                _path(inquiry, plain.but(train=True), length, ROWS, 1, (), sweep=True)


def _others(inquiry: Inquiry, way: Way) -> None:
    """Further outputs for each position (a value head, heads that look several words ahead) are held to the claim too."""
    subject = inquiry.subject
    with inquiry.trying("future, further outputs"):
        with subject.on(way), torch.no_grad():
            found = outputs.selectors(subject.raw(subject.call(2), way), 2, subject.length)
        main = subject.selector
        for other in found[:6]:
            if other != main and ("output", other) not in inquiry.tried:
                inquiry.tried.add(("output", other))
                try:
                    subject.selector = other
                    _path(inquiry, way.but(output=str(other)), subject.length, way.batch, 1, ())
                finally:
                    subject.selector = main


def _path(inquiry: Inquiry, way: Way, length: int, batch: int, seeds: int, kinds: Sequence[str], *,
          sweep: bool = False) -> None:
    """A complete sweep on one path."""
    subject = inquiry.subject
    what = f"future, {way.named(batch, length)}"
    key = (way, batch, length, seeds, len(kinds), inquiry.budget.broad and not sweep)
    if key in inquiry.tried or (sweep and length >= inquiry.refused):
        return
    inquiry.tried.add(key)
    if sweep and not _taken(inquiry, way, length):
        return
    with inquiry.trying(what), subject.on(way):
        allowed = inquiry.allowed(length)
        tried = variants(allowed, seeds, kinds)
        if inquiry.large:  # all cuts at once on the plain path, a few on the others
            tried = variants(allowed, 1) if batch > 1 and way == Way() else _cuts(inquiry, allowed)
            batch = 1 if batch == 1 else len(tried)
        if inquiry.budget.broad and not sweep:
            tried += singles(allowed)
        batch = max(1, min(batch, TOKENS // length)) if sweep else batch
        inquiry.took(way, batch, length)
        base = subject.call(batch, length, seed=length)
        out = subject.run(base, way)
        size = rounding.scale(out)
        if out.isnan().any() and way.dtype is None and not way.autocast:
            broken(inquiry, way, base, out)
        for n in range(0, len(tried), batch):
            if inquiry.late and n:
                inquiry.skip(what, "the time was up in the middle of it")
                return
            some = tried[n:n + batch]
            rows = [changed(inquiry, base.tokens[row:row + 1], one) for row, one in enumerate(some)]
            rows += [base.tokens[row:row + 1] for row in range(len(rows), batch)]
            new = base.but(tokens=torch.cat(rows))
            move = rounding.moved(out, subject.run(new, way))
            if not move.any():
                continue
            for row, one in enumerate(some):
                hidden = ~(inquiry.allowed(length, row) & one.changed).any(1) if not inquiry.claim.uniform else \
                    ~(allowed & one.changed).any(1)
                hits = (move[row].cpu() > 0) & hidden
                if hits.any() and judged(inquiry, way, base, new, row, hits, move[row].cpu(), size, one, "substitution"):
                    return


def _taken(inquiry: Inquiry, way: Way, length: int) -> bool:
    """Does it take a text of this length at all? A table of positions has an end."""
    subject = inquiry.subject
    try:
        with subject.on(way):
            subject.run(subject.call(1, length), way)
    except CallError as error:
        if length > subject.length:
            inquiry.refused = min(inquiry.refused, length)
        inquiry.skip(f"lengths from {length} on" if length > subject.length else f"length {length}", error)
        return False
    return True


def judged(inquiry: Inquiry, way: Way, base: Call, new: Call, row: int, hits: Tensor, move: Tensor, size: float,
           variant: Variant, probe: str) -> bool:
    """A change where there must be none: is it more than rounding, is it this row's own doing, and which source does it?"""
    subject = inquiry.subject
    reader = int(torch.where(hits, move, -1.0).argmax())
    relative = float(move[reader]) / size
    if relative == float("inf"):  # it breaks: that is a matter of its own
        if way.dtype is None and not way.autocast:
            broken(inquiry, way, new, subject.run(new, way))
        return False
    own = base.but(tokens=base.tokens.clone())
    own.tokens[row] = new.tokens[row]
    if len(base.tokens) > 1:  # do other rows do it?
        alone = rounding.moved(subject.run(base, way), subject.run(own, way))[row].cpu()
        if not (alone[hits] > 0).any():
            return False  # the batch check sees to it
        reader = int(torch.where(hits & (alone > 0), alone, -1.0).argmax())
        relative = float(alone[reader]) / size
    if not rounding.real(inquiry, way, base, own, row, reader, relative, _shakes(inquiry, base, own, row, reader, variant)):
        return False
    source, pair, largest = _source(inquiry, way, base, own, row, reader, variant)
    report(inquiry, way, base, pair, row, reader, source, max(relative, largest / size), probe)
    return True


def broken(inquiry: Inquiry, way: Way, call: Call, out: Tensor) -> None:
    """NaN in an output, with nothing but words put in."""
    bad = out.isnan().flatten(2).any(2).cpu()
    if not bad.any() or "nan" not in inquiry.checks:
        return
    row, reader = bad.nonzero()[0].tolist()
    name = place.broken(inquiry.subject.module, spot(inquiry, way, call, row, reader))
    inquiry.add(Finding("nan", reader, None, float("inf"), inquiry.took(way, *call.tokens.shape[:2]), name,
                        f"position {reader} of row {row} is NaN for plain words, through {name or inquiry.subject.name}; "
                        f"{sentences.remedy('nan', '')}.", "forward"))


def _source(inquiry: Inquiry, way: Way, base: Call, own: Call, row: int, reader: int,
            variant: Variant) -> tuple[int, Call, float]:
    """The one position that moves the reader most, where one alone does."""
    subject = inquiry.subject
    out = subject.run(base, way)
    best, pair, largest = int(variant.changed.nonzero()[0]), own, 0.0
    for k in variant.changed.nonzero().flatten().tolist()[:64]:
        one = base.but(tokens=base.tokens.clone())
        one.tokens[row, k] = own.tokens[row, k]
        size = float(rounding.moved(out, subject.run(one, way))[row, reader])
        if size > largest:
            best, pair, largest = k, one, size
    return best, pair, largest


def _shakes(inquiry: Inquiry, base: Call, own: Call, row: int, reader: int, variant: Variant) -> list[tuple[Call, Call]]:
    """The same change with something else beside it: a longer text, other words where nothing was changed."""
    words, batch, length = inquiry.subject.words, *base.tokens.shape[:2]
    out = []
    for more in (1, 3):
        tail = words.draw(batch, more, 900 + more)
        out.append(tuple(call.but(tokens=torch.cat([call.tokens, tail], 1)) for call in (base, own)))
    for at in (0, length - 1):
        if at != reader and not variant.changed[at]:
            other = words.others(base.tokens, 77)[:, at]
            pair = []
            for call in (base, own):
                tokens = call.tokens.clone()
                tokens[:, at] = other
                pair.append(call.but(tokens=tokens))
            out.append(tuple(pair))
    return out  # type: ignore[return-value]


def report(inquiry: Inquiry, way: Way, base: Call, pair: Call, row: int, reader: int, source: int, size: float,
           probe: str) -> None:
    """Put the finding into words, with the place it enters and lines that show it."""
    subject = inquiry.subject
    batch, length = base.tokens.shape[:2]
    plain = way.but(wrapped=False)
    found, line = where(inquiry, spot(inquiry, plain, base, row, reader), spot(inquiry, plain, pair, row, reader))
    ahead = "its future" if source > reader else "out of its sight"
    remedy = sentences.remedy("future", found.sort) if source > reader else sentences.NARROWER
    sort = f"the {found.sort} of {found.module}" if found.sort and found.module else found.module or subject.name
    inquiry.add(Finding(
        "future", reader, source, size, inquiry.took(way, batch, length), found.module,
        f"position {reader} reads position {source}, {ahead}, through {sort}: its output moves {sentences.size(size)}; "
        f"{remedy}.", probe, line, reproducer(inquiry, way, base, pair, row, reader)))


def spot(inquiry: Inquiry, way: Way, call: Call, row: int, reader: int | None,
         run: Callable[[], object] | None = None) -> place.Spot:
    """A call, and the place in it that is looked at."""
    subject = inquiry.subject
    return place.Spot(run or (lambda: subject.raw(call, way)), call.tokens.shape[0], call.tokens.shape[1], row, reader,
                      subject.widths)


def where(inquiry: Inquiry, one: place.Spot, other: place.Spot, tolerance: float = 0.0) -> tuple[place.Place, str]:
    """The place, and the line of code."""
    subject = inquiry.subject
    try:
        found = place.located(subject.module, one, other, tolerance)
    except CallError:
        return place.Place(), ""
    if subject.module is None:
        return found, ""
    return found, place.line(place.part(subject.module, found.module), one, other, tolerance)


def reproducer(inquiry: Inquiry, way: Way, base: Call, pair: Call, row: int, reader: int) -> str:
    """A few lines that show it, on one row where one row is enough."""
    subject = inquiry.subject
    assert subject.selector is not None
    steps = [f"model.{'train' if way.train else 'eval'}()"]
    if way.implementation:
        steps.append(f"model.set_attn_implementation({way.implementation!r})")
    if base.tokens.is_floating_point():
        at = (base.tokens != pair.tokens).flatten(2).any(2)[row].nonzero().flatten().tolist()
        steps += [f"a = torch.randn({tuple(base.tokens.shape)}); b = a.clone(); b[{row}, {at}] += 1.0"]
    else:
        at = (base.tokens != pair.tokens)[row].nonzero().flatten().tolist()
        one = row if len(base.tokens) > 1 else 0
        steps += [f"a = torch.tensor({base.tokens.tolist()}); b = a.clone()",
                  "; ".join(f"b[{one}, {k}] = {int(pair.tokens[row, k])}" for k in at)]
    extra = "".join(f", {name}={value!r}" for name, value in way.asked)
    picked = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in subject.selector.way)
    called = f"model({subject.main}={{}}{extra}){picked}[{row}, {reader}]"
    return "\n".join([*steps, f"({called.format('a')} - {called.format('b')}).abs().max()  # must be 0"])


# -- gradients

def _gradients(inquiry: Inquiry, way: Way, length: int) -> None:
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
                report(inquiry, seen, base, pair, 0, reader, source, size or relative, "gradient")
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


# -- large magnitudes, poison

def _strained(inquiry: Inquiry, way: Way) -> None:
    """A mask of finite numbers holds until a score beats it: so scores are made large, and so is what comes in."""
    length = inquiry.subject.length
    if inquiry.subject.dtype in (torch.bfloat16, torch.float16):
        way = way.but(dtype=torch.float32)  # half precision rounds as soon as scores are large
    for sign in (1.0, -1.0):
        _bent(inquiry, way, length, "large scores", strain.Scores(length, sign))
    _bent(inquiry, way, length, "large inputs", None)


def _cuts(inquiry: Inquiry, allowed: Tensor) -> list[Variant]:
    """What is hidden from each reader; from a few of them only, where the model is large."""
    every = variants(allowed, 1)
    if not inquiry.large:
        return every
    return [every[n] for n in sorted({0, len(every) // 2, len(every) - 1})]


def _bent(inquiry: Inquiry, way: Way, length: int, name: str, scores: strain.Scores | None) -> None:
    """All cuts at once, one in each row; what moves is looked at again in a row by itself."""
    subject = inquiry.subject
    if inquiry.quantised or inquiry.late or inquiry.found("future"):
        return
    base = subject.call(1, length, seed=length + 2)

    def pair(cuts: list[Variant]) -> _Strained | None:
        """Without and with what is hidden changed, under strain."""
        rows, there = _rows(base, len(cuts)), torch.stack([one.changed for one in cuts])
        if scores is None:
            b = strain.enlarged(subject, rows, way, there)
            return None if b is None else _Strained(rows, rows, subject.run(rows, way), b, None, there)
        new = rows.but(tokens=torch.cat([changed(inquiry, base.tokens, one) for one in cuts]))
        again = strain.Scores(length, scores.sign)
        with again.on():
            a = subject.run(rows, way)
        if not again.factors:
            inquiry.note("no attention scores were seen, so no large ones were tried")
            return None
        with again.on():
            return _Strained(rows, new, a, subject.run(new, way), again, there)

    with inquiry.trying(f"future under {name}"), subject.on(way):
        hit = _singled(inquiry, way, pair, 1e-6)
        if hit is None:
            return
        found_, reader, source, size = hit
        first, second = (spot(inquiry, way, call, 0, reader, strain.under(subject, call, way, found_.scores, bent))
                         for call, bent in ((found_.base, None), (found_.new, found_.there)))
        found, line = where(inquiry, first, second)
        why = (f"once scores reach {strain.LARGE:g}, its mask of finite numbers no longer hides it; fill with -inf, or use a "
               "boolean mask" if scores else f"once inputs reach {strain.HUGE:g}; {sentences.remedy('future', found.sort)}")
        inquiry.add(Finding("future", reader, source, size, f"{inquiry.took(way, 1, length)}, {name}", found.module,
                            f"position {reader} reads position {source}, out of its sight, through "
                            f"{found.module or subject.name} {why}.", "magnitude", line,
                            reproducer(inquiry, way, found_.base, found_.new, 0, reader)), "magnitude")


@dataclass(frozen=True)
class _Strained:
    """Two calls and what they gave."""

    base: Call
    new: Call
    a: Tensor
    b: Tensor
    scores: strain.Scores | None
    there: Tensor


def _singled(inquiry: Inquiry, way: Way, pair: Callable[[list[Variant]], _Strained | None],
             least: float) -> tuple[_Strained, int, int, float] | None:
    """The cut that moves a reader: found among all, then seen in a row by itself, where no other row can have done it."""
    length = inquiry.subject.length
    allowed = inquiry.allowed(length)
    cuts = _cuts(inquiry, allowed)
    got: _Strained | None = None
    for _ in ("all cuts", "the one that moves something"):
        got = pair(cuts)
        if got is None:
            return None
        inquiry.took(way, len(cuts), length)
        sound = got.a.isfinite().flatten(2).all(2) & got.b.isfinite().flatten(2).all(2)
        if got.scores is not None and not sound.all():
            return None
        move, size = torch.where(sound, rounding.moved(got.a, got.b), 0.0).cpu(), rounding.scale(got.a)
        hits = (move > 0) & torch.stack([~(allowed & one.changed).any(1) for one in cuts])
        if not hits.any() or float(move[hits].max()) / size < least:
            return None
        row, reader = divmod(int(torch.where(hits, move, -1.0).argmax()), length)
        cuts = [cuts[row]]
    assert got is not None
    return got, reader, int(cuts[0].changed.nonzero()[0]), float(move[0, reader]) / size


def _rows(call: Call, rows: int) -> Call:
    """The same text in every row."""
    return call.but(tokens=call.tokens[:1].repeat(rows, *[1] * (call.tokens.dim() - 1)),
                    source=None if call.source is None else call.source[:1].repeat(rows, *[1] * (call.source.dim() - 1)))


def _poisoned(inquiry: Inquiry, way: Way) -> None:
    """NaN and infinity where a reader may not look. NaN behind it proves nothing, since 0 · NaN is NaN in honest kernels
    too; another number does."""
    subject, length = inquiry.subject, inquiry.subject.length
    if inquiry.quantised or inquiry.late or inquiry.found("future"):
        return
    base = subject.call(1, length, seed=length + 3)
    with inquiry.trying("future by poison"), subject.on(way):
        for value in (float("nan"), float("inf")):

            def pair(cuts: list[Variant], value: float = value) -> _Strained | None:
                rows, there = _rows(base, len(cuts)), torch.stack([one.changed for one in cuts])
                ill = strain.poisoned(subject, rows, way, there, value)
                return None if ill is None else _Strained(rows, rows, subject.run(rows, way), ill, None, there)

            hit = _singled(inquiry, way, pair, 1e-5)
            if hit is None:
                continue
            got, reader, source, size = hit
            ill = strain.under(subject, got.base, way, None, got.there, value)
            found, line = where(inquiry, spot(inquiry, way, got.base, 0, reader), spot(inquiry, way, got.base, 0, reader, ill))
            path = f"{inquiry.took(way, 1, length)}, {value} as input"
            inquiry.add(Finding("future", reader, source, size, path, found.module,
                                f"position {reader} gives another number when position {source}, out of its sight, holds "
                                f"{value}: something looks at the whole sequence; {sentences.remedy('future', found.sort)}.",
                                "poison", line, reproducer(inquiry, way, got.base, got.base, 0, reader)))
            return


# -- length

def _lengths(inquiry: Inquiry, way: Way) -> None:
    """A text and its beginning: what comes behind a position may not even count."""
    subject = inquiry.subject
    lengths = [(subject.length, more) for more in (1, 2, subject.length)] + [(3, 1), (5, 4)]
    lengths += [(n, 1) for n in inquiry.lengths[:8 if inquiry.budget.broad else 3] if n > 2]
    lengths += [(n, n) for n in inquiry.lengths[:6 if inquiry.budget.broad else 2] if 2 < n <= inquiry.budget.longest // 2]
    for kind in ([torch.float64, None] if inquiry.double else [None]):
        there = way.but(dtype=kind)
        limit = rounding.tolerance(inquiry, there)
        for short, more in inquiry.timely(lengths, "future by length"):
            if short + more >= inquiry.refused or not _taken(inquiry, there, short + more):
                continue
            with inquiry.trying(f"future by length, {there.named(1, short + more)}"), subject.on(there):
                long = subject.call(1, short + more, seed=short + 40)
                brief = long.but(tokens=long.tokens[:, :short])
                if not torch.equal(inquiry.allowed(short), inquiry.allowed(short + more)[:short, :short]) or \
                        inquiry.allowed(short + more)[:short, short:].any():
                    return  # the claim itself looks at the end
                a, b = subject.run(brief, there), subject.run(long, there)[:, :short]
                inquiry.took(there, 1, short + more)
                move, size = rounding.moved(a, b)[0].cpu(), rounding.scale(a)
                if not float(move.max()) / size > limit:
                    continue
                if inquiry.found("future"):
                    return
                reader = int(move.argmax())
                found, line = where(inquiry, spot(inquiry, there, brief, 0, reader), spot(inquiry, there, long, 0, reader),
                                    limit)
                relative = float(move[reader]) / size
                inquiry.add(Finding("future", reader, short, relative, there.named(1, short + more), found.module,
                                    f"position {reader} changes when {more} more positions follow, from {short} to "
                                    f"{short + more}: something depends on the length, through {found.module or subject.name}; "
                                    "let nothing depend on what comes later, not even its amount.", "length", line,
                                    _longer(inquiry, brief, long, reader)), "length")
                return


def _longer(inquiry: Inquiry, brief: Call, long: Call, reader: int) -> str:
    subject = inquiry.subject
    if long.tokens.is_floating_point():
        return f"a = torch.randn({tuple(long.tokens.shape)}); (model(a)[:, {reader}] - model(a[:, :{brief.tokens.shape[1]}])" \
               f"[:, {reader}]).abs().max()  # must be rounding only"
    assert subject.selector is not None
    picked = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in subject.selector.way)
    called, cut = f"model({subject.main}={{}}){picked}[0, {reader}]", f"a[:, :{brief.tokens.shape[1]}]"
    return (f"a = torch.tensor({long.tokens.tolist()})\n({called.format('a')} - {called.format(cut)}).abs().max()"
            "  # must be rounding only")
