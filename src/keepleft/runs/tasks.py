"""The tasks of `keepleft train`, as a table: the fields of their records, the model, and the objective."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NUM_SENTINELS = 100  # of T5's span corruption


@dataclass(frozen=True)
class Task:
    fields: tuple[str, ...]  # of a record
    preset: str  # of the model, unless the job names another
    special_tokens: tuple[str, ...]  # that the tokenizer must have
    objective: Callable[[Tokenizer, SpecialTokens], Objective]
    wrapper_tokens: tuple[tuple[str, ...], tuple[str, ...]] = ((), ("end",))  # before and after each text
    extra_special_tokens: tuple[str, ...] = ()  # for a new tokenizer, besides the usual ones
    overlong: Overlong = "leave"  # what becomes of texts beyond the maximum length
    stacks: tuple[tuple[str, ...], ...] = (("encoder", "decoder"),)  # of the models that can do the task

    @property
    def is_paired(self) -> bool:
        """Whether a record is a pair of source and target text."""
        return self.fields == ("src", "tgt")


def _sentinel_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    token_ids = []
    for n in range(NUM_SENTINELS):
        token_id = tokenizer.token_to_id(SENTINEL_FORMAT.format(n))
        if token_id is None:
            raise ValueError(
                f"the tokenizer has no {SENTINEL_FORMAT.format(n)}: spans need {NUM_SENTINELS} of them"
            )
        token_ids.append(token_id)
    return tuple(token_ids)


def _sentence_end_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    sentence_ends = (".", "!", "?", "।", "Ġ.", "▁.")
    return frozenset(n for text in sentence_ends if (n := tokenizer.token_to_id(text)) is not None)


def _require_token(token: int | None) -> int:
    assert token is not None  # SpecialTokens.require() was called before
    return token


TASKS: dict[str, Task] = {  # objectives are made from the tokenizer `t` and its special tokens `s`
    "translate": Task(
        ("src", "tgt"), "pegasus", ("pad", "start", "end"), lambda t, s: Translation(_require_token(s.start))
    ),
    "summarize": Task(
        ("src", "tgt"),
        "pegasus",
        ("pad", "start", "end"),
        lambda t, s: Translation(_require_token(s.start)),
        overlong="cut",
    ),
    "lm": Task(
        ("text",),
        "gpt2",
        ("end",),
        lambda t, s: NextToken(_require_token(s.end)),
        overlong="flow",
        stacks=(("decoder",),),
    ),
    "classify": Task(
        ("text", "label"),
        "bert",
        ("pad", "start", "end"),
        lambda t, s: Classification(),
        wrapper_tokens=(("start",), ("end",)),
        overlong="cut",
        stacks=(("encoder",), ("decoder",)),
    ),
    "mlm": Task(
        ("text",),
        "bert_masked",
        ("pad", "start", "end", "mask"),
        lambda t, s: MaskedToken(_require_token(s.mask), vocab_size(t), s.ids()),
        wrapper_tokens=(("start",), ("end",)),
        overlong="break",
        stacks=(("encoder",),),
    ),
    "span": Task(
        ("text",),
        "t5",
        ("pad", "end"),
        lambda t, s: SpanCorruption(_require_token(s.pad), _require_token(s.end), _sentinel_tokens(t)),
        extra_special_tokens=tuple(SENTINEL_FORMAT.format(n) for n in range(NUM_SENTINELS)),
        overlong="break",
    ),
    "denoise": Task(
        ("text",),
        "bart",
        ("pad", "start", "end", "mask"),
        lambda t, s: Denoising(
            _require_token(s.start), _require_token(s.mask), _sentence_end_tokens(t), s.ids()
        ),
        overlong="break",
    ),
}


def objective(name: str, tokenizer: Tokenizer) -> Objective:
    """The training objective of a task. Raises ValueError if the tokenizer lacks a special token."""
    specials = special_tokens(tokenizer)
    specials.require(*TASKS[name].special_tokens)
    return TASKS[name].objective(tokenizer, specials)
