"""Keys share the engine by weight, users what their key gets; a small caller need not wait for others."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.fair_queue import BURST, FairQueue
from keepleft.serving.engine.request import (
    FinishEvent,
    GenerationRequest,
    OverloadedError,
    PromptRequest,
    RequestHandle,
    Tenant,
    TokenEvent,
)
from keepleft.serving.engine.thread import Quota
from serving.engine_harness import outcome, run_sequentially
from serving.test_continuous import build_model, is_idle

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY, SMALL = Tenant("greedy"), Tenant("small")


def generate(tenant, max_new_tokens, **options):
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=2, suppress_tokens=[2], **options)
    return GenerationRequest([3, 4, 5], config, tenant=tenant)


class Driver:
    """An engine stepped by hand, with the step in which each request finished."""

    def __init__(self, engine):
        self.engine = engine
        self.step = 0
        self.finished = {}
        self.tokens = {}
        self.events = {}

    def submit(self, name, request):
        self.engine.validate(request)
        handle = RequestHandle(request, lambda event: self._note(name, event))
        self.engine.submit(handle)
        return handle

    def _note(self, name, event):
        self.events.setdefault(name, []).append(event)
        if isinstance(event, TokenEvent):
            self.tokens[name] = self.tokens.get(name, 0) + 1
        elif event.last:
            self.finished[name] = self.step

    def run(self, steps=10_000, until=None):
        while self.engine.busy and steps > 0 and (until is None or until not in self.finished):
            self.step += 1
            steps -= 1
            for handle, event in self.engine.step():
                handle.on_event(event)


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 4}, {"do_sample": True, "num_return_sequences": 3, "seed": 7}]
)
def test_a_small_caller_gets_a_row_at_once_beside_greedy_ones(options):
    driver = Driver(ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=12, pages=400, page_size=8))
    requests = {n: generate(GREEDY, 24, **options) for n in range(16)}
    for n, request in requests.items():
        driver.submit(n, request)
    driver.run(5)
    before = driver.step
    driver.submit("small", generate(SMALL, 4))
    driver.run(until="small")
    assert driver.finished["small"] - before <= 4 + 2
    driver.run()
    assert is_idle(driver.engine)
    alone = run_sequentially(build_model("gpt2"), list(requests.values()))
    for n, events in zip(requests, alone, strict=True):  # those that were paused went on as if alone
        assert outcome(driver.events[n]) == outcome(events)


def test_a_small_caller_finds_pages_beside_beams_that_take_all_they_can():
    driver = Driver(ContinuousBatchingEngine(build_model("llama3"), max_num_seqs=16, pages=64, page_size=8))
    for n in range(20):
        driver.submit(n, generate(GREEDY, 30, num_beams=4))
    driver.run(3)
    before = driver.step
    driver.submit("small", generate(SMALL, 4))
    driver.run(until="small")
    assert driver.finished["small"] - before <= 4 + 2
    driver.run()
    assert is_idle(driver.engine)
    assert len(driver.finished) == 21


def test_a_long_prompt_is_read_while_others_go_on():
    engine = ContinuousBatchingEngine(build_model("gpt2"), prefill_chunk_size=4, pages=64, page_size=8)
    driver = Driver(engine)
    driver.submit("stream", generate(SMALL, 30))
    driver.run(3)
    driver.submit("score", PromptRequest("score", list(range(3, 43)), tenant=GREEDY))
    driver.submit("embed", PromptRequest("embed", list(range(3, 43)), tenant=GREEDY))
    for _ in range(15):
        tokens = driver.tokens["stream"]
        driver.run(1)
        assert driver.tokens["stream"] == tokens + 1  # in each step
    driver.run()
    assert driver.finished["score"] >= 3 + 40 // 4


def test_a_cancelled_prompt_is_not_read_to_its_end():
    engine = ContinuousBatchingEngine(build_model("gpt2"), prefill_chunk_size=4, pages=64, page_size=8)
    driver = Driver(engine)
    handle = driver.submit("score", PromptRequest("score", list(range(3, 43))))
    driver.run(2)
    handle.cancelled = True
    driver.run()
    assert engine.prompt_tokens.total() == 8
    assert is_idle(engine)


def test_logits_processors_are_charged_by_their_time():
    driver = Driver(ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=2))
    driver.submit("greedy", generate(GREEDY, 20, bad_words_ids=[[5, 6]] * 7))
    driver.submit("small", GenerationRequest([3, 4, 5], GenerationConfig(max_new_tokens=20), tenant=SMALL))
    driver.run()
    usage = driver.engine.scheduler.waiting.key_usage
    assert usage["small"] == 2 + 20  # the prompt but its last token, and the new tokens
    assert usage["greedy"] > usage["small"]


def test_requests_with_slow_processors_decode_in_fewer_steps_beside_a_light_key():
    """A step's time is shared, whether the model takes it or the logits processors of one request."""
    num_tokens = []
    for strategy_seconds in (0.0, 10.0):
        driver = Driver(ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=4))
        scheduler = driver.engine.scheduler
        scheduler.timer.time_strategy = lambda batch: nullcontext()
        driver.submit("greedy", generate(GREEDY, 60))
        driver.submit("small", generate(SMALL, 40))
        driver.run(2)
        scheduler.timer.decode_seconds = {1: 1.0, 2: 1.5}
        scheduler.timer.time_decode = lambda num_rows: nullcontext()
        scheduler.waiting.charge(GREEDY, 2 * BURST)
        for scheduled in scheduler.running:
            if scheduled.tenant == GREEDY:
                scheduled.strategy_seconds = strategy_seconds
        before = driver.tokens["greedy"]
        driver.run(21)
        num_tokens.append(driver.tokens["greedy"] - before)
    assert num_tokens[0] == 21
    assert 1 <= num_tokens[1] <= 3  # each takes as long as 11 steps of the light key


def test_two_keys_share_the_rows_and_weights_count():
    engine = ContinuousBatchingEngine(
        build_model("gpt2"), max_num_seqs=12, pages=400, page_size=8, weights={"heavy": 2.0}
    )
    driver = Driver(engine)
    for n in range(60):
        driver.submit(("light", n), generate(Tenant("light"), 40))
        driver.submit(("heavy", n), generate(Tenant("heavy"), 40))
    driver.run(150)
    tokens = {
        key: sum(count for (name, _), count in driver.tokens.items() if name == key)
        for key in ("light", "heavy")
    }
    assert 1.5 < tokens["heavy"] / tokens["light"] < 2.5
    driver.run()
    assert is_idle(engine)
    assert len(driver.finished) == 120


def count_pauses(engine, monkeypatch, maximum):
    """Fails where one call of `admit` pauses more requests than there are."""
    scheduler = engine.scheduler
    counts = Counter()

    def pause(victim):
        counts[scheduler.num_steps] += 1
        assert counts[scheduler.num_steps] <= maximum, "two requests take the same row from each other"
        type(scheduler)._pause(scheduler, victim)

    monkeypatch.setattr(scheduler, "_pause", pause)
    return counts


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_key_that_was_served_less_does_not_take_the_last_row_of_another(monkeypatch, num_rows):
    engine = ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=8, pages=400, page_size=8)
    driver = Driver(engine)
    options = {"do_sample": True, "num_return_sequences": num_rows, "seed": 7} if num_rows > 1 else {}
    driver.submit("stream", generate(GREEDY, 40))
    driver.run(3)
    engine.scheduler.waiting.charge(GREEDY, 2 * BURST)  # it has had much more
    count_pauses(engine, monkeypatch, 16)
    for n in range(8):
        driver.submit(n, generate(SMALL, 30, **options))
    for _ in range(20):
        driver.run(1)
        assert engine.scheduler.rows_by_tenant[GREEDY] == 1  # it is never paused
    driver.run()
    assert len(driver.finished) == 9
    assert is_idle(engine)


@pytest.mark.parametrize("max_num_seqs", [4, 6, 8])
@pytest.mark.parametrize("usage", [0, BURST / 2, BURST, 5 * BURST])
def test_requests_of_many_rows_do_not_take_turns_for_ever(monkeypatch, max_num_seqs, usage):
    engine = ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=max_num_seqs, pages=400, page_size=8)
    driver = Driver(engine)
    count_pauses(engine, monkeypatch, 30)
    for n in range(30):
        tenant = Tenant("abc"[n % 3])
        rows = [1, 4, 3][n % 3]
        options = {"do_sample": True, "num_return_sequences": rows, "seed": n} if rows > 1 else {}
        driver.submit(n, generate(tenant, 6, **options))
        if n == 15:
            driver.run(4)
            engine.scheduler.waiting.charge(Tenant("a"), usage)
    driver.run(3000)
    assert len(driver.finished) == 30
    assert is_idle(engine)


def test_where_pages_run_short_the_key_that_was_served_most_is_preempted():
    engine = ContinuousBatchingEngine(
        build_model("gpt2"), max_num_seqs=8, pages=20, page_size=4, enable_prefix_caching=False
    )
    driver = Driver(engine)
    for n in range(6):
        driver.submit(n, generate(GREEDY, 40))
    driver.run(12)
    preempted = []
    preempt = engine.scheduler._preempt
    engine.scheduler._preempt = lambda victim: (preempted.append(victim.tenant), preempt(victim))
    driver.submit("small", generate(SMALL, 30))  # less than half of the pages
    driver.run(until="small")
    assert GREEDY in preempted
    assert SMALL not in preempted
    driver.run()
    assert len(driver.finished) == 7
    assert is_idle(engine)


def test_what_is_computed_again_is_not_charged_again():
    engine = ContinuousBatchingEngine(
        build_model("gpt2"), max_num_seqs=8, pages=20, page_size=4, enable_prefix_caching=False
    )
    driver = Driver(engine)
    engine.scheduler.charge = lambda batch: {}  # for decode steps
    for n in range(6):
        driver.submit(n, generate(GREEDY, 40))
    driver.run()
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.waiting.key_usage[GREEDY.key] == 6 * 2  # the last of 3 tokens is decoded


def test_a_new_user_name_buys_nothing_from_other_keys():
    def steps_of_small(users):
        driver = Driver(ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=8, pages=200, page_size=8))
        for n in range(40):
            driver.submit(n, generate(Tenant("greedy", str(n % users)), 30))
        driver.run(3)
        before = driver.step
        for n in range(5):
            driver.submit(("small", n), generate(SMALL, 5))
            driver.run(until=("small", n))
        return driver.step - before

    assert steps_of_small(40) <= steps_of_small(1) + 5


def test_a_user_with_many_requests_leaves_rows_to_another_of_the_same_key():
    driver = Driver(ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=8, pages=200, page_size=8))
    for n in range(40):
        driver.submit(n, generate(Tenant("key", "many"), 50))
    driver.run(3)
    before = driver.step
    driver.submit("one", generate(Tenant("key", "one"), 5))
    driver.run(until="one")
    assert driver.finished["one"] - before <= 5 + 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), min_size=1, max_size=60))
def test_the_queue_gives_everything_back_once_in_order_of_each_user(names):
    queue = FairQueue()
    for n, name in enumerate(names):
        queue.push(Tenant(*name), (name, n))
    assert len(queue) == len(names)
    out = []
    while (item := queue.peek()) is not None:
        assert queue.pop() == item
        queue.charge(Tenant(*item[0]), 1.0)
        out.append(item)
    assert sorted(out, key=lambda item: item[1]) == list(zip(names, range(len(names)), strict=True))
    for name in set(names):
        own = [n for other, n in out if other == name]
        assert own == sorted(own)


def test_idle_time_is_not_saved_up():
    queue = FairQueue()
    for _ in range(100):
        queue.push(Tenant("busy"), "busy")
        queue.pop()
        queue.charge(Tenant("busy"), 1000.0)
    queue.push(Tenant("idle"), "idle")
    queue.push(Tenant("busy"), "busy")
    assert queue.peek() == "idle"
    queue.charge(Tenant("idle"), BURST + 1001)
    assert queue.peek() == "busy"


def test_new_names_do_not_go_before_a_known_one():
    queue = FairQueue()
    old = Tenant("key", "old")
    for _ in range(5):
        queue.push(old, "old")
        queue.pop()
        queue.charge(old, 100.0)
    queue.push(old, "old")
    for n in range(50):
        queue.push(Tenant("key", f"new {n}"), n)
    assert queue.pop() == "old"


def test_many_names_of_one_key_do_not_make_another_forget_its_users():
    queue = FairQueue()
    queue.charge(Tenant("a", "heavy"), 1000)
    queue.charge(Tenant("a", "light"), 1)
    for n in range(5000):
        queue.charge(Tenant("b", str(n)), 1)
    queue.push(Tenant("a", "heavy"), "heavy")
    queue.push(Tenant("a", "light"), "light")
    assert [queue.pop(), queue.pop()] == ["light", "heavy"]


def test_many_names_are_forgotten():
    queue = FairQueue()
    for n in range(10_000):
        tenant = Tenant(str(n % 3000), str(n))
        queue.push(tenant, n)
        queue.pop()
        queue.charge(tenant, 5.0)
    assert len(queue.key_usage) < 1100
    assert sum(map(len, queue.user_usage.values())) < 1100
    assert len(queue.user_clocks) < 1100


def test_one_keys_full_queue_is_nobody_elses():
    quota = Quota(10)
    for n in range(10):
        quota.add(Tenant("greedy", str(n)))
    with pytest.raises(OverloadedError, match="10 requests of yours are in flight already"):
        quota.add(GREEDY)
    quota.add(SMALL)
    quota.remove(Tenant("greedy", "3"))
    quota.add(GREEDY)


def test_one_user_leaves_places_to_the_others_of_its_key():
    quota = Quota(100)
    num_accepted = 80
    for _ in range(num_accepted):
        quota.add(Tenant("key", "many"))
    for _ in range(20):
        try:
            quota.add(Tenant("key", "many"))
        except OverloadedError:
            break
        num_accepted += 1
    assert num_accepted < 100
    quota.add(Tenant("key", "one"))
    for _ in range(num_accepted):
        quota.remove(Tenant("key", "many"))
    quota.remove(Tenant("key", "one"))
    assert not quota.by_key
    assert not quota.by_user


def test_finish_events_have_a_result_only_for_prompts():
    driver = Driver(ContinuousBatchingEngine(build_model("gpt2"), pages=16, page_size=8))
    driver.submit("score", PromptRequest("score", [3, 4, 5, 6], num_context=2))
    driver.submit("text", generate(SMALL, 2))
    driver.run()
    (event,) = driver.events["score"]
    assert isinstance(event, FinishEvent)
    assert [scored.token for scored in event.result] == [5, 6]
    assert driver.events["text"][-1].result is None
