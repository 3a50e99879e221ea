"""The engine of an encoder: in batches what each text gets alone, whoever leaves or fails meanwhile."""

from __future__ import annotations

import random

import pytest
import torch

import keepleft as kl
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.pipelines.predictor import classify_rows, embed_rows
from keepleft.serving.engine.encoder import EncoderEngine
from keepleft.serving.engine.request import (
    FinishEvent,
    GenerationRequest,
    PromptRequest,
    RequestHandle,
    Tenant,
)
from serving.engine_harness import run_engine
from serving.tiny_services import encoder

pytestmark = pytest.mark.usefixtures("one_thread")


def random_rows(count, seed=0):
    rng = random.Random(seed)
    return [[rng.randint(3, 200) for _ in range(rng.randint(1, 30))] for _ in range(count)]


def test_batches_give_each_text_what_it_gets_alone():
    model = encoder(kl.ClassificationHead(3)).model
    engine = EncoderEngine(model, batch_tokens=120)
    rows = random_rows(40)
    requests = [
        PromptRequest("classify" if n % 3 else "embed", row, tenant=Tenant(str(n % 4)))
        for n, row in enumerate(rows)
    ]
    for request, events in zip(requests, run_engine(engine, requests), strict=True):
        (event,) = events
        read = classify_rows if request.task == "classify" else embed_rows
        torch.testing.assert_close(event.result, read(model, [request.tokens])[0], atol=1e-4, rtol=1e-4)
    assert 1 < engine.num_batches < len(rows)
    assert not engine.busy


def test_a_cancelled_text_is_not_computed_and_the_others_are():
    engine = EncoderEngine(encoder().model, batch_tokens=10)
    events = []
    handles = [
        RequestHandle(PromptRequest("embed", [5, 6, 7, 8]), lambda event, n=n: events.append((n, event)))
        for n in range(6)
    ]
    for handle in handles:
        engine.submit(handle)
    engine.step()  # the first two are in the batch
    for n in (0, 1, 4):
        handles[n].cancelled = True
    while engine.busy:
        for handle, event in engine.step():
            handle.on_event(event)
    reasons = {n: event.finish_reason for n, event in events}
    assert reasons == {0: "cancelled", 1: "cancelled", 2: "stop", 3: "stop", 4: "cancelled", 5: "stop"}
    assert engine.num_batches == 3


def test_a_text_that_fails_is_told_and_the_others_go_on(monkeypatch):
    model = encoder().model
    embed = model.embed.forward

    def fail_on_nine(table, tokens, *rest):
        assert not bool((tokens == 9).any())
        return embed(table, tokens, *rest)

    monkeypatch.setattr(model.embed, "forward", fail_on_nine)
    engine = EncoderEngine(model)
    events = run_engine(engine, [PromptRequest("embed", row) for row in ([5, 6], [9, 9], [7])])
    assert [event.finish_reason for (event,) in events] == ["stop", "failed", "stop"]
    assert events[1][0].message == "the request could not be served: AssertionError"
    assert not engine.busy


def test_a_small_caller_does_not_wait_for_a_long_queue():
    engine = EncoderEngine(encoder().model, batch_tokens=64)
    order = []

    def submit(key):
        request = PromptRequest("embed", [5] * 30, tenant=Tenant(key))
        engine.submit(RequestHandle(request, lambda _: order.append(key)))

    for _ in range(50):
        submit("loud")
    engine.step()
    submit("quiet")
    while engine.busy:
        for handle, event in engine.step():
            handle.on_event(event)
    assert order.index("quiet") <= 4


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest([5], GenerationConfig()), "writes no text"),
        (PromptRequest("score", [5, 6]), "writes no text"),
        (PromptRequest("classify", [5, 6]), "no labels"),
        (PromptRequest("embed", []), "no tokens"),
        (PromptRequest("embed", [5] * 1000), "1000 tokens, and the model reads"),
    ],
)
def test_what_it_cannot_do_is_refused(request_, message):
    with pytest.raises(ValueError, match=message):
        EncoderEngine(encoder().model).validate(request_)


def test_after_a_clear_nothing_is_left():
    engine = EncoderEngine(encoder().model)
    engine.submit(RequestHandle(PromptRequest("embed", [5]), lambda event: None))
    engine.step()
    engine.clear()
    assert not engine.busy
    assert engine.step() == []
    (events,) = run_engine(engine, [PromptRequest("embed", [5])])
    assert isinstance(events[0], FinishEvent)
