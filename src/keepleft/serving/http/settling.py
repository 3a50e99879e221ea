"""From the fields of a request to what an engine is asked: OpenAI's words and ours, settled with the model directory's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from secrets import randbits
from typing import Any

from keepleft.decoding import grammar
from keepleft.decoding.generate import USUAL, encoded, prefixes_of
from keepleft.decoding.options import Options, of_model, whole
from keepleft.serving.asks import Ask
from keepleft.serving.http.errors import RefusedError, too_long
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.service import Service
from keepleft.serving.http.wishes import OWN, Wishes

Prompt = str | list[int]


@dataclass(frozen=True)
class Order:
    """What a request comes to: one ask for each prompt, and what becomes of the texts."""

    asks: list[Ask]
    copies: int                   # choices for each prompt
    made: int                     # texts that are written for each; the best are kept
    seed: int | None              # None: nothing is drawn
    stops: list[str]

    @property
    def repeated(self) -> bool:
        """One text is every choice: there is one way to be greedy."""
        return self.made < self.copies


def settled(model: Any, wishes: Wishes, *, drawn: bool) -> Options:
    """`drawn`: tokens are drawn at temperature 1 where nothing is said, as OpenAI does, not as the directory does."""
    said: dict[str, Any] = {name: getattr(wishes, name) for name in OWN}
    base = of_model(getattr(model, "notes", {}))
    asked = [wishes.temperature, wishes.top_p, wishes.top_k, wishes.min_p, wishes.typical_p, wishes.top_h]
    if wishes.logit_bias:
        said["logit_bias"] = {int(token): value for token, value in wishes.logit_bias.items()}
    if said["sequence_bias"] is not None:
        said["sequence_bias"] = [[list(tokens), value] for tokens, value in said["sequence_bias"]]
    if drawn or wishes.temperature is not None or wishes.top_p is not None:
        if said["num_beams"] is None and any(value is not None for value in asked):
            said["num_beams"] = 1  # a draw is asked for, and beams of the directory would be something else
        if said["do_sample"] is None:
            beams = said["num_beams"] or base.beams
            said["do_sample"] = wishes.temperature != 0 and beams == 1 and not wishes.penalty_alpha
    if wishes.temperature == 0 and said["do_sample"]:
        raise RefusedError(400, "temperature is 0, which is the likeliest token each time, and do_sample is true: give one of "
                                "them", param="temperature")
    return base.but(**said, temperature=wishes.temperature or None, top_p=wishes.top_p)


def ordered(service: Service, wishes: Wishes, prompts: Sequence[Prompt], options: Options, *, most: int | None,
            stop: str | list[str] | None, tenant: str, copies: int = 1, best_of: int | None = None,
            logprobs: int | None = None) -> Order:
    """One ask for each prompt. Takes its time (tokens are counted, a rule is compiled): call it in a thread."""
    limits, model = service.limits, service.model
    stop = stop if stop is not None else wishes.stop_strings
    stops = [stop] if isinstance(stop, str) else options.strings if stop is None else list(stop)
    _check(wishes, options, stops, limits, model.design.vocab)
    limited(len(prompts), limits.prompts, "prompt")
    limited(logprobs, limits.logprobs, "logprobs")
    limited(copies, limits.n, "n")
    limited(best_of, limits.n, "best_of")
    made = copies if best_of is None else best_of
    if made < copies:
        raise RefusedError(400, f"best_of is {made} and n is {copies}: the first must not be smaller", param="best_of")
    limited(made * len(prompts), limits.texts, "n")
    options, seed = _made(options, wishes, made, stops, limits)
    rows = _rows(service, prompts, options)
    begun = prefixes_of(service.tokenizer, Options(prefix=wishes.prefix), 1) or [[]]
    asks = []
    for n, row in enumerate(rows):
        own = _sized(service, options, row, len(begun[0]), most)
        own.check()
        own = replace(own, seed=None if seed is None else _wrapped(seed + n))
        asks.append(Ask(row, own, begun[0], tenant, logprobs))
    _compiled(service, options)
    return Order(asks, copies, options.copies, seed, stops)


def _made(options: Options, wishes: Wishes, made: int, stops: list[str], limits: Limits) -> tuple[Options, int | None]:
    """How many texts are written for each prompt, and by which seed."""
    if not options.do_sample and options.beams == 1:
        made = 1
    elif options.beams > 1:
        options = replace(options, num_beams=max(options.beams, made))
    limited(options.beams, limits.beams, "num_beams")
    options = replace(options, stop_strings=stops or None, num_return_sequences=made, prefix=None,
                      max_time=None if options.max_time is None else min(options.max_time, limits.seconds))
    if not options.do_sample:
        return options, None
    return options, randbits(48) if wishes.seed is None else wishes.seed


def _sized(service: Service, options: Options, row: list[int], begun: int, most: int | None) -> Options:
    """With as many tokens to write as there is room for."""
    before = (1 if service.pair else len(row)) + begun
    if before > service.reach:
        raise too_long(before, service.reach)
    sensible = 2 * len(row) + 10 if service.pair else USUAL
    wanted = options.limit(before, sensible, None) if most is None else most
    room = max(0, min(wanted, service.reach - before, service.limits.new_tokens))
    if options.min_new_tokens is not None and options.min_new_tokens > room:
        raise RefusedError(400, f"min_new_tokens is {options.min_new_tokens}, and at most {room} can be written: give less",
                           param="min_new_tokens")
    return replace(options, max_new_tokens=room, max_length=None)


def _compiled(service: Service, options: Options) -> None:
    """A rule is tried in a process apart, which can be stopped, before the engine meets it."""
    try:
        rule = grammar.of(options)
    except ImportError as error:
        raise RefusedError(400, str(error), code="rules_unavailable") from error
    if rule is None:
        return
    if not options.end:
        raise RefusedError(400, "a text that keeps to a rule must be able to end, and the model directory does not say how: "
                                "give eos_token_id", param="eos_token_id")
    service.rules.rule(rule, options.end[0], service.limits.rule_seconds)


def limited(value: int | None, most: int, name: str) -> None:
    if value is not None and value > most:
        raise RefusedError(400, f"{name} is {value}: at most {most} is served here", param=name)


def _rows(service: Service, prompts: Sequence[Prompt], options: Options) -> list[list[int]]:
    for prompt in prompts:
        if isinstance(prompt, str):
            readable(prompt, service.limits)
        elif len(prompt) > service.reach:
            raise too_long(len(prompt), service.reach)
    reading = service.voice.reading
    rows: list[Prompt] = [reading.encode(prompt).ids if isinstance(prompt, str) else prompt for prompt in prompts]
    if longer := [len(row) for row in rows if len(row) > service.reach]:
        raise too_long(longer[0], service.reach)
    return encoded(service.model, reading, rows, options)


def readable(text: str, limits: Limits) -> str:
    if len(text) > limits.characters:
        raise RefusedError(400, f"a text has {len(text):,} characters: at most {limits.characters:,} are read",
                           code="context_length_exceeded")
    return text


def _check(wishes: Wishes, options: Options, stops: list[str], limits: Limits, vocab: int) -> None:
    """What Limits bounds, and tokens that the model does not know."""
    limited(wishes.num_beams, limits.beams, "num_beams")
    limited(len(stops), limits.stops, "stop")
    for string in stops:
        if not string or len(string) > limits.stop_characters:
            raise RefusedError(400, f"a stop string has {len(string)} characters: it must have 1 to {limits.stop_characters}",
                               param="stop")
    for name in ("suppress_tokens", "begin_suppress_tokens", "shortlist", "eos_token_id", "forced_eos_token_id",
                 "forced_bos_token_id", "bad_words_ids", "sequence_bias", "logit_bias"):
        if getattr(wishes, name) is None:
            continue
        found = _flat(name, getattr(options, name))
        limited(len(found), limits.tokens, name)
        if odd := [token for token in found if not 0 <= token < vocab]:
            raise RefusedError(400, f"{name} holds token {odd[0]}, and the model knows {vocab}", param=name)
    readable(wishes.prefix or "", limits)
    for name in ("regex", "grammar", "json_schema"):
        rule = getattr(wishes, name)
        size = 0 if rule is None else len(rule if isinstance(rule, str) else json.dumps(rule))
        if size > limits.rule:
            raise RefusedError(400, f"{name} has {size:,} characters: at most {limits.rule:,} are read", param=name)


def _flat(name: str, value: Any) -> list[int]:
    if value is None:
        return []
    if name == "logit_bias":
        return list(value)
    if name in ("bad_words_ids", "sequence_bias"):
        rows = value.keys() if isinstance(value, dict) else value if name == "bad_words_ids" else [row for row, _ in value]
        return [token for row in rows for token in row]
    return whole(value)


def _wrapped(seed: int) -> int:
    """Within 64 bits."""
    return (seed + (1 << 63)) % (1 << 64) - (1 << 63)
