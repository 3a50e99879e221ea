"""Requests of every kind, and an engine run to its end."""

from __future__ import annotations

import random
from typing import Any

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.request import Event, FinishEvent, GenerationRequest, RequestHandle, TokenEvent
from keepleft.serving.engine.sequential import SequentialEngine

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"num_beams": 3},
    {"num_beams": 2, "length_penalty": 0.5},
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7},
    {"num_beams": 3, "early_stopping": True, "num_return_sequences": 2},
    {"num_beams": 2, "do_sample": True},
    {"do_sample": True},
    {"do_sample": True, "temperature": 0.7, "top_k": 5},
    {"do_sample": True, "top_p": 0.8, "min_p": 0.02},
    {"do_sample": True, "num_return_sequences": 3},
    {"repetition_penalty": 1.4},
    {"no_repeat_ngram_size": 2},
    {"do_sample": True, "frequency_penalty": 0.6, "presence_penalty": 0.3},
    {"min_new_tokens": 4},
    {"suppress_tokens": [4, 5]},
    {"num_beams": 2, "repetition_penalty": 1.3},
    {"deterministic": True},
    {"forced_eos_token_id": 2},
    {"logit_bias": {7: 2.0}},
    {"exponential_decay_length_penalty": (2, 1.3)},
    {"encoder_no_repeat_ngram_size": 2},
    {"begin_suppress_tokens": [3]},
)


def asks(
    count: int,
    *,
    seed: int = 0,
    vocab: int = 53,
    longest: int = 12,
    limit: int = 10,
    tenants: int = 3,
    **more: Any,
) -> list[GenerationRequest]:
    dice = random.Random(seed)
    out = []
    for n in range(count):
        kind = dice.choice(KINDS)
        size = dice.randint(kind.get("min_new_tokens", 1), limit)
        options = GenerationConfig(
            max_new_tokens=size,
            eos_token_id=2,
            decoder_start_token_id=1,
            seed=dice.randint(0, 99),
            **kind,
            **more,
        )
        logprobs = 2 if options.beam_count == 1 and dice.random() < 0.2 else None
        tokens = [dice.randint(3, vocab - 1) for _ in range(dice.randint(1, longest))]
        if dice.random() < 0.3:
            tokens = [7, 8, 9, 10, 11, 12, 7, 8, *tokens]  # some begin alike
        out.append(GenerationRequest(tokens, options, tenant=f"tenant {n % tenants}", logprobs=logprobs))
    return out


def summed(events: list[Event]) -> Any:
    """What a request was told, as far as it may not differ: tokens, ends, and log-probabilities to rounding."""
    tokens: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.setdefault(event.index, []).append(event.token)
    ends = {
        event.index: (event.finish_reason, None if event.sequence is None else tuple(event.sequence.tokens))
        for event in events
        if isinstance(event, FinishEvent)
    }
    return tokens, ends


def run(engine: Any, some: list[GenerationRequest], most: int = 100_000) -> list[list[Event]]:
    """All at once, to the end."""
    told: list[list[Event]] = [[] for _ in some]
    for ask, events in zip(some, told, strict=True):
        engine.validate(ask)
        engine.submit(RequestHandle(ask, events.append))
    for _ in range(most):
        if not engine.busy:
            return told
        for ticket, event in engine.step():
            ticket.on_event(event)
    raise AssertionError(f"not done after {most} steps")


def alone(model: Any, some: list[GenerationRequest], tokenizer: Any = None) -> list[list[Event]]:
    return run(SequentialEngine(model, tokenizer), some)
