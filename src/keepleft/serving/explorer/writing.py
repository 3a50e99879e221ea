"""Going on with a text by any strategy that draws or picks one token after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from keepleft.decoding.generate import Work, chosen, settled, steps
from keepleft.decoding.hypotheses import Hypotheses, Written
from keepleft.decoding.options import RANGES, Options
from keepleft.decoding.single import Single
from keepleft.serving.explorer.given import Given, short
from keepleft.serving.explorer.words import Words

if TYPE_CHECKING:
    from keepleft.serving.explorer.explorer import Explorer

LIMIT = 64  # tokens that are written at once
OPTIONS = ("do_sample", "seed", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff",
           "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size", "min_new_tokens")
ALONE = {"num_beams": 1, "num_return_sequences": 1, "num_beam_groups": 1, "penalty_alpha": 0.0}  # one text, token after token


class Noted:
    """A transform that changes nothing and keeps what the model itself thought at each step."""

    def __init__(self) -> None:
        self.logs: list[Tensor] = []  # (V,)

    def __call__(self, scores: Tensor, texts: Hypotheses) -> Tensor:
        self.logs.append(scores[0].log_softmax(-1))
        return scores


@dataclass(frozen=True)
class Onward:
    """A strategy that goes on with a text of which some tokens were written before, and counts them as written.

    So a text comes out the same whether it is asked for at once or piece by piece.
    """

    strategy: Single
    written: int

    def begin(self, prompt: Tensor, real: Tensor | None, most: Tensor) -> tuple[Hypotheses, Tensor | None]:
        texts, rows = self.strategy.begin(prompt, real, most + self.written)
        return replace(texts, begin=texts.begin - self.written, size=texts.size + self.written), rows

    def choose(self, scores: Tensor, texts: Hypotheses) -> tuple[Hypotheses, Tensor | None]:
        return self.strategy.choose(scores, texts)

    def results(self, texts: Hypotheses) -> list[list[Written]]:
        return [[replace(one, tokens=one.tokens[self.written:]) for one in several] for several in self.strategy.results(texts)]


def write(explorer: Explorer, given: Given) -> dict[str, Any]:
    words = explorer.writer("write")
    row, tokens = words.prompt(explorer.asked(given)), explorer.tokens(given)
    before = words.begun if explorer.voice.pair else row
    explorer.reachable([*before, *tokens])
    new, logs = onward(words, row, tokens, wished(given.object("options", OPTIONS)), given.whole("limit", 1, LIMIT))
    return {"tokens": words.shown(new, [*before, *tokens]), "logprobs": logs,
            "ended": bool(new) and new[-1] in words.options.end}


def onward(words: Words, row: list[int], tokens: Sequence[int], wish: dict[str, Any],
           limit: int) -> tuple[list[int], list[float]]:
    """The next tokens, and how likely each was to the model itself, whatever it was drawn from."""
    voice = words.voice
    options = settled(voice.model, None, {**wish, **ALONE, "max_new_tokens": limit})
    # the last token that is asked for here is not the last of the text
    options = replace(options, forced_eos_token_id=None, stop_strings=None, max_time=None, prompt_lookup_num_tokens=None)
    work = Work.of(voice.model, [row], options, [list(tokens)])
    if work.limits[0] < 1:
        return [], []
    noted = Noted()
    strategy = chosen(voice.tokenizer, options, Work.of(voice.model, [row], options))
    assert isinstance(strategy, Single)
    whole = Onward(replace(strategy, transforms=(noted, *strategy.transforms)), len(tokens))
    last = deque(steps(voice.model, work, whole, options), maxlen=1)[0]  # type: ignore[arg-type]
    new = whole.results(last)[0][0].tokens
    return new, [float(logs[token]) for logs, token in zip(noted.logs, new, strict=False)]


def wished(given: Given) -> dict[str, Any]:
    """Options of generation that the page may ask for; numbers are checked where options are."""
    out: dict[str, Any] = {}
    for name in OPTIONS:
        if name not in given:
            continue
        if name == "do_sample":
            out[name] = given.flag(name)
        elif name == "seed":
            out[name] = given.whole(name, 0, (1 << 53) - 1)
        else:
            value = given.fields[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{name} is {short(value)}: it must be {RANGES[name][1]}")
            out[name] = value
    if out.get("do_sample") and "seed" not in out:
        out["seed"] = int(torch.randint(1 << 53, (), generator=_chance()))
    return out


def _chance() -> torch.Generator:
    """Of its own: whoever trains in the same process draws as if nobody had asked."""
    out = torch.Generator()
    out.seed()
    return out


assert {*OPTIONS} <= {field.name for field in fields(Options)}
