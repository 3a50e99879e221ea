"""Large responses and fast streams leave the event loop, and the memory, to others."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

import keepleft as kl
from keepleft.serving.engine.request import FinishEvent, GenerationRequest, TokenEvent
from keepleft.serving.engine.sequential import SequentialEngine
from keepleft.serving.http import engine_requests as engine_requests_module
from keepleft.serving.http import service as service_module
from keepleft.serving.http.app import make_app
from keepleft.serving.http.engine_requests import MAX_BACKLOG, MAX_BLOCKED_SECONDS, EngineRequests
from keepleft.serving.http.errors import APIError
from keepleft.serving.http.json_pieces import (
    ASCII_ENCODER,
    MAX_PIECE_VALUES,
    RESPONSE_ENCODER,
    encode_json,
    json_pieces,
)
from keepleft.serving.http.limits import Limits
from serving.test_http_misbehaving_clients import Stuck
from serving.tiny_services import client, decoder, encoder, service, talker, translator

pytestmark = pytest.mark.usefixtures("one_thread")
MESSAGES = [{"role": "user", "content": "hi"}]
ECHO = {"prompt": [[5] * 20, [6] * 10], "echo": True, "max_tokens": 2, "temperature": 0}


# JSON in pieces ----------------------------------------------------------------------------------------

TOKEN = {"token": "é\u2028", "logprob": -1.25, "top_logprobs": [{"token": '"', "bytes": [1, 2]}] * 20}
VALUES = {
    "small": {"a": [1, None, True, {}], "b": []},
    "long list": list(range(3001)),
    "list of small objects": [TOKEN] * 700,
    "list of large objects": {"choices": [{"content": [TOKEN] * 200, "text": "a"}] * 3, "usage": {"n": 1}},
    "object with many fields": {f"field {n}": [n] for n in range(2000)},
    "text": "a" * 100_000,
}


class CountingEncoder(json.JSONEncoder):
    """Notes how many values each call encodes."""

    def encode(self, o):
        self.counts.append(count_values(o))
        return super().encode(o)


def count_values(value):
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return len(elements) + sum(map(count_values, elements))


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("encoder", [RESPONSE_ENCODER, ASCII_ENCODER])
def test_json_in_pieces_is_the_same_json(name, encoder):
    assert encode_json(VALUES[name], encoder) == encoder.encode(VALUES[name]).encode()


@pytest.mark.parametrize("name", VALUES)
def test_no_piece_has_many_values(name):
    encoder = CountingEncoder()
    encoder.counts = []
    assert json.loads("".join(json_pieces(VALUES[name], encoder))) == VALUES[name]
    assert max(encoder.counts) <= MAX_PIECE_VALUES


def test_a_generator_is_a_list():
    value = {"data": (part for part in ([1] * 2000, {"a": 2})), "none": (part for part in ()), "b": 1}
    assert json.loads(encode_json(value)) == {"data": [[1] * 2000, {"a": 2}], "none": [], "b": 1}


def test_a_response_never_holds_a_value_that_json_does_not_have():
    with pytest.raises(ValueError, match="JSON compliant"):
        encode_json([1.0] * 2000 + [float("nan")])


# the number of logprobs --------------------------------------------------------------------------------

EXCESSES = {  # a body, the number of its logprobs, and the route where it is not /v1/completions
    "echo": ({**ECHO, "logprobs": 3}, (22 + 12) * 4),
    "n": ({**ECHO, "logprobs": 0, "n": 4}, 4 * (22 + 12)),
    "a stream": ({**ECHO, "logprobs": 3, "stream": True}, (22 + 12) * 4),
    "no echo": ({**ECHO, "logprobs": 3, "echo": False}, 2 * 2 * 4),
    "best_of": ({"prompt": "a", "max_tokens": 3, "logprobs": 1, "n": 1, "best_of": 5}, 5 * 3 * 2),
    "chat": (
        {"messages": MESSAGES, "max_tokens": 3, "n": 2, "logprobs": True, "top_logprobs": 4},
        2 * 3 * 5,
        "/v1/chat/completions",
    ),
    "score": ({"input": ["abcd", "efg"]}, 7, "/v1/score"),
}


@pytest.mark.parametrize("name", EXCESSES)
def test_more_logprobs_than_the_limit_are_refused_before_any_work(name):
    body, num_logprobs, *path = EXCESSES[name]
    path = path[0] if path else "/v1/completions"
    with client(talker(), limits=Limits(reported_logprobs=num_logprobs - 1)) as http_client:
        answer = http_client.post(path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "too_large"
        assert f" {num_logprobs} " in answer.json()["error"]["message"]
        assert not http_client.service.engine_thread.num_steps
    with client(talker(), limits=Limits(reported_logprobs=num_logprobs)) as http_client:
        assert http_client.post(path, json=body).status_code == 200


def test_without_logprobs_there_is_nothing_to_count():
    with client(decoder(), limits=Limits(reported_logprobs=1)) as http_client:
        assert http_client.post("/v1/completions", json={**ECHO, "n": 4}).status_code == 200


# threads -----------------------------------------------------------------------------------------------

ROUTES = {  # a model, the route and a body
    "completions": (decoder, "/v1/completions", {**ECHO, "logprobs": 2, "n": 2}),
    "stream": (decoder, "/v1/completions", {**ECHO, "logprobs": 2, "n": 2, "stream": True}),
    "chat": (talker, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "logprobs": True}),
    "chat stream": (
        talker,
        "/v1/chat/completions",
        {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "stream": True},
    ),
    "score": (decoder, "/v1/score", {"input": ["abcd", "efg"]}),
    "embeddings": (encoder, "/v1/embeddings", {"input": ["a", "b"]}),
    "classify": (lambda: encoder(kl.ClassificationHead(3)), "/v1/classify", {"input": ["a", "b"]}),
    "translate": (translator, "/v1/translate", {"input": ["a", "b"], "max_new_tokens": 3}),
}


def comparable(answer):
    """Without what differs from one response to the next."""
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n")]
    values = [json.loads(event) for event in events if event.startswith("{")]
    return [{key: value for key, value in event.items() if key not in ("id", "created")} for event in values]


@pytest.mark.parametrize("name", ROUTES)
def test_a_large_response_is_built_in_a_thread_and_a_small_one_is_not(name, monkeypatch):
    load, path, body = ROUTES[name]
    body = {**body, "seed": 1} if path in ("/v1/completions", "/v1/chat/completions") else body
    with client(load()) as http_client:
        inline = http_client.post(path, json=body)
        assert inline.status_code == 200, inline.text
        assert not http_client.service.responses.threads
        monkeypatch.setattr(service_module, "MIN_VALUES_FOR_THREAD", 0)
        answer = http_client.post(path, json=body)
        assert http_client.service.responses.threads
        assert comparable(answer) == comparable(inline)
        assert answer.headers["content-type"] == inline.headers["content-type"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_event_loop_encodes_no_more_than_a_little_json(stream, monkeypatch):
    num_values = []
    encode = json.JSONEncoder.encode

    def encode_and_count(encoder, value):
        if threading.current_thread().name != "keepleft responding":
            num_values.append(count_values(value))
        return encode(encoder, value)

    body = {"prompt": [5] * 60, "echo": True, "logprobs": 20, "n": 8, "temperature": 0, "max_tokens": 1}
    with client(decoder()) as http_client:
        monkeypatch.setattr(service_module, "MIN_VALUES_FOR_THREAD", 200)
        monkeypatch.setattr(json.JSONEncoder, "encode", encode_and_count)
        answer = http_client.post("/v1/completions", json={**body, "stream": stream})
        monkeypatch.undo()
    assert len(answer.content) > 100_000
    assert max(num_values, default=0) < 200


# streams -----------------------------------------------------------------------------------------------


def queue_events(engine_requests, number):
    for n in range(number):
        engine_requests.put(0, TokenEvent(0, n))


def submit(engine_requests):
    options = kl.GenerationConfig(max_new_tokens=4)
    engine_requests.submit([GenerationRequest([5, 6], options)])


def test_other_tasks_have_their_turn_while_a_full_queue_is_read():
    num_turns = 0

    async def count_turns():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def read():
        engine_requests = EngineRequests(running_service.engine_thread)
        submit(engine_requests)
        queue_events(engine_requests, 50)
        engine_requests.put(0, FinishEvent(0, "length", last=True))
        counter = asyncio.ensure_future(count_turns())
        async for _ in engine_requests.events():
            time.sleep(engine_requests_module.TURN_SECONDS)  # formats the token, sends it at once
        counter.cancel()

    with service(decoder(), Stuck) as running_service:
        asyncio.run(read())
    assert num_turns >= 40


def test_a_backlog_is_cancelled_only_where_the_client_does_not_read():
    async def read():
        engine_requests = EngineRequests(running_service.engine_thread)
        submit(engine_requests)
        (handle,) = engine_requests.handles
        now = asyncio.get_running_loop().time()
        queue_events(engine_requests, MAX_BACKLOG + 10)  # the event loop is behind, not the client
        assert not handle.cancelled
        engine_requests.blocked_since = now - MAX_BLOCKED_SECONDS / 2
        queue_events(engine_requests, 10)
        assert not handle.cancelled
        engine_requests.blocked_since = now - 2 * MAX_BLOCKED_SECONDS
        queue_events(engine_requests, 10)
        assert handle.cancelled
        assert engine_requests.queue.empty()  # and stays so
        with pytest.raises(APIError, match="read the stream faster") as raised:
            async for _ in engine_requests.events():
                pass
        assert raised.value.code == "client_too_slow"

    with service(decoder(), Stuck) as running_service:
        asyncio.run(read())


def test_a_blocked_client_with_a_short_backlog_is_waited_for():
    async def read():
        engine_requests = EngineRequests(running_service.engine_thread)
        submit(engine_requests)
        engine_requests.blocked_since = asyncio.get_running_loop().time() - 2 * MAX_BLOCKED_SECONDS
        queue_events(engine_requests, MAX_BACKLOG)
        assert engine_requests.queue.qsize() == MAX_BACKLOG
        assert not engine_requests.handles[0].cancelled

    with service(decoder(), Stuck) as running_service:
        asyncio.run(read())


def test_a_stream_that_nobody_reads_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(engine_requests_module, "MAX_BACKLOG", 20)
    monkeypatch.setattr(engine_requests_module, "MAX_BLOCKED_SECONDS", 0.01)
    body = json.dumps(
        {"prompt": "a", "max_tokens": 400, "min_new_tokens": 400, "temperature": 0, "stream": True}
    )
    received = bytearray()
    lines = []

    async def ask(app, engine_thread):
        messages = [{"type": "http.request", "body": body.encode(), "more_body": False}]

        async def receive():
            return messages.pop() if messages else await asyncio.Future()

        async def send(message):
            received.extend(message.get("body", b""))
            async with asyncio.timeout(30):
                while received and engine_thread.in_flight:  # reads nothing while anything is generated
                    await asyncio.sleep(0.01)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(body)).encode()))
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": headers, "query_string": b"", "http_version": "1.1", "scheme": "http"}
        await app({**scope, "state": {}}, receive, send)

    with service(decoder(), SequentialEngine) as running_service:
        app = make_app(running_service, log=lambda level, fields: lines.append(fields))
        asyncio.run(ask(app, running_service.engine_thread))
    *_, cancelled, error, rest = bytes(received).decode().split("\n\n")
    assert json.loads(cancelled.removeprefix("data: "))["choices"][0]["finish_reason"] == "cancelled"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "client_too_slow"
    assert not rest
    assert lines[0]["ended"] == "client_too_slow"
    assert lines[0]["completion_tokens"] < 400
