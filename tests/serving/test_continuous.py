"""Many at once: each request gets exactly what it would get alone, whoever comes, goes or fails beside it."""

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
from keepleft.serving.engine.request import FinishEvent, GenerationRequest, RequestHandle, TokenEvent
from serving.engine_harness import alone, asks, run, summed

FAMILIES = ("gpt2", "llama3", "t5", "marian", "windowed", "prefixed")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(name: str, seed: int = 3):
    design = kl.presets.small(
        getattr(kl.presets, {"windowed": "mistral", "prefixed": "llama3"}.get(name, name))
    )
    if name == "windowed":
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & kl.window(4), kl.causal)))
    if name == "prefixed":  # no steady step knows this mask
        design = design.but(decoder=kl.StackDesign(2, (kl.causal & (kl.window(4) | kl.prefix(2)),)))
    design = design.but(vocab=53, dropout=0.0, initial=kl.NormalInit(0.2))
    return kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()


def free(engine: ContinuousBatchingEngine) -> bool:
    """No page is held but by beginnings that are kept for others."""
    counts = engine.stats()
    return (
        counts["pages_used"] == counts["prefix_cache_pages"]
        and not engine.busy
        and not engine.strategy_batches
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_three_hundred_mixed_requests_with_cancellations(name):
    model, some = built(name), asks(300, seed=5)
    wanted = alone(model, some)
    engine = ContinuousBatchingEngine(model, max_num_seqs=48, pages=64, page_size=16, prefill_chunk_size=64)
    dice = random.Random(1)
    told: list[list] = [[] for _ in some]
    tickets = [RequestHandle(ask, events.append) for ask, events in zip(some, told, strict=True)]
    coming, dropped = list(range(300)), set()
    for _ in range(10_000):
        for _ in range(dice.randint(0, 30)):
            if coming:
                engine.submit(tickets[coming.pop(0)])
        if dice.random() < 0.4:
            n = dice.randrange(300)
            if n not in coming and not any(
                isinstance(event, FinishEvent) and event.last for event in told[n]
            ):
                tickets[n].cancelled = True
                dropped.add(n)
        for ticket, event in engine.step():
            ticket.on_event(event)
        if not coming and not engine.busy:
            break
    assert free(engine)
    for n, (events, right) in enumerate(zip(told, wanted, strict=True)):
        if n not in dropped:
            assert summed(events) == summed(right), some[n]
            probable = [
                (event.logprob, right_event.logprob)
                for event, right_event in zip(
                    sorted((e for e in events if isinstance(e, TokenEvent)), key=lambda e: e.index),
                    sorted((e for e in right if isinstance(e, TokenEvent)), key=lambda e: e.index),
                    strict=True,
                )
                if event.logprob is not None
            ]
            assert all(abs(one - other) < 1e-3 for one, other in probable)
        else:
            assert isinstance(events[-1], FinishEvent)
            assert events[-1].last
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            assert all(
                event in [(e.index, e.token) for e in right if isinstance(e, TokenEvent)]
                for event in [(e.index, e.token) for e in tokens]
            )
    assert len(dropped) > 5


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 1000),
    name=st.sampled_from(FAMILIES),
    rows=st.integers(5, 40),
    size=st.integers(1, 9),
    extra=st.integers(0, 40),
    chunk=st.integers(1, 40),
    share=st.booleans(),
)
def test_whatever_the_rows_and_pages(seed, name, rows, size, extra, chunk, share):
    model, some = built(name), asks(14, seed=seed)
    pages = -(-70 // size) + extra  # enough for the largest of them alone
    engine = ContinuousBatchingEngine(
        model,
        max_num_seqs=rows,
        pages=pages,
        page_size=size,
        source_pages=pages,
        prefill_chunk_size=chunk,
        enable_prefix_caching=share,
    )
    assert list(map(summed, run(engine, some))) == list(map(summed, alone(model, some)))
    assert free(engine)


def copying(steps: int = 200):
    """A model that has learned to say its source, five tokens, again."""
    one = {"encoder": kl.StackDesign(1, (kl.full,)), "decoder": kl.StackDesign(1, (kl.causal,))}
    design = kl.presets.small(kl.presets.bart).but(vocab=40, dim=32, heads=2, dropout=0.0, **one)
    generator = torch.Generator().manual_seed(0)
    model = kl.build(design, generator=generator)
    learner = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        source = torch.randint(3, 40, (64, 5), generator=generator)
        shown = torch.cat([torch.ones(64, 1, dtype=torch.long), source], 1)
        asked = torch.cat([source, torch.full((64, 1), 2)], 1)
        loss = torch.nn.functional.cross_entropy(model(source, shown).flatten(0, 1), asked.flatten())
        learner.zero_grad()
        loss.backward()
        learner.step()
    return model.eval(), float(loss.detach())


def test_what_one_said_is_never_in_the_answer_to_another():
    model, loss = copying()
    assert loss < 0.1  # it does copy: what leaks would be seen
    dice = random.Random(2)
    canaries = [[dice.randint(3, 39) for _ in range(5)] for _ in range(200)]
    kinds = (
        {},
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.3},
        {"num_return_sequences": 2, "do_sample": True, "temperature": 0.2},
    )
    some = [
        GenerationRequest(
            canary,
            GenerationConfig(
                max_new_tokens=8, eos_token_id=2, decoder_start_token_id=1, seed=n, **dice.choice(kinds)
            ),
            tenant=str(n % 5),
        )
        for n, canary in enumerate(canaries)
    ]
    told = run(
        ContinuousBatchingEngine(
            model, max_num_seqs=24, pages=20, page_size=8, source_pages=24, prefill_chunk_size=40
        ),
        some,
    )
    for canary, events in zip(canaries, told, strict=True):
        answers = [event.sequence.tokens for event in events if isinstance(event, FinishEvent)]
        assert all(set(answer) <= {*canary, 2} for answer in answers)
        assert answers[0][:3] == canary[:3]


def test_ten_thousand_aborted_requests_leave_no_page_behind():
    model = built("llama3")
    engine = ContinuousBatchingEngine(model, max_num_seqs=64, pages=200, page_size=4, prefill_chunk_size=200)
    dice = random.Random(0)
    waiting, gone = [], 0
    some = asks(200, seed=3, limit=30)
    while gone < 10_000:
        for _ in range(200):
            ticket = RequestHandle(dice.choice(some))
            engine.submit(ticket)
            waiting.append(ticket)
        for _ in range(dice.randint(0, 1)):
            engine.step()
        for ticket in waiting:
            ticket.cancelled = True
        gone += len(waiting)
        waiting.clear()
        engine.step()
        assert free(engine)
    engine.prefix_cache.clear()
    assert engine.runner.pool.num_free == 200
    assert set(engine.runner.pool.ref_counts) == {0}


def test_beginnings_are_shared_within_a_tenant_and_never_between_two():
    model = built("gpt2")
    said = GenerationConfig(max_new_tokens=3)
    text = list(range(3, 40))
    engine = ContinuousBatchingEngine(model, page_size=8)
    read = []
    for tenant in ("a", "a", "b", "b", "a"):
        before = engine.prompt_tokens_total
        run(engine, [GenerationRequest(text, said, tenant=tenant)])
        read.append(engine.prompt_tokens_total - before)
    assert read == [36, 4, 36, 4, 4]
    assert {key[0] for key in engine.prefix_cache.entries} == {"a", "b"}
    pages = [
        {page for key, (page, _) in engine.prefix_cache.entries.items() if key[0] == name} for name in "ab"
    ]
    assert not pages[0] & pages[1]
    other = [*text[:12], 5, *text[13:]]  # alike for one page and a half
    before = engine.prompt_tokens_total
    events = run(engine, [GenerationRequest(other, said, tenant="a")])
    assert engine.prompt_tokens_total - before == 28
    assert summed(events[0]) == summed(alone(model, [GenerationRequest(other, said)])[0])


def test_kept_beginnings_make_room_for_who_needs_it():
    model, said = built("gpt2"), GenerationConfig(max_new_tokens=3)
    engine = ContinuousBatchingEngine(model, page_size=4, pages=12)
    for n in range(8):
        text = [3 + n, *range(5, 35)]
        assert summed(run(engine, [GenerationRequest(text, said)])[0]) == summed(
            alone(model, [GenerationRequest(text, said)])[0]
        )
    assert free(engine)


def test_one_that_fails_is_told_and_the_others_go_on():
    model, some = built("llama3"), asks(40, seed=8)
    bad = GenerationRequest(
        [5, 6, 7], GenerationConfig(max_new_tokens=6, eos_token_id=2, suppress_tokens=list(range(53)))
    )
    worse = GenerationRequest(
        [5, 6, 7], GenerationConfig(max_new_tokens=6, eos_token_id=2, logit_bias={999: 1.0})
    )
    rude = GenerationRequest(
        [5, 6], GenerationConfig(max_new_tokens=6, eos_token_id=2, num_beams=2, regex="(")
    )
    told = run(ContinuousBatchingEngine(model, word_tokens()), [*some[:20], bad, worse, rude, *some[20:]])
    assert list(map(summed, told[:20] + told[23:])) == list(map(summed, alone(model, some)))
    for events, words in zip(
        told[20:23], ("no token is left", "token 999 is not one of the 53", ""), strict=True
    ):
        assert events[-1].finish_reason == "invalid"
        assert words in events[-1].message


def word_tokens():
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"w{n}": n for n in range(53)}, unk_token="w0"))


def test_one_that_breaks_the_step_itself_is_found(monkeypatch):
    model, some = built("gpt2"), asks(12, seed=4)
    engine = ContinuousBatchingEngine(model)
    step = engine.runner.decode

    def breaks(leaves, tokens):
        if 37 in tokens.tolist():
            raise RuntimeError("secret path /home/someone")
        return step(leaves, tokens)

    monkeypatch.setattr(engine.runner, "decode", breaks)
    cursed = GenerationRequest([4, 5, 37], GenerationConfig(max_new_tokens=3))
    told = run(engine, [*some[:6], cursed, *some[6:]])
    assert told[6][-1].finish_reason == "failed"
    assert "secret" not in told[6][-1].message
    rest = alone(model, some)
    for events, right in zip(told[:6] + told[7:], rest, strict=True):
        if events[-1].finish_reason != "failed":  # unless it says 37 itself
            assert summed(events) == summed(right)
    assert free(engine)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (dict(tokens=[]), "empty"),
        (dict(tokens=[5] * 400), "memory for 64"),
        (dict(num_beams=9), "9 texts"),
        (dict(penalty_alpha=0.5), "penalty_alpha"),
        (dict(num_return_sequences=2), "num_return_sequences is 2"),
    ],
)
def test_what_can_never_be_served_is_refused_beforehand(said, words):
    engine = ContinuousBatchingEngine(built("llama3"), max_num_seqs=8, pages=8, page_size=8)
    tokens = said.pop("tokens", [3, 4])
    with pytest.raises(ValueError, match=words):
        engine.validate(GenerationRequest(tokens, GenerationConfig(max_new_tokens=4, **said)))


def test_a_prompt_that_leaves_no_room_is_refused():
    engine = ContinuousBatchingEngine(built("gpt2"), max_model_len=20)
    with pytest.raises(ValueError, match="could reach 21 tokens, and 20 is the limit"):
        engine.validate(GenerationRequest([3] * 11, GenerationConfig(max_new_tokens=10)))
    with pytest.raises(ValueError, match="leaves no room"):
        engine.validate(
            GenerationRequest([3] * engine.model.design.max_positions, GenerationConfig(max_new_tokens=10))
        )


def test_tenants_take_turns():
    model = built("gpt2")
    engine = ContinuousBatchingEngine(model, max_num_seqs=2)
    many = [
        GenerationRequest([3, 4, 5], GenerationConfig(max_new_tokens=5), tenant="loud") for _ in range(20)
    ]
    order = []
    for n, ask in enumerate(many):
        engine.submit(
            RequestHandle(ask, lambda event, n=n: isinstance(event, FinishEvent) and order.append(n))
        )
    for _ in range(3):
        for ticket, event in engine.step():
            ticket.on_event(event)
    engine.submit(
        RequestHandle(
            replace(many[0], tenant="quiet"),
            lambda event: isinstance(event, FinishEvent) and order.append("quiet"),
        )
    )
    while engine.busy:
        for ticket, event in engine.step():
            ticket.on_event(event)
    assert order.index("quiet") <= 4


def test_a_seed_draws_the_same_whatever_the_load():
    model = built("llama3")
    ask = GenerationRequest(
        [3, 4, 5], GenerationConfig(max_new_tokens=12, do_sample=True, seed=11, num_return_sequences=2)
    )
    quiet = run(ContinuousBatchingEngine(model), [ask])[0]
    for n in range(3):
        others = asks(30, seed=n)
        assert summed(
            run(
                ContinuousBatchingEngine(model, max_num_seqs=20, page_size=4, prefill_chunk_size=9),
                [*others, ask],
            )[-1]
        ) == summed(quiet)
