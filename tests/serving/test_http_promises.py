"""What docs/serving.md promises with a number, a timeout or "at once" holds, by the clock.

A timeout may come late on a busy machine, and never early. Promises with a test elsewhere are not repeated:
bodies and /health in test_http_bodies, weights in test_tenants, exit codes in test_http_serve, how often the
engine is read in test_server_status.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from pathlib import Path

import httpx
import pytest
import torch

import keepleft as kl
from keepleft.cli.serve import serve
from keepleft.pipelines.loading import LoadedModel
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.thread import STATUS_INTERVAL_SECONDS, USER_FACTOR
from keepleft.serving.explorer.audit import ABANDONED_SECONDS, MAX_AUDIT_SECONDS
from keepleft.serving.explorer.beam_tree import MAX_BEAM_TOKENS
from keepleft.serving.explorer.params import MAX_TOKENS
from keepleft.serving.http import server as server_module
from keepleft.serving.http.descriptors import RESERVED_DESCRIPTORS, fit_connections
from keepleft.serving.http.engine_requests import MAX_BACKLOG, MAX_BLOCKED_SECONDS
from keepleft.serving.http.errors import MAX_MESSAGE_LENGTH
from keepleft.serving.http.explorer_process.client import (
    AUDIT_GRACE_SECONDS,
    GRACE_SECONDS,
    HOLD_SECONDS,
    MAX_WORKERS,
    QUESTION_MEMORY,
    ExplorerProcess,
)
from keepleft.serving.http.explorer_process.worker import NICENESS
from keepleft.serving.http.explorer_process.worker_queue import MAX_WAITING
from keepleft.serving.http.explorer_process.worker_source import ForkServer
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.log_writer import CLOSE_SECONDS, MAX_LINES
from keepleft.serving.http.metrics import MAX_RECENT, RECENT_SECONDS
from keepleft.serving.http.middleware import request_log
from keepleft.serving.http.middleware.admission import REFUSAL_SECONDS
from keepleft.serving.http.middleware.auth import TENANT_LABEL_LENGTH
from keepleft.serving.http.middleware.request_log import MAX_METHOD_LENGTH, RequestRecord
from keepleft.serving.http.request_id import MAX_REQUEST_ID_LENGTH
from keepleft.serving.http.routes.server_status import MAX_ADDRESSES, MAX_TENANTS
from keepleft.serving.http.service import MIN_VALUES_FOR_THREAD
from keepleft.serving.http.timeouts import MAX_UNPARSED_BYTES, PIPELINE_SECONDS
from keepleft.serving.http.validated_route import MIN_BYTES_FOR_THREAD
from serving.test_http_connections import GET, ListHandler, answer_to, chunked
from serving.test_http_misbehaving_clients import (
    LONG,
    Flood,
    Stuck,
    connect,
    post,
    read_until_closed,
    request,
    wait_until,
)
from serving.tiny_services import TOKENS, Slow, client, decoder, encoder, running, talker, translator

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
SECONDS = 0.3  # the timeout under test
NEVER = 60.0  # all other timeouts
AT_ONCE = 4.0  # seconds that a busy machine may take for what happens at once
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
ENDLESS_TEMPLATE = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3


class Clock:
    """The seconds that a `with` block takes."""

    def __enter__(self):
        self.start = time.monotonic()
        return self

    def __exit__(self, *_):
        self.elapsed = time.monotonic() - self.start

    def assert_at_once(self):
        assert self.elapsed < AT_ONCE

    def assert_after(self, seconds):
        """Not before this time, apart from the resolution of the clock, and not much later."""
        assert 0.95 * seconds - 0.01 <= self.elapsed < 5 * seconds + 1


# numbers in the text -----------------------------------------------------------------------------------

WORDS = {"a": 1.0, "two": 2.0, "four": 4.0, "five": 5.0, "eight ninths": 8 / 9, "a quarter of a": 0.25}
NUMBERS = [
    ("docs/serving.md", r"a key gets 429 after (a) second", REFUSAL_SECONDS),
    ("docs/serving.md", r"at most (eight ninths) of", USER_FACTOR / (USER_FACTOR + 1)),
    ("docs/serving.md", r"\(nice (\d+)\)", NICENESS),
    ("docs/serving.md", r"Each of up to (four) API keys has a worker", MAX_WORKERS),
    ("docs/serving.md", r"a question that has run for (\d+) seconds while another key waits", HOLD_SECONDS),
    ("docs/serving.md", r"A worker may use (\d+) GiB in addition to the model", QUESTION_MEMORY / (1 << 30)),
    ("docs/serving.md", r"A beam search keeps at most ([\d,]+) tokens", MAX_BEAM_TOKENS),
    ("docs/serving.md", r"up to ([\d,]+) lines wait", MAX_LINES),
    ("docs/serving.md", r"the last lines have (\d+) seconds", CLOSE_SECONDS),
    ("docs/serving.md", r"is ended with its process after (a quarter of a) second", GRACE_SECONDS),
    ("docs/serving.md", r"a question about the audit has (a) minute", AUDIT_GRACE_SECONDS / 60),
    ("docs/serving.md", r"none has asked about it for (\d+) seconds", ABANDONED_SECONDS),
    ("docs/serving.md", r"after (\d+) minutes in any case", MAX_AUDIT_SECONDS / 60),
    ("docs/explorer.md", r"is ended after (\d+) minutes", MAX_AUDIT_SECONDS / 60),
    ("docs/serving.md", r"\(at most (\d+) of all keys\)", MAX_WAITING),
    ("docs/serving.md", r"bodies of (\d+) KiB or more are parsed", MIN_BYTES_FOR_THREAD / 1024),
    ("docs/serving.md", r"message of an error has at most ([\d,]+) characters", MAX_MESSAGE_LENGTH),
    ("docs/serving.md", r"at most (\d+) a second over all connections", 1 / PIPELINE_SECONDS),
    ("docs/serving.md", r"Beyond (\d+) KiB of them", MAX_UNPARSED_BYTES / 1024),
    ("docs/serving.md", r"while more than ([\d,]+) tokens wait", MAX_BACKLOG),
    ("docs/serving.md", r"received nothing for (\d+) seconds while", MAX_BLOCKED_SECONDS),
    ("docs/serving.md", r"chunks of ([\d,]+) values or more are built", MIN_VALUES_FOR_THREAD),
    ("docs/serving.md", r"the first (\d+) characters of the method", MAX_METHOD_LENGTH),
    ("docs/serving.md", r"leaves a reserve of (\d+)", RESERVED_DESCRIPTORS),
    ("docs/serving.md", r"the log says so every (\d+) seconds", server_module.ACCEPT_LOG_SECONDS),
    ("docs/serving.md", r"ended within (five) minutes", RECENT_SECONDS / 60),
    ("docs/serving.md", r"at most the last (\d+)", MAX_RECENT),
    ("docs/serving.md", r"first (\d+) characters of its hash", TENANT_LABEL_LENGTH),
    ("docs/serving.md", r"At most (\d+) are listed", MAX_TENANTS),
    ("docs/serving.md", r"the (\d+) addresses with the most", MAX_ADDRESSES),
    ("docs/serving.md", r"at most (four) times a second", 1 / STATUS_INTERVAL_SECONDS),
    (
        "docs/serving.md",
        r"`--shutdown-timeout` seconds \((\d+)\)",
        signature(serve).parameters["shutdown_timeout"].default,
    ),
    ("docs/serving.md", r"if it is plain: at most (\d+) characters", MAX_REQUEST_ID_LENGTH),
    ("docs/serving.md", r"they are read at most every ([\d.]+) seconds", STATUS_INTERVAL_SECONDS),
    ("docs/serving.md", r"longer than `limits\.step_seconds` \((\d+)\)", Limits().step_seconds),
    ("docs/serving.md", r"\(`idle_seconds`, (\d+)\)", Limits().idle_seconds),
    ("docs/serving.md", r"clients have (\d+) seconds to receive", server_module.GRACEFUL_SHUTDOWN_SECONDS),
    ("docs/serving.md", r"leaves clients (\d+) second", server_module.ABORT_SECONDS),
    ("docs/serving.md", r"has sent more than (\d+) KiB ahead", MAX_UNPARSED_BYTES / 1024),
    ("docs/explorer.md", r"texts of at most ([\d,]+) tokens", MAX_TOKENS),
    ("SECURITY.md", r"up to ([\d,]+) connections are accepted", Limits().connections),
]


@pytest.mark.parametrize(("page", "pattern", "value"), NUMBERS)
def test_numbers_of_the_docs_are_those_of_the_code(page, pattern, value):
    text = " ".join((ROOT / page).read_text("utf-8").split())
    (number,) = re.findall(pattern, text)
    assert (WORDS[number] if number in WORDS else float(number.replace(",", ""))) == pytest.approx(value)


def test_the_recommended_number_of_files_is_enough_for_all_connections():
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    recommended = int(re.findall(r"set ([\d,]+) \(`LimitNOFILE", text)[0].replace(",", ""))
    assert fit_connections(Limits(), recommended, 200) == Limits()
    assert fit_connections(Limits(), 1024, 200) != Limits()  # the usual limit is too low


# limits of size ----------------------------------------------------------------------------------------


def completion(**options):
    return "/v1/completions", {"prompt": "a", "max_tokens": 1, **options}


def padded(size):
    return "/v1/completions", json.dumps(completion()[1]).ljust(size).encode()


def nest(depth):
    """Lists to the innermost, which is empty."""
    value = []
    for _ in range(depth - 1):
        value = [value]
    return value


def chat(size):
    return "/v1/chat/completions", {**CHAT, "messages": CHAT["messages"] * size}


def unbounded_decoder():
    """A decoder without a maximum length."""
    design = kl.presets.small(kl.presets.llama3).but(vocab=TOKENS.get_vocab_size(), position=kl.Sinusoidal())
    model = kl.build(design, generator=torch.Generator().manual_seed(0)).eval()
    return LoadedModel(model, TOKENS)


SIZES = {  # limit: a value, what exceeds it, the status of the refusal, and the model where it is no decoder
    "body": (900, padded, 413),
    "body_memory": (900, padded, 503),
    "elements": (50, lambda size: completion(suppress_tokens=[5] * (size - 6)), 400),
    "containers": (9, lambda size: completion(bad_words_ids=[[5]] * (size - 2)), 400),
    "keys": (20, lambda size: completion(logit_bias={str(n + 3): 1 for n in range(size)}), 400),
    "depth": (7, lambda size: completion(metadata={"a": nest(size - 2)}), 400),
    "prompts": (5, lambda size: completion(prompt=["a"] * size), 400),
    "choices": (6, lambda size: completion(prompt=["a"] * size), 400),
    "n": (3, lambda size: completion(n=size), 400),
    "beams": (3, lambda size: completion(num_beams=size), 400),
    "new_tokens": (7, lambda size: completion(max_tokens=size), 400),
    "logprobs": (3, lambda size: completion(logprobs=size), 400),
    "reported_logprobs": (6, lambda size: completion(max_tokens=size, logprobs=0), 400),
    "context": (13, lambda size: completion(prompt=[5] * size), 400, unbounded_decoder),
    "characters": (50, lambda size: completion(prompt="a" * size), 400),
    "messages": (3, chat, 400, talker),
    "stop_strings": (3, lambda size: completion(stop=["z"] * size), 400),
    "stop_characters": (5, lambda size: completion(stop="z" * size), 400),
    "tokens": (5, lambda size: completion(suppress_tokens=[5] * size), 400),
    "grammar": (11, lambda size: completion(regex="a" * size), 400),
    "inputs": (3, lambda size: ("/v1/embeddings", {"input": ["a"] * size}), 400, encoder),
    "cells": (
        5,
        lambda size: ("/v1/attention", {"input": "a", "heads": [0] * size, "layers": ["*.0.*"]}),
        400,
    ),
    "user": (5, lambda size: completion(user="u" * size), 400),
    "requests": (4, lambda size: completion(prompt=["a"] * size), 429),
    "texts": (4, lambda size: ("/v1/embeddings", {"input": ["a"] * size}), 429),
}


def send(http_client, path, body):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return http_client.post(path, content=content, headers={"content-type": "application/json"})


@pytest.mark.parametrize("name", SIZES)
def test_the_limit_is_accepted_and_one_more_is_refused_at_once_and_before_any_work(name):
    maximum, build, status, *load = SIZES[name]
    load = load[0] if load else decoder
    with client(load(), limits=Limits(**{name: maximum})) as http_client:
        service = http_client.service
        with Clock() as clock:
            answer = send(http_client, *build(maximum + 1))
        assert answer.status_code == status, answer.text
        assert len(answer.json()["error"]["message"]) <= MAX_MESSAGE_LENGTH
        assert ("retry-after" in answer.headers) == (status in (429, 503))
        if status == 429:  # the prompts before the one too many are withdrawn from the queue
            clock.assert_after(REFUSAL_SECONDS)
        else:
            clock.assert_at_once()
            assert not service.engine_thread.num_steps
        assert not service.templates.threads
        assert not service.grammars.threads
        answer = send(http_client, *build(maximum))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2},
        {"num_beams": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["a", "b"]},
        {"suppress_tokens": [5, 6]},
        {"max_tokens": 2},
        {"regex": "ab"},
        {"user": "me"},
    ],
)
def test_a_chat_beyond_a_limit_is_refused_before_its_template_is_rendered(options):
    limits = Limits(n=1, beams=1, logprobs=1, stop_strings=1, tokens=1, new_tokens=1, grammar=1, user=1)
    with client(talker(), limits=limits) as http_client:
        answer = http_client.post("/v1/chat/completions", json={**CHAT, **options})
        assert answer.status_code == 400, answer.text
        assert "at most" in answer.json()["error"]["message"]
        assert not http_client.service.templates.threads


def test_a_translation_takes_as_many_texts_as_promised_and_errors_name_the_input():
    """256, and not the 64 of prompts; more translations of each are another matter."""
    limits = Limits()
    assert (limits.inputs, limits.prompts) == (256, 64)
    translate = lambda http_client, texts, **fields: http_client.post(
        "/v1/translate", json={"input": texts, "max_new_tokens": 1, **fields}
    )
    with client(translator(), max_model_len=64) as http_client:
        answer = translate(http_client, ["a"] * 256)
        assert answer.status_code == 200, answer.text
        assert [entry["index"] for entry in answer.json()["data"]] == list(range(256))
        for texts, fields, param, message in [
            (["a"] * 257, {}, "input", "input has 257 texts: this server allows at most 256"),
            (["a"] * 256, {"num_return_sequences": 2}, "num_return_sequences", "num_return_sequences is 512"),
            (["a", "the sea " * 99], {}, "input", "text 1 of input has"),
            ([], {}, "input", "give at least one text"),
        ]:
            answer = translate(http_client, texts, **fields)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == param
            assert message in error["message"]


def test_a_translation_waits_for_places_of_its_own():
    """More texts than may be in flight are translated one after the other, each as if it were alone."""
    texts = [f"the sea {n}" for n in range(9)]
    body = {"input": texts, "max_new_tokens": 3}
    with client(translator()) as http_client:
        expected = http_client.post("/v1/translate", json=body).json()["data"]
    for limits in (Limits(requests=3), Limits(prompts=1), Limits(requests=1)):
        with client(translator(), limits=limits) as http_client:
            answer = http_client.post("/v1/translate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["data"] == expected


def test_a_blank_text_has_a_blank_translation():
    with client(translator()) as http_client:
        post = lambda texts: http_client.post(
            "/v1/translate", json={"input": texts, "num_return_sequences": 2, "max_new_tokens": 4}
        ).json()
        answer = post(["the sea", "", " \n", "a ship", "\u3000"])
        together = post(["the sea", "a ship"])
        data = answer["data"]
        assert [entry["index"] for entry in data] == [0, 1, 2, 3, 4]
        assert [data[0]["n_best"], data[3]["n_best"]] == [entry["n_best"] for entry in together["data"]]
        blank = {"text": "", "score": 0.0, "finish_reason": "stop"}
        for n in (1, 2, 4):
            assert data[n] == {**blank, "index": n, "n_best": [blank]}
        assert answer["usage"] == together["usage"]
        nothing = post([""])
        assert nothing["data"][0]["text"] == ""
        assert nothing["usage"] == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        assert post("")["data"] == nothing["data"]


def get_with_headers(port, size):
    padding = b"x-long: " + b"a" * (size - len(GET) - len(b"x-long: \r\n")) + b"\r\n"
    return answer_to(port, GET[:-2] + padding + b"\r\n")[0]


def post_chunks(port, size):
    body = json.dumps(completion()[1]).ljust(size).encode()
    return answer_to(port, post("transfer-encoding: chunked\r\nconnection: close") + chunked(body))[0]


def get_over_the_last_connection(port, size):
    crowd = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(size)]
    crowd[-1].sendall(GET[:-2] + b"connection: close\r\n\r\n")
    answer = read_until_closed(crowd[-1])
    for connection in crowd:
        connection.close()
    return answer


WIRE_SIZES = {
    "headers": (300, get_with_headers, 431),
    "chunks": (60, post_chunks, 413),
    "connections": (3, get_over_the_last_connection, 503),
    "connections_per_address": (3, get_over_the_last_connection, 503),
}


@pytest.mark.parametrize("name", WIRE_SIZES)
def test_a_limit_of_the_connection_is_accepted_and_one_more_is_refused_at_once(name):
    maximum, ask, status = WIRE_SIZES[name]
    limits = Limits(**{name: maximum}, idle_seconds=SECONDS)
    with running(decoder(), limits=limits) as (port, service, _):
        with Clock() as clock:
            answer = ask(port, maximum + 1)
        assert (
            answer.startswith(b"HTTP/1.1 %d " % status) or answer == b""
        )  # lost where the client still sent
        clock.assert_at_once()
        wait_until(lambda: not service.connections.num_open)
        assert ask(port, maximum).startswith(b"HTTP/1.1 200 ")


class Blocked:
    """An explorer that answers when it is let."""

    def __init__(self):
        self.is_let = threading.Event()

    def ask(self, question, params, tenant):
        self.is_let.wait(NEVER)
        return {}


def test_questions_wait_up_to_their_limit_and_one_more_is_refused_after_a_second():
    explorer = Blocked()
    statuses = []
    with running(decoder(), limits=Limits(questions=2), explorer=explorer) as (port, service, _):
        ask = lambda: httpx.post(f"http://127.0.0.1:{port}/explore/model_info", json={}, timeout=NEVER)
        threads = [threading.Thread(target=lambda: statuses.append(ask().status_code)) for _ in range(3)]
        for n, thread in enumerate(threads):
            thread.start()
            wait_until(lambda n=n: service.explorer_thread.counts() == (1, n))
        with Clock() as clock:
            answer = ask()
        explorer.is_let.set()
        for thread in threads:
            thread.join(NEVER)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    clock.assert_after(REFUSAL_SECONDS)
    assert statuses == [200] * 3


# timeouts of connections -------------------------------------------------------------------------------

SLOW_CLIENTS = {  # limit: what the client sends before it falls silent, and the status that it gets
    "header_seconds": [(b"", None), (GET[:-2], None), (GET[:-2] + b"content-length: 9\r\n\r\n1", 200)],
    "body_seconds": [
        (post("content-length: 9") + b"1", 408),
        (post("transfer-encoding: chunked") + b"1\r\n{\r\n", 408),
    ],
    "idle_seconds": [(GET, 200)],
}


@pytest.mark.parametrize(
    ("name", "data", "status"), [(name, *row) for name, rows in SLOW_CLIENTS.items() for row in rows]
)
def test_a_silent_client_is_waited_for_as_long_as_its_limit_says(name, data, status):
    with running(decoder(), limits=slow_client_limits(name)) as (port, _, _), Clock() as clock:
        answer, _ = answer_to(port, data)
    assert answer[9:12] == (b"" if status is None else str(status).encode())
    clock.assert_after(SECONDS)


def slow_client_limits(name):
    """One short timeout, and no other."""
    names = ("header_seconds", "body_seconds", "write_seconds", "idle_seconds")
    return Limits(**{**dict.fromkeys(names, NEVER), name: SECONDS})


def test_a_client_that_does_not_read_has_write_seconds():
    with (
        running(decoder(), Flood, slow_client_limits("write_seconds")) as (port, service, server),
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request({**LONG, "stream": True}))
        wait_until(lambda: any(protocol.write_timer for protocol in server.server_state.connections))
        with Clock() as clock:
            wait_until(lambda: not service.connections.num_open)
        assert clock.elapsed < 5 * SECONDS + 1
        wait_until(lambda: not service.engine_thread.in_flight, AT_ONCE)


def test_requests_sent_ahead_share_their_rate_over_all_connections():
    count = 30
    with (
        running(decoder()) as (port, _, _),
        connect(port) as first,
        connect(port) as second,
        Clock() as clock,
    ):
        connections = (first, second)
        for connection in connections:
            connection.sendall(GET * (count - 1) + GET[:-2] + b"connection: close\r\n\r\n")
        answers = [read_until_closed(connection) for connection in connections]
    assert [answer.count(b"HTTP/1.1 200 ") for answer in answers] == [count, count]
    clock.assert_after((2 * count - 4) * PIPELINE_SECONDS)


def test_without_file_descriptors_the_log_gets_a_line_every_few_seconds(monkeypatch):
    monkeypatch.setattr(server_module, "ACCEPT_LOG_SECONDS", SECONDS)
    handler = ListHandler()
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    try:
        with running(decoder()) as (_, _, server), Clock() as clock:
            while not handler.lines or time.monotonic() - clock.start < 2.5 * SECONDS:
                server._handle_loop_exception(None, {"message": server_module.ACCEPT_ERROR_MESSAGE})
                time.sleep(0.01)
    finally:
        logger.removeHandler(handler)
    assert 2 <= len(handler.lines) <= 1 + clock.elapsed / SECONDS


# the time of a request ---------------------------------------------------------------------------------


@contextmanager
def stuck_client(loaded, **limits):
    with client(loaded, Stuck, limits=Limits(**limits)) as http_client:
        try:
            yield http_client
        finally:
            http_client.service.engine_thread.engine.is_stuck = False


@pytest.mark.parametrize(
    ("load", "path", "body"),
    [
        (decoder, "/v1/completions", {"prompt": "a"}),
        (decoder, "/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}),
        (talker, "/v1/chat/completions", CHAT),
        (translator, "/v1/translate", {"input": "a"}),
        (encoder, "/v1/embeddings", {"input": "a"}),
        (decoder, "/v1/score", {"input": "a"}),
    ],
)
def test_a_request_that_takes_longer_than_its_seconds_gets_504(load, path, body):
    with stuck_client(load(), seconds=SECONDS) as http_client:
        with Clock() as clock:
            answer = http_client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        clock.assert_after(SECONDS)
        wait_until(
            lambda: all(handle.cancelled for handle in list(http_client.service.engine_thread.in_flight)),
            AT_ONCE,
        )


@pytest.mark.parametrize("stream", [False, True])
def test_the_seconds_of_a_request_begin_when_it_arrives(monkeypatch, stream):
    spent = Limits().seconds - SECONDS  # reading and preparing it
    monkeypatch.setattr(
        request_log, "RequestRecord", lambda id_: RequestRecord(id_, time.monotonic() - spent)
    )
    with stuck_client(decoder()) as http_client, Clock() as clock:
        answer = http_client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert '"code":"timeout"' in answer.text
    clock.assert_after(SECONDS)


def test_a_template_has_template_seconds():
    with client(
        decoder(chat_template=ENDLESS_TEMPLATE), limits=Limits(template_seconds=SECONDS)
    ) as http_client:
        http_client.service.warm()
        with Clock() as clock:
            answer = http_client.post("/v1/chat/completions", json=CHAT)
    assert answer.json()["error"]["code"] == "template_too_slow"
    clock.assert_after(SECONDS)


def test_a_grammar_has_grammar_seconds():
    with client(decoder(), limits=Limits(grammar_seconds=SECONDS)) as http_client:
        sandboxes = http_client.service.grammar_sandboxes.sandboxes
        for sandbox in sandboxes:
            sandbox.check_grammar("start: /a/", NEVER)
            os.kill(sandbox.process.pid, signal.SIGSTOP)  # a grammar that takes for ever
        processes = [sandbox.process for sandbox in sandboxes]
        with Clock() as clock:
            answer = send(http_client, *completion(regex="a"))
        assert any(process.poll() is not None for process in processes)  # killed
    assert answer.json()["error"]["code"] == "grammar_too_complex"
    clock.assert_after(SECONDS)


def test_every_limit_has_a_row_or_a_clock():
    clocked = {"write_seconds", "seconds", "template_seconds", "grammar_seconds", "questions", *SLOW_CLIENTS}
    clocked |= {"tokenize_seconds"}  # by test_slow_tokenizers.py
    clocked |= {"step_seconds"}  # by test_gateway.py
    assert {*SIZES, *WIRE_SIZES, *clocked} == {field.name for field in fields(Limits)}


# clients that leave ------------------------------------------------------------------------------------


class SlowBatches(ContinuousBatchingEngine):
    """Sleeps before each step, and reads prompts a few tokens at a time."""

    def __init__(self, model, tokenizer=None):
        super().__init__(model, tokenizer, prefill_chunk_size=4, pages=300, page_size=16)

    def step(self):
        time.sleep(0.01)
        return super().step()


def read_totals(service):
    return service.engine_thread.request_status().result(NEVER).totals


@pytest.mark.parametrize("stream", [False, True])
def test_the_pages_of_a_client_that_leaves_are_free_at_once(stream):
    with running(decoder(), SlowBatches) as (port, service, _):
        with connect(port) as connection:
            connection.sendall(request({**LONG, "stream": stream}))
            wait_until(lambda: read_totals(service)["pages_used"] > 0)
        with Clock() as clock:
            wait_until(lambda: not service.engine_thread.in_flight)
            totals = read_totals(service)
        clock.assert_at_once()
        assert totals["pages_used"] == totals["prefix_cache_pages"]
        assert totals["generation_tokens"] < 4000 - 5


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": [[5] * 4000]}),
        ("/v1/score", {"input": "the sea is calm " * 700}),
        ("/v1/completions", {"prompt": [5] * 4000, "echo": True, "logprobs": 1, "max_tokens": 0}),
    ],
)
def test_the_prompt_of_a_client_that_leaves_is_not_read_on(path, body):
    with running(decoder(), SlowBatches) as (port, service, _):
        with connect(port) as connection:
            connection.sendall(request(body, path))
            wait_until(lambda: read_totals(service)["prompt_tokens"] > 0)
        with Clock() as clock:
            wait_until(lambda: not service.engine_thread.in_flight)
        clock.assert_at_once()
        assert 0 < read_totals(service)["prompt_tokens"] < 3500


# processes beside the engine ---------------------------------------------------------------------------

TASKS = {"question": lambda question, params, tenant: run_question(**params)}


def run_question(seconds=0.0):
    time.sleep(seconds)
    return {"pid": os.getpid(), "nice": os.nice(0), "threads": torch.get_num_threads()}


forks = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="processes are forked on Linux")


@forks
def test_a_question_beyond_its_seconds_is_ended_and_the_next_has_a_new_process_at_once():
    process = ExplorerProcess(ForkServer.fork(TASKS), max_waiting=4)
    with client(decoder(), limits=Limits(seconds=SECONDS), explorer=Blocked()) as http_client:
        http_client.service.explorer_process = process  # closed with the service
        ask = lambda seconds: http_client.post("/explore/beam", json={"seconds": seconds})
        first = asked_until_answered(ask)
        assert (first["nice"], first["threads"]) == (min(19, os.nice(0) + NICENESS), 1)
        with Clock() as clock:
            assert ask(600).status_code == 504
        clock.assert_after(SECONDS)
        with Clock() as clock:
            wait_until(lambda: not process.queue.counts()[0])
        assert clock.elapsed < 5 * GRACE_SECONDS + 1
        with Clock() as clock:
            second = asked_until_answered(ask)
        clock.assert_at_once()
        assert second["pid"] != first["pid"]


def asked_until_answered(ask):
    """The answer to a question; on a busy machine a process may take longer than the seconds of a request."""
    while (answer := ask(0)).status_code == 504:
        continue
    return answer.json()


# shutdown ----------------------------------------------------------------------------------------------


def stop_by_signal(server):
    server.handle_exit(signal.SIGTERM, None)


def test_what_is_left_after_the_shutdown_timeout_is_cancelled():
    with (
        running(decoder(), Slow, shutdown_timeout=SECONDS) as (port, service, server),
        connect(port) as connection,
    ):
        connection.sendall(request({**LONG, "stream": True}))
        wait_until(lambda: service.engine_thread.in_flight)
        with Clock() as clock:
            stop_by_signal(server)
            answer = read_until_closed(connection)
            server.thread.join(NEVER)
        clock.assert_after(SECONDS)
        assert b'"finish_reason":"cancelled"' in answer
        assert b'"code":"shutting_down"' in answer


def test_while_it_drains_the_server_says_so_at_once():
    with running(decoder(), Slow, shutdown_timeout=NEVER) as (port, service, server):
        with connect(port) as connection:
            connection.sendall(request(LONG))
            wait_until(lambda: service.engine_thread.in_flight)
            with Clock() as clock:
                stop_by_signal(server)
                wait_until(lambda: service.draining)
                health = httpx.get(f"http://127.0.0.1:{port}/health")
                refusal = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})
            clock.assert_at_once()
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            assert refusal.status_code == 503
            assert int(refusal.headers["retry-after"]) > 0
        with Clock() as clock:  # the client has left, and there is nothing to wait for
            server.thread.join(NEVER)
        clock.assert_at_once()


SLOW_TEMPLATE = "{% for a in range(700) %}{% for b in range(700) %}{% endfor %}{% endfor %}hi"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),  # its template is being rendered
        ("/v1/completions", {"prompt": "the sea", "max_tokens": 1, "echo": True, "logprobs": 1}),
    ],
)
def test_a_request_that_is_not_in_the_engine_yet_may_finish_too(path, body):
    loaded = decoder(chat_template=SLOW_TEMPLATE)
    limits = Limits(template_seconds=NEVER)
    with (
        running(loaded, Slow, limits, shutdown_timeout=NEVER) as (port, service, server),
        connect(port) as connection,
    ):
        connection.sendall(request(body, path))
        wait_until(lambda: service.num_answering)
        stop_by_signal(server)
        answer = read_until_closed(connection)
        assert answer.startswith(b"HTTP/1.1 200 ")
        server.thread.join(NEVER)
        assert not server.thread.is_alive()


def test_a_second_signal_stops_the_server_at_once():
    with (
        running(decoder(), Slow, shutdown_timeout=NEVER) as (port, service, server),
        connect(port) as connection,
    ):
        connection.sendall(request({**LONG, "stream": True}))
        wait_until(lambda: service.engine_thread.in_flight)
        stop_by_signal(server)
        with Clock() as clock:
            stop_by_signal(server)
            server.thread.join(NEVER)
        clock.assert_at_once()


@pytest.mark.parametrize(("shutdown_timeout", "num_signals"), [(0, 1), (NEVER, 2)])
def test_a_template_that_hangs_does_not_hold_up_the_shutdown(shutdown_timeout, num_signals):
    loaded = decoder(chat_template=ENDLESS_TEMPLATE)
    limits = Limits(template_seconds=NEVER)
    with (
        running(loaded, limits=limits, shutdown_timeout=shutdown_timeout) as (port, service, server),
        connect(port) as connection,
    ):
        connection.sendall(request(CHAT, "/v1/chat/completions"))
        wait_until(lambda: service.templates.counts() == (1, 0))
        sandboxes = service.template_sandboxes.sandboxes
        wait_until(lambda: all(sandbox.process for sandbox in sandboxes))  # one warms up, one renders
        for _ in range(num_signals):
            stop_by_signal(server)
        with Clock() as clock:
            answer = read_until_closed(connection)
            server.thread.join(NEVER)
        clock.assert_at_once()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert not any(sandbox.process for sandbox in sandboxes)


def test_a_client_that_does_not_read_does_not_hold_up_a_second_signal():
    with (
        running(decoder(), Flood, shutdown_timeout=NEVER) as (port, _, server),
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request({**LONG, "stream": True}))
        wait_until(lambda: any(protocol.write_timer for protocol in server.server_state.connections))
        stop_by_signal(server)
        with Clock() as clock:
            stop_by_signal(server)
            server.thread.join(NEVER)
        clock.assert_at_once()
