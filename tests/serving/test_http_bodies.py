"""A body within the size limit costs little, whatever is in it, and holds up nobody else."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from keepleft.serving.http import json_body, validated_route
from keepleft.serving.http.app import make_app
from keepleft.serving.http.errors import MAX_MESSAGE_LENGTH, MAX_PARAM_LENGTH, APIError
from keepleft.serving.http.json_body import check_counts, parse_json
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.middleware.auth import APIKeys
from keepleft.serving.http.middleware.body_limit import BodyLimitMiddleware
from keepleft.serving.http.middleware.body_memory import BodyMemory
from keepleft.serving.http.schemas import requests
from keepleft.serving.http.service import VALIDATION_THREADS
from serving.test_http_misbehaving_clients import post, read_until_closed, request, wait_until
from serving.tiny_services import client, decoder, running, service, talker

pytestmark = pytest.mark.usefixtures("one_thread")
HEALTH_SECONDS = 0.1  # promised
TOLERANCE = 10  # on a busy machine

HUGE_BODIES = {
    "objects": ("/v1/completions", b'{"prompt": [' + b"{}," * 1_300_000 + b"{}]}"),
    "messages": ("/v1/chat/completions", b'{"messages": [' + b"0," * 2_000_000 + b"0]}"),
    "bad words": ("/v1/completions", b'{"prompt": "a", "bad_words_ids": [' + b"[]," * 1_000_000 + b"[]]}"),
    "most floats": ("/v1/completions", b'{"prompt": [' + b"0.5," * 262_000 + b"0.5]}"),
    "most fields": ("/v1/completions", b"{" + b",".join(b'"%x":0' % n for n in range(131_000)) + b"}"),
    "most messages": (
        "/v1/chat/completions",
        b'{"messages": [' + b'{"role": "a", "content": "b"},' * 8_000 + b"0]}",
    ),
}


def send(http, path, body):
    return http.post(path, content=body, headers={"content-type": "application/json"})


def test_no_body_holds_up_others():
    with running(talker()) as (port, _, _):
        address = f"http://127.0.0.1:{port}"
        latencies = []
        stopping = threading.Event()

        def ask_health():
            with httpx.Client(base_url=address, timeout=60) as http:
                while not stopping.is_set():
                    start = time.perf_counter()
                    assert http.get("/health").status_code == 200
                    latencies.append(time.perf_counter() - start)
                    time.sleep(0.002)

        thread = threading.Thread(target=ask_health, daemon=True)
        thread.start()
        with httpx.Client(base_url=address, timeout=60) as http:
            bodies = list(HUGE_BODIES.items())
            while bodies:
                name, (path, body) = bodies.pop(0)
                if len(latencies) <= 20 and thread.is_alive():  # again: they were refused too quickly to tell
                    bodies.append((name, (path, body)))
                assert len(body) <= Limits().body, name
                start = time.perf_counter()
                answer = send(http, path, body)
                assert answer.status_code == 400, name
                assert len(answer.content) < 2000, name
                assert time.perf_counter() - start < 10, name
        stopping.set()
        thread.join(60)
        assert len(latencies) > 10
        latencies.sort()
        assert latencies[len(latencies) * 9 // 10] < TOLERANCE * HEALTH_SECONDS
        assert latencies[-1] < 5.0  # where this process, which has the client in it too, did not get a core


LIMITS = Limits(elements=40, containers=10, keys=6, depth=8)


@pytest.mark.parametrize(
    ("body", "is_fine"),
    [
        (b"[" + b"1," * 38 + b"1]", True),
        (b"[" + b"1," * 40 + b"1]", False),
        (b"[" + b"[]," * 8 + b"[]]", True),
        (b"[" + b"[]," * 9 + b"{}]", False),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}', True),
        (b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1,"g":1}', False),
        (b'["' + b"[{," * 99 + b'"]', True),  # what stands in a string counts for nothing
        (b'["' + b'\\"[,' * 99 + b'"]', True),
        (b'["\\\\",' + b"1," * 40 + b"1]", False),
        (b'["\\\\\\"",' + b"1," * 40 + b"1]", False),
    ],
)
def test_values_are_counted(body, is_fine):
    if is_fine:
        assert parse_json(body, LIMITS) == json.loads(body)
    else:
        with pytest.raises(APIError, match="more than") as caught:
            parse_json(body, LIMITS)
        assert caught.value.code == "too_many_values"


DOCUMENTS = st.recursive(
    st.none() | st.integers() | st.text('a"\\[]{},:', max_size=9),
    lambda values: st.lists(values, max_size=5) | st.dictionaries(st.text('b"\\,['), values, max_size=5),
    max_leaves=30,
)


def count_containers(document):
    """Lists and objects, by the slow definition."""
    if isinstance(document, dict):
        return 1 + sum(map(count_containers, document.values()))
    return 1 + sum(map(count_containers, document)) if isinstance(document, list) else 0


def count_separators(document):
    """A list or object has a comma less than it has entries, and an object a colon for each."""
    if not isinstance(document, dict | list):
        return 0
    entries = document.values() if isinstance(document, dict) else document
    colons = len(document) if isinstance(document, dict) else 0
    return max(0, len(document) - 1) + colons + sum(map(count_separators, entries))


def is_accepted(body, **limits):
    try:
        check_counts(body, Limits(**limits))
    except APIError:
        return False
    return True


@given(document=DOCUMENTS, slice_bytes=st.integers(1, 40))
def test_counts_are_exact_wherever_a_slice_ends(document, slice_bytes):
    body = json.dumps(document).encode()
    containers = count_containers(document)
    elements = containers + count_separators(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "SLICE_BYTES", slice_bytes)
        if containers:
            assert is_accepted(body, containers=containers)
        if containers > 1:
            assert not is_accepted(body, containers=containers - 1)
        if elements:
            assert is_accepted(body, elements=elements)
        if elements > 1:
            assert not is_accepted(body, elements=elements - 1)


SCHEMAS = [
    requests.CompletionRequest,
    requests.ChatRequest,
    requests.TranslateRequest,
    requests.EmbeddingRequest,
    requests.ClassifyRequest,
    requests.ScoreRequest,
    requests.AttentionRequest,
]


def count_errors(schema, document):
    try:
        schema.model_validate(document)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("schema", SCHEMAS)
@pytest.mark.parametrize("item", [{}, [], [{}], 0.5, None, "a", {"role": 1, "x": 2}, [[], 1]])
def test_a_list_stops_at_its_first_error(schema, item):
    for name in schema.model_fields:
        assert count_errors(schema, {name: [item] * 1000}) < 30, name


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_body_is_parsed_once_and_a_large_one_in_a_thread(monkeypatch, size):
    threads = []
    loads = json.loads

    def record_thread(*args, **options):
        threads.append(threading.current_thread().name)
        return loads(*args, **options)

    validated_in = []
    validate = validated_route.validate_body
    monkeypatch.setattr(
        validated_route,
        "validate_body",
        lambda *args: validated_in.append(threading.current_thread().name) or validate(*args),
    )
    with client(decoder()) as http_client:
        monkeypatch.setattr(json, "loads", record_thread)
        answer = http_client.post("/v1/completions", json={"prompt": "a" * size, "max_tokens": 1})
    assert answer.status_code == (200 if size == 10 else 400)
    assert threads == validated_in
    assert len(threads) == 1
    assert ("validating" in threads[0]) == (size > validated_route.MIN_BYTES_FOR_THREAD)


def test_a_body_whose_client_has_left_is_not_validated(monkeypatch):
    sizes = []
    unblocked = threading.Event()
    validate = validated_route.validate_body

    def validate_slowly(body, *args):
        sizes.append(len(body))
        assert unblocked.wait(30)
        return validate(body, *args)

    monkeypatch.setattr(validated_route, "validate_body", validate_slowly)
    with running(decoder()) as (port, _, server):
        data = [request({"prompt": "a" * (20_000 + n)}) for n in range(VALIDATION_THREADS + 1)]
        clients = [socket.create_connection(("127.0.0.1", port), 30) for _ in data]
        for n, client in enumerate(clients):
            client.sendall(data[n])
            wait_until(lambda n=n: len(sizes) == min(n + 1, VALIDATION_THREADS))
        wait_until(lambda: len(server.server_state.connections) == len(clients))
        time.sleep(0.2)  # the last body waits for a thread
        for client in clients:
            client.close()
        wait_until(lambda: not server.server_state.tasks)
        unblocked.set()
        time.sleep(0.2)
    assert len(sizes) == VALIDATION_THREADS


def test_rows_of_tokens_are_counted_and_must_not_be_empty():
    with client(decoder(), limits=Limits(tokens=4)) as http_client:
        for name, row in (("bad_words_ids", [20]), ("sequence_bias", [[20], 1.0])):
            body = {"prompt": "a", "max_tokens": 1, name: [row] * 4}
            assert http_client.post("/v1/completions", json=body).status_code == 200
            answer = http_client.post("/v1/completions", json={**body, name: [row] * 5})
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == name
        for name, row in (("bad_words_ids", []), ("sequence_bias", [[], 1.0])):
            answer = http_client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, name: [row]})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "invalid_value"


def test_an_error_never_repeats_the_request_at_length():
    error = APIError(400, "a" * 5000, param="b" * 5000)
    assert len(error.payload["error"]["message"]) == len(str(error)) == MAX_MESSAGE_LENGTH
    assert len(error.payload["error"]["param"]) == MAX_PARAM_LENGTH
    long = "9" * 50_000
    with client(decoder()) as http_client:
        for fields in (
            {"logit_bias": {long: 1}},
            {long: 1},
            {"model": long},
            {"regex": "(" + long},
            {"stop": long},
        ):
            answer = http_client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields})
            assert answer.status_code in (400, 404), fields.keys()
            assert len(answer.content) < 3000


def post_scope(tenant="", path="/v1/completions"):
    headers = [(b"content-type", b"application/json")]
    return {"type": "http", "method": "POST", "path": path, "headers": headers, "state": {"tenant": tenant}}


def test_the_bodies_of_all_requests_share_a_limit():
    async def respond(scope, receive, send):
        messages.append(await receive())
        await asyncio.sleep(0.1)

    middleware = BodyLimitMiddleware(respond, Limits(body=1000, body_memory=1500))
    messages, statuses = [], []

    async def post(size):
        pieces = [{"type": "http.request", "body": b"a" * size, "more_body": n == 0} for n in range(2)]

        async def receive():
            await asyncio.sleep(0.01)
            return pieces.pop(0)

        async def send(message):
            statuses.append(message.get("status"))

        await middleware(post_scope(), receive, send)

    async def post_three():
        await asyncio.gather(*(post(300) for _ in range(3)))

    asyncio.run(post_three())
    assert len(messages) == 2
    assert 503 in statuses
    assert middleware.memory.num_bytes == 0
    assert not middleware.memory.by_key


@given(
    steps=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400)), max_size=60),
    small=st.integers(1, 60),
)
def test_no_key_takes_the_memory_of_all_bodies(steps, small):
    memory = BodyMemory(1000)
    for key, size in steps:  # of bodies that never end
        if not memory.add(key, size):
            memory.remove(key, size)
        assert memory.num_bytes <= memory.max_bytes
    assert memory.add("small", small)
    assert memory.num_bytes <= memory.max_bytes


def test_one_key_does_not_lock_out_another_with_its_bodies():
    """20 bodies of 4 KiB of which the last byte never comes, where there is room for 16."""
    limits = Limits(body=1 << 12, body_memory=1 << 16)
    small = {"prompt": "a", "max_tokens": 1}
    keys = APIKeys(["greedy-key", "small-key"])
    with running(decoder(), limits=limits, keys=keys) as (port, _, _):
        crowd = []
        for _ in range(20):
            connection = socket.create_connection(("127.0.0.1", port), 60)
            headers = f"authorization: Bearer greedy-key\r\ncontent-length: {limits.body}"
            connection.sendall(post(headers) + b" " * (limits.body - 1))
            crowd.append(connection)
        # half of the memory holds 8 of them; the others are refused
        wait_until(lambda: len(select.select(crowd, [], [], 0)[0]) >= 12)
        assert b"too_many_bodies" in read_until_closed(select.select(crowd, [], [], 0)[0][0])
        for _ in range(3):
            answer = httpx.post(
                f"http://127.0.0.1:{port}/v1/completions",
                json=small,
                headers={"authorization": "Bearer small-key"},
                timeout=60,
            )
            assert answer.status_code == 200
        for connection in crowd:
            connection.close()


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 401), ("/health", 405), ("/health/live", 405)]
)
def test_a_body_without_a_key_is_not_read(path, status):
    statuses = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        statuses.append(message.get("status"))

    with service(decoder()) as running_service:
        app = make_app(running_service, keys=APIKeys(["a-key"]))
        scope = {**post_scope(path=path), "query_string": b"", "root_path": "", "http_version": "1.1"}
        asyncio.run(app(scope, receive, send))
    assert statuses[0] == status
