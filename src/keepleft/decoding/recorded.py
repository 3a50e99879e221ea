"""The same loop on a GPU, where each step, from the last tokens to the next, is one recording that is played again; or on a
CPU, where the model's part of it is compiled.

Nothing is asked of the device between tokens. Whether all texts have ended is heard of some steps later, and what was written
meanwhile falls away: a text that has ended stays as it is. Recordings are kept with the model, by shape and by strategy.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from keepleft.attention.memory import Memory
from keepleft.decoding import swift
from keepleft.decoding.beam import Beam
from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.single import Single
from keepleft.models.compiled import compiled
from keepleft.models.heads import first
from keepleft.models.state import State
from keepleft.models.steady import Steady, Track, hidden, stamp
from keepleft.nn.lone import Plain
from keepleft.nn.swift import Swift

AHEAD = 16   # steps that are begun before the first of them is done
KEPT = 4     # recordings for each model
MOST = 1 << 14  # tokens of a text that buffers are made for beforehand
ROUND = 64   # capacities are multiples of it, so that recordings serve texts of many lengths


@dataclass
class Recording:
    """One step: buffers to fill before it is played, and to read afterwards."""

    steady: Steady
    strategy: Any          # Single or Beam
    track: Track
    texts: Any             # Hypotheses of a fixed width
    over: Tensor           # () have all texts ended?
    where: tuple[int, ...]  # the weights lay when it was made: it points to them
    swift: bool = False    # the choice is a kernel of its own
    play: Any = None
    busy: bool = False     # someone is writing with it

    def fill(self, state: State, rows: Tensor | None, texts: Hypotheses, first: Tensor | None, seeds: Tensor | None) -> None:
        """Prompts that were read, and the texts so far."""
        track = self.track
        self.steady.lean.ready(track.whole.shape[1])
        track.fill(state, rows)
        track.length = 0  # only the device knows
        if track.parents is not None:
            track.parents.copy_(torch.arange(track.parents.shape[1], device=self.over.device).expand_as(track.parents))
        if track.first is not None and first is not None:
            track.first.copy_(first if rows is None else first[rows])
        if track.memory is not None and state.memory is not None and track.bias is not None:
            size = state.memory.pairs[0][0].shape[2]
            for mine, given in zip(track.memory.pairs, state.memory.pairs, strict=True):
                mine[0][:, :, :size], mine[1][:, :, :size] = given
            unseen = hidden(state.memory.segments, track.bias.dtype)
            track.bias.fill_(float("-inf"))
            track.bias[:, :size] = 0.0 if unseen is None else unseen
        _written(self.texts, texts.fixed(self.texts.tokens.shape[1]))
        if seeds is not None:
            self.strategy.seeds.copy_(seeds)

    def step(self) -> None:
        """The next token of every text, all in place."""
        track = self.track
        if track.parents is not None:
            track.parents.index_copy_(0, track.now, torch.arange(track.parents.shape[1], device=self.over.device)[None])
        scores = self.steady.run(self.texts.tokens[:, -1], track)
        if self.swift:
            swift.advance(self.strategy, scores, self.texts, track)
        else:
            after, rows = self.strategy.choose(scores, self.texts)
            if rows is not None and track.parents is not None:
                track.parents.copy_(track.parents.index_select(1, rows))
            _written(self.texts, after)
        track.now += 1
        torch.all(self.texts.done, 0, out=self.over)

    def record(self) -> None:
        """From now on the step is played, not worked out."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):  # kernels are compiled, and tables laid out, before anything is recorded
                self.step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.play = graph.replay


_kept: WeakKeyDictionary[Any, OrderedDict[Any, Recording]] = WeakKeyDictionary()


def fits(strategy: Any, longest: int) -> bool:
    """Can steps by this strategy, of texts of so many tokens, be recorded?"""
    return (isinstance(strategy, Single | Beam) and strategy.stop is None and longest <= MOST
            and all(getattr(transform, "steady", False) for transform in strategy.transforms))


def recorded(model: Any, prompt: Tensor, strategy: Single | Beam, *, limits: list[int], real: Tensor | None = None,
             **given: Any) -> Iterator[Hypotheses]:
    """Yield the texts after each new token, some after all have ended. Each step writes over what the one before yielded.

    Prompts, (B, T), all end in the last column. `given` goes to model.start().
    """
    texts, rows = strategy.begin(prompt, real, torch.tensor(limits, device=prompt.device))
    with torch.no_grad():
        scores, state = model.start(prompt, **({} if real is None else {"segments": real.long()}), **given)
        texts, chosen = strategy.choose(scores if rows is None else scores[rows], texts)  # type: ignore[arg-type]
        rows = chosen if rows is None else rows if chosen is None else rows[chosen]
    yield texts
    if max(limits) == 1:
        return
    with torch.no_grad():
        recording = _recording(model, prompt, strategy, texts, rows, max(limits), real, state)
    recording.busy = True
    try:
        past: deque[Any] = deque()
        told = torch.zeros((), dtype=torch.bool, pin_memory=prompt.is_cuda)
        for _ in range(1, max(limits)):
            with torch.no_grad():
                recording.play()
            yield recording.texts
            told.copy_(recording.over, non_blocking=True)
            if not prompt.is_cuda:
                if bool(told):
                    return
                continue
            past.append(torch.cuda.Event())
            past[-1].record()
            if len(past) > AHEAD:
                past.popleft().synchronize()  # not the last step: the device always has some to do
                if bool(told):
                    return
    finally:
        recording.busy = False


def _recording(model: Any, prompt: Tensor, strategy: Single | Beam, texts: Hypotheses, rows: Tensor | None, limit: int,
               real: Tensor | None, state: State) -> Recording:
    """One for these shapes and this strategy, filled."""
    to = ROUND if prompt.is_cuda else 2 * ROUND  # compiling takes longer than recording
    capacity = _rounded(prompt.shape[1] + limit, to)
    source = None
    if state.memory is not None:
        keys = state.memory.pairs[0][0]
        source = len(keys), _rounded(keys.shape[2], to // 2)
    plan = tuple(getattr(strategy, field.name) for field in fields(strategy) if field.name not in ("seeds", "transforms"))
    key = (type(strategy), plan, tuple(map(id, strategy.transforms)), strategy.seeds is None, len(texts.tokens), capacity,
           source, real is None, prompt.device)
    kept = _kept.setdefault(model, OrderedDict())
    found = kept.get(key)
    begin = None if real is None else first(real)
    if found is None or found.busy or found.where != stamp(model):
        found = _made(model, strategy, texts, capacity, source, real is not None)
        if prompt.is_cuda:
            found.fill(state, rows, texts, begin, strategy.seeds)
            found.record()
        else:
            found.play = found.step
        kept[key] = found
        while len(kept) > KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    found.fill(state, rows, texts, begin, strategy.seeds)
    return found


def _made(model: Any, strategy: Single | Beam, texts: Hypotheses, capacity: int, source: tuple[int, int] | None,
          padded: bool) -> Recording:
    """Empty buffers, and the step over them."""
    device, rows = texts.tokens.device, len(texts.tokens)
    steady = Steady(model, Swift() if device.type == "cuda" else Plain(whole=True))
    if model.compiled:
        steady.run = compiled(steady.run)  # type: ignore[method-assign]
    given: dict[str, Any] = {}
    if source is not None:
        shape, table = model.design.attention, model.token.weight
        pair = lambda: table.new_zeros(source[0], shape.kv_heads, source[1], shape.width)
        given = {"memory": Memory([(pair(), pair()) for _ in steady.lean.layers], None, rows // source[0]),
                 "bias": table.new_zeros(source)}
    if isinstance(strategy, Beam):
        given["parents"] = torch.zeros(capacity, rows, dtype=torch.long, device=device)
    if padded:
        given["first"] = torch.zeros(rows, dtype=torch.long, device=device)
    own = strategy if strategy.seeds is None else replace(strategy, seeds=strategy.seeds.to(device, copy=True))
    wide = texts.fixed(capacity)
    own_texts: dict[str, Any] = {field.name: value.clone(memory_format=torch.contiguous_format) for field in fields(wide)
                                 if isinstance(value := getattr(wide, field.name), Tensor)}
    held = replace(wide, **own_texts)
    over = torch.zeros((), dtype=torch.bool, device=device)
    return Recording(steady, own, steady.blank(rows, capacity, **given), held, over, stamp(model),
                     swift=device.type == "cuda" and swift.fits(own, held))


def _written(mine: Hypotheses, given: Hypotheses) -> None:
    """One set of texts over another."""
    for field in fields(mine):
        value = getattr(given, field.name)
        if isinstance(value, Tensor) and value is not (own := getattr(mine, field.name)):
            own.copy_(value)


def _rounded(n: int, to: int) -> int:
    return -(-n // to) * to
