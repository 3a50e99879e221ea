"""Random requests of every kind, and engines run until all are finished."""

from __future__ import annotations

import random
from typing import Any

import torch

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.request import (
    Engine,
    Event,
    FinishEvent,
    GenerationRequest,
    PromptRequest,
    Request,
    RequestHandle,
    Tenant,
    TokenEvent,
)
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


def random_requests(
    count: int,
    *,
    seed: int = 0,
    vocab: int = 53,
    max_tokens: int = 12,
    max_new_tokens: int = 10,
    tenants: int = 3,
    prompts: float = 0.0,
    source: bool = False,
    **options: Any,
) -> list[Request]:
    """`prompts`: the fraction of requests that generate nothing; `source`: for an encoder-decoder."""
    rng = random.Random(seed)
    requests: list[Request] = []
    for n in range(count):
        kind = rng.choice(KINDS)
        config = GenerationConfig(
            max_new_tokens=rng.randint(kind.get("min_new_tokens", 1), max_new_tokens),
            eos_token_id=2,
            decoder_start_token_id=1,
            seed=rng.randint(0, 99),
            **kind,
            **options,
        )
        logprobs = 2 if config.beam_count == 1 and rng.random() < 0.2 else None
        tokens = [rng.randint(3, vocab - 1) for _ in range(rng.randint(1, max_tokens))]
        if rng.random() < 0.3:
            tokens = [7, 8, 9, 10, 11, 12, 7, 8, *tokens]  # some share a prefix
        tenant = Tenant(f"key {n % tenants}", f"user {n % 2}")
        if rng.random() < prompts:
            requests.append(random_prompt_request(rng, tokens, tenant, source, vocab))
            continue
        requests.append(GenerationRequest(tokens, config, tenant=tenant, logprobs=logprobs))
    return requests


def random_prompt_request(
    rng: random.Random, tokens: list[int], tenant: Tenant, source: bool, vocab: int
) -> PromptRequest:
    if rng.random() < 0.4:
        return PromptRequest("embed", tokens, tenant=tenant)
    source_tokens = [rng.randint(3, vocab - 1) for _ in range(rng.randint(1, 9))] if source else []
    num_context = rng.randint(1, len(tokens))
    return PromptRequest(
        "score",
        tokens,
        source_tokens,
        num_context=num_context,
        top_logprobs=rng.choice([0, 2]),
        tenant=tenant,
    )


def outcome(events: list[Event]) -> tuple[dict[int, list[int]], dict[int, Any]]:
    """What must not depend on the engine: each sequence's tokens, finish reason and result."""
    tokens: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            tokens.setdefault(event.index, []).append(event.token)
    finished = {
        event.index: (event.finish_reason, None if event.sequence is None else tuple(event.sequence.tokens))
        for event in events
        if isinstance(event, FinishEvent)
    }
    return tokens, finished


def same_result(event: Event, expected: Event) -> bool:
    """Whether two prompt requests got the same, up to rounding."""
    assert isinstance(event, FinishEvent)
    assert isinstance(expected, FinishEvent)
    result, other = event.result, expected.result
    if isinstance(result, list):
        assert isinstance(other, list)
        return (
            [scored.token for scored in result] == [scored.token for scored in other]
            and all(abs(a.logprob - b.logprob) < 1e-3 for a, b in zip(result, other, strict=True))
            and all(len(a.top_logprobs) == len(b.top_logprobs) for a, b in zip(result, other, strict=True))
        )
    return result is not None and torch.allclose(result, other, atol=1e-4)  # type: ignore[arg-type]


def run_engine(engine: Engine, requests: list[Request], max_steps: int = 100_000) -> list[list[Event]]:
    """Submit all requests at once and step until they are finished: the events of each."""
    events: list[list[Event]] = [[] for _ in requests]
    for request, request_events in zip(requests, events, strict=True):
        engine.validate(request)
        engine.submit(RequestHandle(request, request_events.append))
    for _ in range(max_steps):
        if not engine.busy:
            return events
        for handle, event in engine.step():
            handle.on_event(event)
    raise AssertionError(f"not done after {max_steps} steps")


def run_sequentially(model: Any, requests: list[Request], tokenizer: Any = None) -> list[list[Event]]:
    return run_engine(SequentialEngine(model, tokenizer), requests)
