"""The tasks, as a table: what their records hold, which kind of model does them, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepleft.data.objectives import (
    Classification,
    Denoising,
    MaskedToken,
    NextToken,
    Objective,
    SpanCorruption,
    Translation,
)
from keepleft.data.prepare import Overlong
from keepleft.data.tokenizer import SENTINEL_FORMAT, SpecialTokens, special_tokens, vocab_size

NUM_SENTINELS = 100


@dataclass(frozen=True)
class Task:
    fields: tuple[str, ...]
    preset: str  # the preset whose plan the model follows
    special_tokens: tuple[str, ...]  # special tokens that it cannot do without
    objective: Callable[[Any, SpecialTokens], Objective]  # from a tokenizer and its marks
    # special tokens before and after each text
    wrapper_tokens: tuple[tuple[str, ...], tuple[str, ...]] = ((), ("end",))
    extra_special_tokens: tuple[str, ...] = ()  # further special tokens
    overlong: Overlong = "leave"  # what becomes of longer texts
    stacks: tuple[tuple[str, ...], ...] = (("encoder", "decoder"),)  # the stacks of models that can do it


def _sentinel_tokens(tokenizer: Any) -> tuple[int, ...]:
    token_ids = [tokenizer.token_to_id(SENTINEL_FORMAT.format(n)) for n in range(NUM_SENTINELS)]
    if None in token_ids:
        raise ValueError(
            f"the tokenizer has no {SENTINEL_FORMAT.format(token_ids.index(None))}: spans need {NUM_SENTINELS} of them"
        )
    return tuple(token_ids)


def _sentence_end_tokens(tokenizer: Any) -> frozenset[int]:
    sentence_ends = (".", "!", "?", "।", "Ġ.", "▁.")
    return frozenset(n for text in sentence_ends if (n := tokenizer.token_to_id(text)) is not None)


def _require_token(token: int | None) -> int:
    assert token is not None  # need() has looked
    return token


TASKS: dict[str, Task] = {
    "translate": Task(
        ("src", "tgt"), "pegasus", ("pad", "start", "end"), lambda t, m: Translation(_require_token(m.start))
    ),
    "summarize": Task(
        ("src", "tgt"),
        "pegasus",
        ("pad", "start", "end"),
        lambda t, m: Translation(_require_token(m.start)),
        overlong="cut",
    ),
    "lm": Task(
        ("text",),
        "gpt2",
        ("end",),
        lambda t, m: NextToken(_require_token(m.end)),
        overlong="flow",
        stacks=(("decoder",),),
    ),
    "classify": Task(
        ("text", "label"),
        "bert",
        ("pad", "start", "end"),
        lambda t, m: Classification(),
        wrapper_tokens=(("start",), ("end",)),
        overlong="cut",
        stacks=(("encoder",), ("decoder",)),
    ),
    "mlm": Task(
        ("text",),
        "bert_masked",
        ("pad", "start", "end", "mask"),
        lambda t, m: MaskedToken(_require_token(m.mask), vocab_size(t), m.ids()),
        wrapper_tokens=(("start",), ("end",)),
        overlong="break",
        stacks=(("encoder",),),
    ),
    "span": Task(
        ("text",),
        "t5",
        ("pad", "end"),
        lambda t, m: SpanCorruption(_require_token(m.pad), _require_token(m.end), _sentinel_tokens(t)),
        extra_special_tokens=tuple(SENTINEL_FORMAT.format(n) for n in range(NUM_SENTINELS)),
        overlong="break",
    ),
    "denoise": Task(
        ("text",),
        "bart",
        ("pad", "start", "end", "mask"),
        lambda t, m: Denoising(
            _require_token(m.start), _require_token(m.mask), _sentence_end_tokens(t), m.ids()
        ),
        overlong="break",
    ),
}


def objective(name: str, tokenizer: Any) -> Objective:
    specials = special_tokens(tokenizer)
    specials.require(*TASKS[name].special_tokens)
    return TASKS[name].objective(tokenizer, specials)
