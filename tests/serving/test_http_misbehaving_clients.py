"""Clients that leave, send without end, are slow or too many do not hold up the others."""

from __future__ import annotations

import json
import socket
import time
from contextlib import contextmanager

import httpx
import pytest

from keepleft.serving.engine.request import TokenEvent
from keepleft.serving.engine.sequential import SequentialEngine
from keepleft.serving.http.limits import Limits
from serving.tiny_services import Slow, decoder, encoder, running

pytestmark = pytest.mark.usefixtures("one_thread")
LONG = {"prompt": "the sea", "max_tokens": 4000, "logit_bias": {"2": -100}}


@contextmanager
def connect(port):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        yield connection


def request(body, path="/v1/completions"):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return post(f"content-length: {len(data)}", path) + data


def post(length, path="/v1/completions"):
    """The headers of a request."""
    headers = f"host: localhost\r\ncontent-type: application/json\r\n{length}"
    return f"POST {path} HTTP/1.1\r\n{headers}\r\n\r\n".encode()


def read_until_closed(connection):
    """All bytes until the server closes the connection."""
    out = b""
    try:
        while piece := connection.recv(65536):
            out += piece
    except ConnectionResetError:
        pass
    return out


def wait_until(condition, seconds=30.0):
    """Wait until a condition holds; fail after some time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.01)


class Stuck(SequentialEngine):
    """Serves nothing until it is told to."""

    is_stuck = True

    def step(self):
        if self.is_stuck:
            time.sleep(0.01)
            return []
        return super().step()


@pytest.fixture
def slow():
    with running(decoder(), Slow) as server:
        yield server


def test_a_client_that_leaves_in_the_middle_is_noticed_at_once():
    lines = []
    with running(decoder(), Slow, log=lambda level, fields: lines.append(fields)) as (port, service, _):
        with connect(port) as connection:
            connection.sendall(request({**LONG, "stream": True}))
            wait_until(lambda: b"data:" in connection.recv(4096))
            assert len(service.engine_thread.in_flight) == 1
            (handle,) = service.engine_thread.in_flight
        wait_until(lambda: len(service.engine_thread.in_flight) == 0)
        assert handle.cancelled
        wait_until(lambda: lines)
        assert lines[0]["ended"] == "left"
        assert lines[0]["completion_tokens"] < 4000
        assert (
            httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={**LONG, "max_tokens": 2}).status_code
            == 200
        )


def test_clients_that_leave_while_they_wait_are_noticed_too(slow):
    port, service, _ = slow
    first = socket.create_connection(("127.0.0.1", port), timeout=30)
    first.sendall(request(LONG))
    wait_until(lambda: service.engine_thread.request_status().result(30).totals["running"] == 1)
    others = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(5)]
    for other in others:
        other.sendall(request({**LONG, "stream": False}))
    wait_until(lambda: len(service.engine_thread.in_flight) == 6)
    for other in others:
        other.close()
    wait_until(lambda: len(service.engine_thread.in_flight) == 1)
    first.close()
    wait_until(lambda: len(service.engine_thread.in_flight) == 0)


@pytest.mark.parametrize(
    ("load", "path", "body"),
    [
        (encoder, "/v1/embeddings", {"input": "the sea"}),
        (decoder, "/v1/embeddings", {"input": "the sea"}),
        (decoder, "/v1/score", {"input": ["the sea", "a ship"]}),
        (decoder, "/v1/completions", {"prompt": "the sea", "echo": True, "logprobs": 1, "max_tokens": 0}),
    ],
)
def test_a_client_that_leaves_cancels_what_it_wanted_to_know(load, path, body):
    with running(load(), Stuck) as (port, service, _):
        with connect(port) as connection:
            connection.sendall(request(body, path))
            wait_until(lambda: service.engine_thread.in_flight)
            handles = list(service.engine_thread.in_flight)
        wait_until(lambda: all(handle.cancelled for handle in handles))
        service.engine_thread.engine.is_stuck = False
        wait_until(lambda: not service.engine_thread.in_flight)
        assert (
            service.engine_thread.request_status().result(30).totals["prompt_tokens"] == 0
        )  # nothing was computed


@pytest.mark.parametrize("chunked", [True, False])
def test_a_gigabyte_is_not_read(slow, chunked):
    port, _, _ = slow
    size = 1 << 30
    length = "transfer-encoding: chunked" if chunked else f"content-length: {size}"
    piece = b"a" * 65536
    sent = 0
    with connect(port) as connection:
        connection.sendall(post(length))
        try:
            while sent < size:
                connection.sendall(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
                sent += len(piece)
        except OSError:
            pass
        assert sent < 64 << 20
        answer = read_until_closed(connection)
    # data on the way may be lost when the server closes the connection
    assert answer == b"" or b" 413 " in answer.split(b"\r\n")[0]
    quick = httpx.post(
        f"http://127.0.0.1:{port}/v1/completions",
        content=b"a" * (5 << 20),
        headers={"content-type": "application/json"},
    )
    assert quick.status_code == 413
    assert quick.headers["connection"] == "close"


def test_expect_100_continue_with_a_large_body_is_rejected(slow):
    port, _, _ = slow
    with connect(port) as connection:
        connection.sendall(post("content-length: 9999999999\r\nexpect: 100-continue"))
        assert read_until_closed(connection).startswith(b"HTTP/1.1 413 ")


@pytest.fixture(scope="module")
def hasty():
    limits = Limits(
        header_seconds=0.3, body_seconds=0.3, idle_seconds=1, headers=4096, connections=6, requests=2
    )
    with running(decoder(), Slow, limits) as server:
        yield server


@pytest.mark.parametrize("data", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-slow: "])
def test_headers_that_do_not_come_are_not_waited_for(hasty, data):
    with connect(hasty[0]) as connection:
        connection.sendall(data)
        assert read_until_closed(connection) == b""


def test_a_second_request_is_not_waited_for_either(hasty):
    with connect(hasty[0]) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(lambda: b"ready" in connection.recv(4096))
        connection.sendall(b"GET /health HT")
        assert read_until_closed(connection) == b""
    with connect(hasty[0]) as connection:  # nor is one that never begins
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"ready" in read_until_closed(connection)


def test_a_body_that_does_not_come_is_not_waited_for(hasty):
    with connect(hasty[0]) as connection:
        connection.sendall(request(b"{" + b" " * 99)[:-50])
        answer = read_until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"timeout"' in answer


def test_headers_that_are_too_large_and_what_is_no_http(hasty):
    for data, status, code in (
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-large: " + b"a" * 9000, 431, "headers_too_large"),
        (b"\x16\x03\x01 hello\r\n\r\n", 400, "invalid_http"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_http"),
    ):
        with connect(hasty[0]) as connection:
            connection.sendall(data)
            answer = read_until_closed(connection)
        # data on the way may be lost when the server closes the connection
        assert answer.startswith(b"HTTP/1.1 %d " % status) or answer == b"", answer
        assert answer == b"" or f'"code": "{code}"'.encode() in answer


class Flood(SequentialEngine):
    """Reports a hundred tokens a step, without end."""

    def step(self):
        time.sleep(0.01)
        handle = self.waiting[0]
        return super().step() if handle.cancelled else [(handle, TokenEvent(0, 20)) for _ in range(100)]


def test_a_client_that_does_not_read_is_disconnected():
    with (
        running(decoder(), Flood, Limits(write_seconds=0.3)) as (port, service, _),
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", port))
        connection.sendall(request({**LONG, "stream": True}))
        wait_until(lambda: len(service.engine_thread.in_flight) == 1)
        wait_until(lambda: len(service.engine_thread.in_flight) == 0)


def test_too_many_clients_are_told_to_retry(hasty):
    port, service, _ = hasty
    crowd = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(2)]
    for connection in crowd:
        connection.sendall(request(LONG))
    wait_until(lambda: len(service.engine_thread.in_flight) == 2)
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=LONG, timeout=30)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    crowd += [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(5)]
    answers = []
    for connection in crowd[2:]:
        connection.settimeout(0.2)
        try:
            answers.append(connection.recv(4096))
        except TimeoutError:
            answers.append(b"")
    assert any(answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer for answer in answers)
    for connection in crowd:
        connection.close()
    wait_until(lambda: len(service.engine_thread.in_flight) == 0)
