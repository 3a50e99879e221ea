"""Connections are bounded: how many there are, how long they may last, and what one of them may cost."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from contextlib import contextmanager, suppress

import httpx
import pytest

from keepleft.serving.http.connections import address_key
from keepleft.serving.http.descriptors import RESERVED_DESCRIPTORS, fit_connections, open_descriptors
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.timeouts import MAX_UNPARSED_BYTES, PIPELINE_SECONDS
from serving.test_http_misbehaving_clients import connect, post, read_until_closed, request, wait_until
from serving.tiny_services import Slow, decoder, running

pytestmark = pytest.mark.usefixtures("one_thread")
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
GET_OPENAPI = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"
SECONDS = 0.4  # the timeouts of this server
TOLERANCE = 3.0  # seconds on a busy machine
LIMITS = Limits(
    header_seconds=SECONDS,
    body_seconds=SECONDS,
    write_seconds=SECONDS,
    idle_seconds=SECONDS,
    headers=4096,
    chunks=50,
)


@pytest.fixture(scope="module")
def server():
    with running(decoder(), limits=LIMITS) as running_server:
        yield running_server


def answer_to(port, data):
    """All that the server sends until it closes the connection, and the seconds until then."""
    with connect(port) as connection:
        start = time.monotonic()
        connection.sendall(data)
        return read_until_closed(connection), time.monotonic() - start


def is_healthy(port):
    return httpx.get(f"http://127.0.0.1:{port}/health", timeout=10).status_code == 200


@pytest.mark.parametrize(
    ("data", "status", "seconds"),
    [
        (b"", None, SECONDS),
        (GET[:-2], None, SECONDS),
        (GET, 200, SECONDS),
        (GET + GET[:-2], 200, SECONDS),
        (post("content-length: 9"), 408, SECONDS),
        (post("transfer-encoding: chunked") + b"1\r\n{\r\n", 408, SECONDS),
        (GET[:-2] + b"content-length: 9\r\n\r\n", 200, SECONDS),  # a body that is not read
        (GET[:-2] + b"content-length: 9\r\n\r\n12345", 200, SECONDS),
    ],
)
def test_every_wait_comes_to_an_end(server, data, status, seconds):
    answer, elapsed = answer_to(server[0], data)
    assert answer[9:12] == (b"" if status is None else str(status).encode())
    assert 0.9 * seconds - 0.1 < elapsed < seconds + TOLERANCE


def drip_until_closed(connection):
    """A byte at a time, ten seconds at most."""
    try:
        for _ in range(200):
            connection.sendall(b"a")
            time.sleep(0.05)
    except OSError:
        pass


def test_a_body_that_drips_in_after_its_response_is_not_waited_for(server):
    with connect(server[0]) as connection:
        connection.sendall(GET[:-2] + b"content-length: 1000\r\n\r\n")
        start = time.monotonic()
        drip_until_closed(connection)
        assert time.monotonic() - start < SECONDS + TOLERANCE


def test_a_body_that_comes_to_its_end_after_its_response_leaves_the_connection_in_order(server):
    with connect(server[0]) as connection:
        connection.sendall(GET[:-2] + b"content-length: 4\r\n\r\nab")
        wait_until(lambda: b"ready" in connection.recv(4096))
        connection.sendall(b"cd")
        time.sleep(0.05)
        connection.sendall(GET)
        assert b"ready" in read_until_closed(connection)  # and it is closed when it is idle


def test_clients_that_never_read_are_disconnected(server):
    port, _, running_server = server
    clients = []
    try:
        for _ in range(8):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(GET_OPENAPI * 30)
            clients.append(client)
        assert is_healthy(port)
        wait_until(lambda: not running_server.server_state.connections, SECONDS + 5 * TOLERANCE)
    finally:
        for client in clients:
            client.close()


def test_a_client_that_does_not_read_gets_no_further_work_done():
    lines = []
    with (
        running(decoder(), log=lambda level, fields: lines.append(fields)) as (port, _, _),
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(GET_OPENAPI * 500)
        time.sleep(1.0)
        size = len(httpx.get(f"http://127.0.0.1:{port}/openapi.json").content)
        assert 0 < len(lines) < 10 + (1 << 20) // size


def test_headers_have_a_limit_however_they_arrive(server):
    port = server[0]
    large = b"x-large: " + b"a" * 120_000 + b"\r\n\r\n"
    many = b"".join(b"x-%d: a\r\n" % n for n in range(9000)) + b"\r\n"
    for headers in (large, many):
        answer, _ = answer_to(port, GET[:-2] + headers)
        assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""  # lost where the client still sends
        answer, _ = answer_to(port, GET + GET[:-2] + headers[:5000])
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"HTTP/1.1 431 " in answer
        assert b'"code": "headers_too_large"' in answer
    padding = b"x-large: " + b"a" * (LIMITS.headers - len(GET) - len(b"x-large: \r\n"))
    for extra, status in ((b"", 200), (b"aa", 431)):
        head = GET[:-2] + padding + extra + b"\r\n\r\n"
        assert len(head) == LIMITS.headers + len(extra)
        with connect(port) as connection:
            connection.sendall(head)
            assert connection.recv(4096).startswith(b"HTTP/1.1 %d " % status)


def chunked(body, size=1):
    pieces = [body[n : n + size] for n in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def test_a_body_has_a_limited_number_of_chunks(server):
    head = post("transfer-encoding: chunked")
    body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    answer, _ = answer_to(server[0], head + chunked(body))
    assert answer.startswith(b"HTTP/1.1 200 ")
    answer, _ = answer_to(server[0], head + chunked(body + b" " * 50))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code": "too_many_chunks"' in answer
    answer, _ = answer_to(server[0], head + chunked(body + b" " * 30_000, size=1000))
    assert answer.startswith(b"HTTP/1.1 200 ")


def test_tiny_chunks_hold_up_nobody():
    with running(decoder()) as (port, _, _):
        body = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        with connect(port) as connection:
            connection.sendall(post("transfer-encoding: chunked") + chunked(body + b" " * 10_000))
            start = time.monotonic()
            assert is_healthy(port)
            assert time.monotonic() - start < 1.0
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (post("content-length: 6\r\ntransfer-encoding: chunked"), 400),
        (post("transfer-encoding: chunked\r\ncontent-length: 6"), 400),
        (post("transfer-encoding: chunked").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
        (post("transfer-encoding: gzip, chunked"), 501),
        (post("content-length: 6\r\ncontent-length: 7"), 400),
        (post("content-length: +6"), 400),
    ],
)
def test_an_ambiguous_length_is_refused_and_the_connection_closed(server, data, status):
    answer, elapsed = answer_to(server[0], data + b"0\r\n\r\n" + GET)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.count(b"HTTP/1.1 %d" % status) == 1
    assert b"200 OK" not in answer
    assert elapsed < TOLERANCE


def test_pipelined_requests_are_answered_one_after_the_other_and_not_faster_than_promised(server):
    count = 40
    start = time.monotonic()
    with connect(server[0]) as connection:
        connection.sendall(GET * count)
        answer = b""
        while answer.count(b'{"status":"ready"}') < count:
            piece = connection.recv(65536)
            assert piece
            answer += piece
    elapsed = time.monotonic() - start
    assert 0.9 * (count - 1) * PIPELINE_SECONDS < elapsed < 10


def test_what_is_sent_ahead_is_not_read_without_end():
    with running(decoder(), Slow) as (port, service, running_server):
        long = {"prompt": "the sea", "max_tokens": 4000, "logit_bias": {"2": -100}}
        with connect(port) as connection:
            connection.sendall(request(long))
            wait_until(lambda: len(service.engine_thread.in_flight) == 1)
            connection.settimeout(0.5)
            with pytest.raises(TimeoutError):
                connection.sendall(GET * 1_000_000)
            (protocol,) = running_server.server_state.connections
            assert len(protocol.unparsed) <= MAX_UNPARSED_BYTES + (1 << 18)
        # a client that leaves is noticed at the latest when its response is written
        service.abort_all()
        wait_until(lambda: not running_server.server_state.connections)


def test_one_address_cannot_take_all_connections():
    with running(decoder(), limits=Limits(connections=8, connections_per_address=4)) as (port, _, _):
        try:
            crowd = [
                socket.create_connection(("127.0.0.1", port), 30, source_address=("127.0.0.2", 0))
                for _ in range(4)
            ]
            late = socket.create_connection(("127.0.0.1", port), 30, source_address=("127.0.0.2", 0))
        except OSError:
            pytest.skip("this system has no address 127.0.0.2")
        answer = read_until_closed(late)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"from your address" in answer
        assert is_healthy(port)
        for connection in [*crowd, late]:
            connection.close()
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port), 30, source_address=("127.0.0.2", 0)) as again:
            again.sendall(GET)
            assert again.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_what_counts_as_one_address():
    assert address_key("192.0.2.7") == address_key("::ffff:192.0.2.7") == "192.0.2.7"
    assert address_key("2001:db8::1") == address_key("2001:db8::ffff:1:2%eth0")
    assert address_key("2001:db8::1") != address_key("2001:db8:0:1::1")
    assert address_key("") == ""


def test_300_clients_of_one_address_are_served():
    with running(decoder()) as (port, _, _):
        clients = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(300)]
        for client in clients:
            client.sendall(GET)
        assert all(client.recv(4096).startswith(b"HTTP/1.1 200 ") for client in clients)
        for client in clients:
            client.close()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (GET.replace(b"GET", b"HEAD"), 405),
        (GET.replace(b"GET", b"OPTIONS"), 405),
        (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"GET http://localhost/health HTTP/1.1\r\nhost: localhost\r\n\r\n", None),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
        (b"GET /health HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", 200),
        (GET[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n", 200),
        (GET[:-2] + b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\n\r\nmore", 200),
        (GET[:-2] + b"expect: 100-continue\r\ncontent-length: 4\r\n\r\nabcd", 200),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", None),
    ],
)
def test_unusual_requests_are_answered_and_the_connection_comes_to_its_end(server, caplog, data, status):
    with caplog.at_level(logging.WARNING):
        answer, elapsed = answer_to(server[0], data)
    assert status is None or answer.startswith(b"HTTP/1.1 %d " % status)
    assert answer.startswith(b"HTTP/1.1 ")
    assert elapsed < SECONDS + TOLERANCE
    assert "upgrade" not in caplog.text
    if data.startswith(b"HEAD"):
        assert answer.endswith(b"\r\n\r\n")
    assert is_healthy(server[0])


def test_a_client_that_closes_its_half_is_let_go(server):
    port, _, running_server = server
    with connect(port) as connection:
        connection.sendall(GET[:-2])
        connection.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        read_until_closed(connection)
        assert time.monotonic() - start < TOLERANCE
    wait_until(lambda: not running_server.server_state.connections)


# file descriptors ----------------------------------------------------------------------------------


def test_connections_leave_a_reserve_of_file_descriptors():
    limits = Limits()
    assert fit_connections(limits, None, 30) == limits
    assert fit_connections(limits, 20_000, 30) == limits
    fewer = fit_connections(limits, 512, 30)
    assert fewer.connections == 512 - 30 - RESERVED_DESCRIPTORS
    assert fewer.connections_per_address == fewer.connections // 2
    with pytest.raises(ValueError, match=r"may open 140 files, and 30 are open .* raise the limit"):
        fit_connections(limits, 140, 30)
    assert open_descriptors() > 2


def ask_health(connection):
    """Ask over an open connection, and read the whole response."""
    connection.sendall(GET)
    answer = b""
    while b'{"status":"ready"}' not in answer:
        piece = connection.recv(4096)
        assert piece
        answer += piece


class ListHandler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def no_descriptors():
    """This process cannot open a file."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 4, hard))
    fillers = [spare]
    try:
        with suppress(OSError):
            while len(fillers) < 1000:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


def test_without_file_descriptors_open_connections_are_served_and_the_log_gets_a_line():
    handler = ListHandler()
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(handler)
    try:
        with running(decoder()) as (port, _, _), connect(port) as connection:
            ask_health(connection)
            late = [socket.socket() for _ in range(5)]
            with no_descriptors():
                for client in late:
                    client.settimeout(30)
                    client.connect(("127.0.0.1", port))
                    client.sendall(GET)
                for _ in range(3):
                    time.sleep(0.1)
                    ask_health(connection)
            for client in late:  # asyncio tries again after a second
                assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
                client.close()
    finally:
        logger.removeHandler(handler)
    (line,) = handler.lines
    assert line.startswith("ERROR no file descriptor is left")
