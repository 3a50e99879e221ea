"""The tasks, as a table: what their records hold, which kind of model does them, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepleft.data.objectives import Classification, Denoising, MaskedToken, NextToken, Objective, SpanCorruption, Translation
from keepleft.data.prepare import Long
from keepleft.data.tokenizer import SENTINEL, Marks, marks, span

SENTINELS = 100


@dataclass(frozen=True)
class Task:
    fields: tuple[str, ...]
    like: str                          # the preset whose plan the model follows
    marks: tuple[str, ...]             # special tokens that it cannot do without
    objective: Callable[[Any, Marks], Objective]  # from a tokenizer and its marks
    around: tuple[tuple[str, ...], tuple[str, ...]] = ((), ("end",))  # special tokens before and after each text
    more: tuple[str, ...] = ()         # further special tokens
    long: Long = "leave"               # what becomes of longer texts
    parts: tuple[tuple[str, ...], ...] = (("encoder", "decoder"),)  # the stacks of models that can do it


def _sentinels(tokenizer: Any) -> tuple[int, ...]:
    found = [tokenizer.token_to_id(SENTINEL.format(n)) for n in range(SENTINELS)]
    if None in found:
        raise ValueError(f"the tokenizer has no {SENTINEL.format(found.index(None))}: spans need {SENTINELS} of them")
    return tuple(found)


def _stops(tokenizer: Any) -> frozenset[int]:
    ends = (".", "!", "?", "।", "Ġ.", "▁.")
    return frozenset(n for word in ends if (n := tokenizer.token_to_id(word)) is not None)


def _number(value: int | None) -> int:
    assert value is not None  # need() has looked
    return value


TASKS: dict[str, Task] = {
    "translate": Task(("src", "tgt"), "pegasus", ("pad", "start", "end"), lambda t, m: Translation(_number(m.start))),
    "summarize": Task(("src", "tgt"), "pegasus", ("pad", "start", "end"), lambda t, m: Translation(_number(m.start)),
                      long="cut"),
    "lm": Task(("text",), "gpt2", ("end",), lambda t, m: NextToken(_number(m.end)), long="flow", parts=(("decoder",),)),
    "classify": Task(("text", "label"), "bert", ("pad", "start", "end"), lambda t, m: Classification(),
                     around=(("start",), ("end",)), long="cut", parts=(("encoder",), ("decoder",))),
    "mlm": Task(("text",), "bert_masked", ("pad", "start", "end", "mask"),
                lambda t, m: MaskedToken(_number(m.mask), span(t), m.special()),
                around=(("start",), ("end",)), long="break", parts=(("encoder",),)),
    "span": Task(("text",), "t5", ("pad", "end"), lambda t, m: SpanCorruption(_number(m.pad), _number(m.end), _sentinels(t)),
                 more=tuple(SENTINEL.format(n) for n in range(SENTINELS)), long="break"),
    "denoise": Task(("text",), "bart", ("pad", "start", "end", "mask"),
                    lambda t, m: Denoising(_number(m.start), _number(m.mask), _stops(t), m.special()), long="break"),
}


def objective(name: str, tokenizer: Any) -> Objective:
    known = marks(tokenizer)
    known.need(*TASKS[name].marks)
    return TASKS[name].objective(tokenizer, known)
