"""Many at once: each request gets exactly what it would get alone, whoever comes, goes or fails beside it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import keepleft as kl
from keepleft.decoding.options import Options
from keepleft.serving.asks import Ask, End, Ticket, Token
from keepleft.serving.together import Together
from serving.scenes import alone, asks, run, summed

FAMILIES = ("gpt2", "llama3", "t5", "marian", "windowed", "prefixed")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(name: str, seed: int = 3):
    design = kl.presets.small(getattr(kl.presets, {"windowed": "mistral", "prefixed": "llama3"}.get(name, name)))
    if name == "windowed":
        design = design.but(decoder=kl.Stack(2, (kl.causal & kl.window(4), kl.causal)))
    if name == "prefixed":  # no steady step knows this mask
        design = design.but(decoder=kl.Stack(2, (kl.causal & (kl.window(4) | kl.prefix(2)),)))
    design = design.but(vocab=53, dropout=0.0, initial=kl.Normal(0.2))
    return kl.build(design, generator=torch.Generator().manual_seed(seed)).eval()


def free(engine: Together) -> bool:
    """No page is held but by beginnings that are kept for others."""
    counts = engine.counts()
    return counts["pages_used"] == counts["pages_kept"] and not engine.busy and not engine.groups


@pytest.mark.parametrize("name", FAMILIES)
def test_three_hundred_mixed_requests_with_cancellations(name):
    model, some = built(name), asks(300, seed=5)
    wanted = alone(model, some)
    engine, dice = Together(model, rows=48, pages=64, size=16, chunk=64), random.Random(1)
    told: list[list] = [[] for _ in some]
    tickets = [Ticket(ask, events.append) for ask, events in zip(some, told, strict=True)]
    coming, dropped = list(range(300)), set()
    for _ in range(10_000):
        for _ in range(dice.randint(0, 30)):
            if coming:
                engine.take(tickets[coming.pop(0)])
        if dice.random() < 0.4:
            n = dice.randrange(300)
            if n not in coming and not any(isinstance(event, End) and event.last for event in told[n]):
                tickets[n].dropped = True
                dropped.add(n)
        for ticket, event in engine.step():
            ticket.hear(event)
        if not coming and not engine.busy:
            break
    assert free(engine)
    for n, (events, right) in enumerate(zip(told, wanted, strict=True)):
        if n not in dropped:
            assert summed(events) == summed(right), some[n]
            probable = [(event.logprob, right_event.logprob) for event, right_event in
                        zip(sorted((e for e in events if isinstance(e, Token)), key=lambda e: e.text),
                            sorted((e for e in right if isinstance(e, Token)), key=lambda e: e.text), strict=True)
                        if event.logprob is not None]
            assert all(abs(one - other) < 1e-3 for one, other in probable)
        else:
            assert isinstance(events[-1], End)
            assert events[-1].last
            tokens = [event for event in events if isinstance(event, Token)]
            assert all(event in [(e.text, e.token) for e in right if isinstance(e, Token)]
                       for event in [(e.text, e.token) for e in tokens])
    assert len(dropped) > 5


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), name=st.sampled_from(FAMILIES), rows=st.integers(5, 40), size=st.integers(1, 9),
       extra=st.integers(0, 40), chunk=st.integers(1, 40), share=st.booleans())
def test_whatever_the_rows_and_pages(seed, name, rows, size, extra, chunk, share):
    model, some = built(name), asks(14, seed=seed)
    pages = -(-70 // size) + extra  # enough for the largest of them alone
    engine = Together(model, rows=rows, pages=pages, size=size, source_pages=pages, chunk=chunk, share=share)
    assert list(map(summed, run(engine, some))) == list(map(summed, alone(model, some)))
    assert free(engine)


def copying(steps: int = 200):
    """A model that has learned to say its source, five tokens, again."""
    one = {"encoder": kl.Stack(1, (kl.full,)), "decoder": kl.Stack(1, (kl.causal,))}
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
    kinds = ({}, {"num_beams": 3}, {"do_sample": True, "temperature": 0.3},
             {"num_return_sequences": 2, "do_sample": True, "temperature": 0.2})
    some = [Ask(canary, Options(max_new_tokens=8, eos_token_id=2, decoder_start_token_id=1, seed=n, **dice.choice(kinds)),
                tenant=str(n % 5)) for n, canary in enumerate(canaries)]
    told = run(Together(model, rows=24, pages=20, size=8, source_pages=24, chunk=40), some)
    for canary, events in zip(canaries, told, strict=True):
        answers = [event.written.tokens for event in events if isinstance(event, End)]
        assert all(set(answer) <= {*canary, 2} for answer in answers)
        assert answers[0][:3] == canary[:3]


def test_ten_thousand_aborted_requests_leave_no_page_behind():
    model = built("llama3")
    engine, dice = Together(model, rows=64, pages=200, size=4, chunk=200), random.Random(0)
    waiting, gone = [], 0
    some = asks(200, seed=3, limit=30)
    while gone < 10_000:
        for _ in range(200):
            ticket = Ticket(dice.choice(some))
            engine.take(ticket)
            waiting.append(ticket)
        for _ in range(dice.randint(0, 1)):
            engine.step()
        for ticket in waiting:
            ticket.dropped = True
        gone += len(waiting)
        waiting.clear()
        engine.step()
        assert free(engine)
    engine.beginnings.forget()
    assert engine.paged.pool.free == 200
    assert set(engine.paged.pool.holders) == {0}


def test_beginnings_are_shared_within_a_tenant_and_never_between_two():
    model = built("gpt2")
    said = Options(max_new_tokens=3)
    text = list(range(3, 40))
    engine = Together(model, size=8)
    read = []
    for tenant in ("a", "a", "b", "b", "a"):
        before = engine.read
        run(engine, [Ask(text, said, tenant=tenant)])
        read.append(engine.read - before)
    assert read == [36, 4, 36, 4, 4]
    assert {key[0] for key in engine.beginnings.known} == {"a", "b"}
    pages = [{page for key, (page, _) in engine.beginnings.known.items() if key[0] == name} for name in "ab"]
    assert not pages[0] & pages[1]
    other = [*text[:12], 5, *text[13:]]  # alike for one page and a half
    before = engine.read
    events = run(engine, [Ask(other, said, tenant="a")])
    assert engine.read - before == 28
    assert summed(events[0]) == summed(alone(model, [Ask(other, said)])[0])


def test_kept_beginnings_make_room_for_who_needs_it():
    model, said = built("gpt2"), Options(max_new_tokens=3)
    engine = Together(model, size=4, pages=12)
    for n in range(8):
        text = [3 + n, *range(5, 35)]
        assert summed(run(engine, [Ask(text, said)])[0]) == summed(alone(model, [Ask(text, said)])[0])
    assert free(engine)


def test_one_that_fails_is_told_and_the_others_go_on():
    model, some = built("llama3"), asks(40, seed=8)
    bad = Ask([5, 6, 7], Options(max_new_tokens=6, eos_token_id=2, suppress_tokens=list(range(53))))
    worse = Ask([5, 6, 7], Options(max_new_tokens=6, eos_token_id=2, logit_bias={999: 1.0}))
    rude = Ask([5, 6], Options(max_new_tokens=6, eos_token_id=2, num_beams=2, regex="("))
    told = run(Together(model, word_tokens()), [*some[:20], bad, worse, rude, *some[20:]])
    assert list(map(summed, told[:20] + told[23:])) == list(map(summed, alone(model, some)))
    for events, words in zip(told[20:23], ("no token is left", "token 999 is not one of the 53", ""), strict=True):
        assert events[-1].why == "refused"
        assert words in events[-1].message


def word_tokens():
    from tokenizers import Tokenizer, models
    return Tokenizer(models.WordLevel({f"w{n}": n for n in range(53)}, unk_token="w0"))


def test_one_that_breaks_the_step_itself_is_found(monkeypatch):
    model, some = built("gpt2"), asks(12, seed=4)
    engine = Together(model)
    step = engine.paged.step

    def breaks(leaves, tokens):
        if 37 in tokens.tolist():
            raise RuntimeError("secret path /home/someone")
        return step(leaves, tokens)

    monkeypatch.setattr(engine.paged, "step", breaks)
    cursed = Ask([4, 5, 37], Options(max_new_tokens=3))
    told = run(engine, [*some[:6], cursed, *some[6:]])
    assert told[6][-1].why == "failed"
    assert "secret" not in told[6][-1].message
    rest = alone(model, some)
    for events, right in zip(told[:6] + told[7:], rest, strict=True):
        if events[-1].why != "failed":  # unless it says 37 itself
            assert summed(events) == summed(right)
    assert free(engine)


@pytest.mark.parametrize(("said", "words"), [
    (dict(tokens=[]), "empty"), (dict(tokens=[5] * 400), "memory for 64"), (dict(num_beams=9), "9 texts"),
    (dict(penalty_alpha=0.5), "penalty_alpha"), (dict(num_return_sequences=2), "num_return_sequences is 2")])
def test_what_can_never_be_served_is_refused_beforehand(said, words):
    engine = Together(built("llama3"), rows=8, pages=8, size=8)
    tokens = said.pop("tokens", [3, 4])
    with pytest.raises(ValueError, match=words):
        engine.look(Ask(tokens, Options(max_new_tokens=4, **said)))


def test_a_prompt_that_leaves_no_room_is_refused():
    engine = Together(built("gpt2"), longest=20)
    with pytest.raises(ValueError, match="could reach 21 tokens, and 20 is the limit"):
        engine.look(Ask([3] * 11, Options(max_new_tokens=10)))
    with pytest.raises(ValueError, match="leaves no room"):
        engine.look(Ask([3] * engine.model.design.longest, Options(max_new_tokens=10)))


def test_tenants_take_turns():
    model = built("gpt2")
    engine = Together(model, rows=2)
    many = [Ask([3, 4, 5], Options(max_new_tokens=5), tenant="loud") for _ in range(20)]
    order = []
    for n, ask in enumerate(many):
        engine.take(Ticket(ask, lambda event, n=n: isinstance(event, End) and order.append(n)))
    for _ in range(3):
        for ticket, event in engine.step():
            ticket.hear(event)
    engine.take(Ticket(replace(many[0], tenant="quiet"), lambda event: isinstance(event, End) and order.append("quiet")))
    while engine.busy:
        for ticket, event in engine.step():
            ticket.hear(event)
    assert order.index("quiet") <= 4


def test_a_seed_draws_the_same_whatever_the_load():
    model = built("llama3")
    ask = Ask([3, 4, 5], Options(max_new_tokens=12, do_sample=True, seed=11, num_return_sequences=2))
    quiet = run(Together(model), [ask])[0]
    for n in range(3):
        others = asks(30, seed=n)
        assert summed(run(Together(model, rows=20, size=4, chunk=9), [*others, ask])[-1]) == summed(quiet)
