"""Continuous batching: each request gets what it would get alone, whatever joins, leaves or fails nearby."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.request import (
    FinishEvent,
    GenerationRequest,
    PromptRequest,
    RequestHandle,
    Tenant,
    TokenEvent,
)
from serving.engine_harness import outcome, random_requests, run_engine, run_sequentially, same_result

FAMILIES = ("gpt2", "llama3", "t5", "marian", "windowed", "prefixed")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_model(name: str, seed: int = 3):
    design = kl.presets.small(
        getattr(kl.presets, {"windowed": "mistral", "prefixed": "llama3"}.get(name, name))
    )
    if name == "windowed":
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & kl.window(4), kl.causal)))
    if name == "prefixed":  # the fused decode step does not support this mask
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & (kl.window(4) | kl.prefix(2)),)))
    design = design.but(vocab=53, dropout=0.0, initial=kl.NormalInit(0.2))
    return kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()


def is_idle(engine: ContinuousBatchingEngine) -> bool:
    """Nothing runs or waits, and no page is in use but by the prefix cache."""
    stats = engine.stats()
    return (
        stats["pages_used"] == stats["prefix_cache_pages"] and not engine.busy and not engine.strategy_batches
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_three_hundred_mixed_requests_with_cancellations(name):
    model = build_model(name)
    requests = random_requests(300, seed=5, prompts=0.25, source=model.design.is_encoder_decoder)
    expected = run_sequentially(model, requests)
    engine = ContinuousBatchingEngine(model, max_num_seqs=48, pages=64, page_size=16, prefill_chunk_size=64)
    rng = random.Random(1)
    received: list[list] = [[] for _ in requests]
    handles = [
        RequestHandle(request, events.append) for request, events in zip(requests, received, strict=True)
    ]
    unsubmitted, cancelled = list(range(300)), set()
    for _ in range(10_000):
        for _ in range(rng.randint(0, 30)):
            if unsubmitted:
                engine.submit(handles[unsubmitted.pop(0)])
        if rng.random() < 0.8:
            n = rng.randrange(300)
            if n not in unsubmitted and not any(
                isinstance(event, FinishEvent) and event.last for event in received[n]
            ):
                handles[n].cancelled = True
                cancelled.add(n)
        for handle, event in engine.step():
            handle.on_event(event)
        if not unsubmitted and not engine.busy:
            break
    assert is_idle(engine)
    for n, (events, expected_events) in enumerate(zip(received, expected, strict=True)):
        tokens = [event for event in events if isinstance(event, TokenEvent)]
        expected_tokens = [event for event in expected_events if isinstance(event, TokenEvent)]
        if n not in cancelled:
            if isinstance(requests[n], PromptRequest):
                assert same_result(events[-1], expected_events[-1]), requests[n]
                continue
            assert outcome(events) == outcome(expected_events), requests[n]
            logprob_pairs = [
                (event.logprob, expected_event.logprob)
                for event, expected_event in zip(
                    sorted(tokens, key=lambda event: event.index),
                    sorted(expected_tokens, key=lambda event: event.index),
                    strict=True,
                )
                if event.logprob is not None
            ]
            assert all(abs(logprob - other) < 1e-3 for logprob, other in logprob_pairs)
        else:
            assert isinstance(events[-1], FinishEvent)
            assert events[-1].last
            expected_pairs = [(event.index, event.token) for event in expected_tokens]
            assert all((event.index, event.token) in expected_pairs for event in tokens)
    assert len(cancelled) > 5


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    name=st.sampled_from(FAMILIES),
    rows=st.integers(5, 40),
    page_size=st.integers(1, 9),
    extra_pages=st.integers(0, 40),
    chunk_size=st.integers(1, 40),
    prefix_caching=st.booleans(),
)
def test_whatever_the_rows_and_pages(seed, name, rows, page_size, extra_pages, chunk_size, prefix_caching):
    model = build_model(name)
    requests = random_requests(14, seed=seed, prompts=0.25, source=model.design.is_encoder_decoder)
    pages = -(-70 // page_size) + extra_pages  # enough for the largest of them alone
    engine = ContinuousBatchingEngine(
        model,
        max_num_seqs=rows,
        pages=pages,
        page_size=page_size,
        source_pages=pages,
        prefill_chunk_size=chunk_size,
        enable_prefix_caching=prefix_caching,
    )
    received, expected = run_engine(engine, requests), run_sequentially(model, requests)
    assert list(map(outcome, received)) == list(map(outcome, expected))
    assert all(
        same_result(events[-1], expected_events[-1])
        for request, events, expected_events in zip(requests, received, expected, strict=True)
        if isinstance(request, PromptRequest)
    )
    assert is_idle(engine)


def train_copying_model(steps: int = 200):
    """A model that has learned to copy its source of five tokens, and its last loss."""
    stacks = {"encoder": kl.StackDesign(1, (kl.full,)), "decoder": kl.StackDesign(1, (kl.causal,))}
    design = kl.presets.small(kl.presets.bart).but(vocab=40, dim=32, heads=2, dropout=0.0, **stacks)
    generator = torch.Generator().manual_seed(0)
    model = kl.build(design, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        source = torch.randint(3, 40, (64, 5), generator=generator)
        inputs = torch.cat([torch.ones(64, 1, dtype=torch.long), source], 1)
        labels = torch.cat([source, torch.full((64, 1), 2)], 1)
        loss = torch.nn.functional.cross_entropy(model(source, inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), float(loss.detach())


def test_what_one_said_is_never_in_the_answer_to_another():
    model, loss = train_copying_model()
    assert loss < 0.1  # it does copy: what leaks would be seen
    rng = random.Random(2)
    canaries = [[rng.randint(3, 39) for _ in range(5)] for _ in range(200)]
    kinds = (
        {},
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.3},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 0.2},
    )
    requests = [
        GenerationRequest(
            canary,
            GenerationConfig(
                max_new_tokens=8, eos_token_id=2, decoder_start_token_id=1, seed=n, **rng.choice(kinds)
            ),
            tenant=Tenant(str(n % 5)),
        )
        for n, canary in enumerate(canaries)
    ]
    engine = ContinuousBatchingEngine(
        model, max_num_seqs=24, pages=20, page_size=8, source_pages=24, prefill_chunk_size=40
    )
    for canary, events in zip(canaries, run_engine(engine, requests), strict=True):
        answers = [event.sequence.tokens for event in events if isinstance(event, FinishEvent)]
        assert all(set(answer) <= {*canary, 2} for answer in answers)
        assert answers[0][:3] == canary[:3]


def test_ten_thousand_aborted_requests_leave_no_page_behind():
    model = build_model("llama3")
    engine = ContinuousBatchingEngine(model, max_num_seqs=64, pages=200, page_size=4, prefill_chunk_size=200)
    rng = random.Random(0)
    handles, num_cancelled = [], 0
    requests = random_requests(200, seed=3, max_new_tokens=30)
    while num_cancelled < 10_000:
        for _ in range(200):
            handle = RequestHandle(rng.choice(requests))
            engine.submit(handle)
            handles.append(handle)
        for _ in range(rng.randint(0, 1)):
            engine.step()
        for handle in handles:
            handle.cancelled = True
        num_cancelled += len(handles)
        handles.clear()
        engine.step()
        assert is_idle(engine)
    engine.scheduler.prefix_cache.clear()
    assert engine.runner.pool.num_free == 200
    assert set(engine.runner.pool.ref_counts) == {0}


def test_prefixes_are_shared_within_a_tenant_and_never_between_two():
    model = build_model("gpt2")
    options = GenerationConfig(max_new_tokens=3)
    tokens = list(range(3, 40))
    engine = ContinuousBatchingEngine(model, page_size=8)
    prefilled = []
    for tenant in ("a", "a", "b", "b", "a"):
        before = engine.prompt_tokens.total()
        run_engine(engine, [GenerationRequest(tokens, options, tenant=Tenant(tenant))])
        prefilled.append(engine.prompt_tokens.total() - before)
    assert prefilled == [36, 4, 36, 4, 4]
    assert {key[0].key for key in engine.scheduler.prefix_cache.entries} == {"a", "b"}
    pages = [
        {page for key, (page, _) in engine.scheduler.prefix_cache.entries.items() if key[0] == name}
        for name in "ab"
    ]
    assert not pages[0] & pages[1]
    other = [*tokens[:12], 5, *tokens[13:]]  # alike for one page and a half
    before = engine.prompt_tokens.total()
    events = run_engine(engine, [GenerationRequest(other, options, tenant=Tenant("a"))])
    assert engine.prompt_tokens.total() - before == 28
    assert outcome(events[0]) == outcome(run_sequentially(model, [GenerationRequest(other, options)])[0])


def test_the_prefix_cache_makes_room_for_requests():
    model, options = build_model("gpt2"), GenerationConfig(max_new_tokens=3)
    engine = ContinuousBatchingEngine(model, page_size=4, pages=12)
    for n in range(8):
        request = GenerationRequest([3 + n, *range(5, 35)], options)
        assert outcome(run_engine(engine, [request])[0]) == outcome(run_sequentially(model, [request])[0])
    assert is_idle(engine)


def test_a_request_that_fails_is_told_and_the_others_go_on():
    model, requests = build_model("llama3"), random_requests(40, seed=8)
    contradictory = GenerationRequest(
        [5, 6, 7], GenerationConfig(max_new_tokens=6, eos_token_id=2, suppress_tokens=list(range(53)))
    )
    out_of_range = GenerationRequest(
        [5, 6, 7], GenerationConfig(max_new_tokens=6, eos_token_id=2, logit_bias={999: 1.0})
    )
    bad_regex = GenerationRequest(
        [5, 6], GenerationConfig(max_new_tokens=6, eos_token_id=2, num_beams=2, regex="(")
    )
    events = run_engine(
        ContinuousBatchingEngine(model, word_tokenizer()),
        [*requests[:20], contradictory, out_of_range, bad_regex, *requests[20:]],
    )
    assert list(map(outcome, events[:20] + events[23:])) == list(
        map(outcome, run_sequentially(model, requests))
    )
    messages = ("no token is left", "token 999 is not one of the 53", "")
    for failed_events, message in zip(events[20:23], messages, strict=True):
        assert failed_events[-1].finish_reason == "invalid"
        assert message in failed_events[-1].message


def test_requests_that_fail_at_once_leave_nothing_behind():
    engine = ContinuousBatchingEngine(build_model("gpt2"))
    contradictory = {"suppress_tokens": list(range(53)), "repetition_penalty": 1.3}
    options = GenerationConfig(max_new_tokens=6, eos_token_id=2, **contradictory)
    events = run_engine(engine, [GenerationRequest([5, 6, 7], options)] * 3)
    assert [request_events[-1].finish_reason for request_events in events] == ["invalid"] * 3
    assert is_idle(engine)


def word_tokenizer():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"w{n}": n for n in range(53)}, unk_token="w0"))


def test_a_request_that_breaks_the_step_itself_is_found(monkeypatch):
    model, requests = build_model("gpt2"), random_requests(12, seed=4)
    engine = ContinuousBatchingEngine(model)
    decode = engine.runner.decode

    def breaking_decode(page_tables, tokens):
        if 37 in tokens:
            raise RuntimeError("secret path /home/someone")
        return decode(page_tables, tokens)

    monkeypatch.setattr(engine.runner, "decode", breaking_decode)
    breaking = GenerationRequest([4, 5, 37], GenerationConfig(max_new_tokens=3))
    events = run_engine(engine, [*requests[:6], breaking, *requests[6:]])
    assert events[6][-1].finish_reason == "failed"
    assert "secret" not in events[6][-1].message
    expected = run_sequentially(model, requests)
    for other_events, expected_events in zip(events[:6] + events[7:], expected, strict=True):
        if other_events[-1].finish_reason != "failed":  # unless it generates 37 itself
            assert outcome(other_events) == outcome(expected_events)
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tokens=[]), "empty"),
        (dict(tokens=[5] * 400), "memory for 64"),
        (dict(num_beams=9), "9 sequences"),
        (dict(penalty_alpha=0.5), "penalty_alpha"),
        (dict(num_return_sequences=2), "num_return_sequences is 2"),
    ],
)
def test_what_can_never_be_served_is_refused_beforehand(options, message):
    engine = ContinuousBatchingEngine(build_model("llama3"), max_num_seqs=8, pages=8, page_size=8)
    tokens = options.pop("tokens", [3, 4])
    with pytest.raises(ValueError, match=message):
        engine.validate(GenerationRequest(tokens, GenerationConfig(max_new_tokens=4, **options)))


def test_a_prompt_that_leaves_no_room_is_refused():
    engine = ContinuousBatchingEngine(build_model("gpt2"), max_model_len=20)
    with pytest.raises(ValueError, match="could reach 21 tokens, and 20 is the limit"):
        engine.validate(GenerationRequest([3] * 11, GenerationConfig(max_new_tokens=10)))
    with pytest.raises(ValueError, match="leaves no room"):
        engine.validate(
            GenerationRequest([3] * engine.model.design.max_positions, GenerationConfig(max_new_tokens=10))
        )


def test_tenants_take_turns():
    model = build_model("gpt2")
    engine = ContinuousBatchingEngine(model, max_num_seqs=2)
    request = GenerationRequest([3, 4, 5], GenerationConfig(max_new_tokens=5), tenant=Tenant("loud"))
    order = []

    def submit(request, name):
        on_event = lambda event: isinstance(event, FinishEvent) and order.append(name)
        engine.submit(RequestHandle(request, on_event))

    def step():
        for handle, event in engine.step():
            handle.on_event(event)

    for n in range(20):
        submit(request, n)
    for _ in range(3):
        step()
    submit(replace(request, tenant=Tenant("quiet")), "quiet")
    while engine.busy:
        step()
    assert order.index("quiet") <= 4


def test_a_seed_draws_the_same_whatever_the_load():
    model = build_model("llama3")
    request = GenerationRequest(
        [3, 4, 5], GenerationConfig(max_new_tokens=12, do_sample=True, seed=11, num_return_sequences=2)
    )
    alone = run_engine(ContinuousBatchingEngine(model), [request])[0]
    for n in range(3):
        engine = ContinuousBatchingEngine(model, max_num_seqs=20, page_size=4, prefill_chunk_size=9)
        crowded = run_engine(engine, [*random_requests(30, seed=n), request])[-1]
        assert outcome(crowded) == outcome(alone)
