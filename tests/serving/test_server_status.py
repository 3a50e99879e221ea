"""GET /explore/server: the operator sees what the server is doing, and nobody else does."""

from __future__ import annotations

import json
import socket
import threading
import time
from base64 import b64encode
from contextlib import contextmanager
from functools import partial
from typing import get_args

import httpx
import pytest

from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.activity import KeyActivity, count_activity
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.encoder import EncoderEngine
from keepleft.serving.engine.request import GenerationRequest, PromptRequest, RequestHandle, Tenant
from keepleft.serving.engine.sequential import SequentialEngine
from keepleft.serving.engine.thread import STATUS_INTERVAL_SECONDS, EngineThread
from keepleft.serving.http import service as service_module
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.metrics import RecentLatencies
from keepleft.serving.http.middleware.allowed_hosts import allowed_hosts
from keepleft.serving.http.middleware.auth import APIKey, APIKeys
from keepleft.serving.http.routes.server_status import MAX_ADDRESSES, MAX_TENANTS
from keepleft.serving.http.schemas.server_status import ServerStatus
from serving.test_continuous import build_model
from serving.test_http_misbehaving_clients import Stuck, wait_until
from serving.tiny_services import Slow, client, decoder, encoder, running, translator

pytestmark = pytest.mark.usefixtures("one_thread")
PATH = "/explore/server"
A, B, OPERATOR = APIKey("a-key", weight=2), APIKey("b-key"), APIKey("the-operator", operator=True)
KEYS = APIKeys([A, B, OPERATOR])
BODY = {"prompt": "the sea", "max_tokens": 3, "seed": 1}


def bearer(key: APIKey) -> dict[str, str]:
    return {"authorization": f"Bearer {key.secret}"}


def as_password(key: APIKey) -> dict[str, str]:
    return {"authorization": "Basic " + b64encode(f"anybody:{key.secret}".encode()).decode()}


def status_of(http_client, key: APIKey = OPERATOR) -> ServerStatus:
    answer = http_client.get(PATH, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return ServerStatus.model_validate_json(answer.content)


def tenant_of(status: ServerStatus, key: APIKey):
    (row,) = [tenant for tenant in status.tenants if tenant.label == key.tenant[:8]]
    return row


# who may see it --------------------------------------------------------------------------------------


def test_the_operator_sees_the_status_and_other_keys_do_not():
    with client(decoder(), keys=KEYS) as http_client:
        for headers in (bearer(OPERATOR), as_password(OPERATOR)):
            assert http_client.get(PATH, headers=headers).status_code == 200
        for headers in (bearer(A), as_password(B)):
            answer = http_client.get(PATH, headers=headers)
            assert answer.status_code == 403
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "operator_only")
            assert "--operator-key" in error["message"]
        assert http_client.get(PATH).status_code == 401
        assert http_client.post(PATH, json={}, headers=bearer(A)).status_code == 404  # it is no question


def test_without_keys_everybody_is_the_operator():
    with client(decoder()) as http_client:
        status = ServerStatus.model_validate_json(http_client.get(PATH).content)
    assert (status.status, status.model, status.device, status.dtype) == ("ready", "tiny", "cpu", "float32")
    assert [(tenant.label, tenant.operator) for tenant in status.tenants] == [("", True)]
    assert status.connections is None  # no server of ours accepts them


def test_pages_of_other_sites_are_refused():
    with client(decoder(), keys=KEYS) as http_client:
        for site, status in (("same-origin", 200), ("none", 200), ("same-site", 401), ("cross-site", 401)):
            headers = {**as_password(OPERATOR), "sec-fetch-site": site}
            assert http_client.get(PATH, headers=headers).status_code == status
    origin = "https://page.example"
    with client(decoder(), allowed_hosts=allowed_hosts("127.0.0.1"), allowed_origins=[origin]) as http_client:
        for site, status in (("same-origin", 200), ("none", 200), ("same-site", 403), ("cross-site", 403)):
            answer = http_client.get(PATH, headers={"sec-fetch-site": site, "origin": origin})
            assert answer.status_code == status
            assert status == 200 or answer.json()["error"]["code"] == "cross_site"
        answer = http_client.get(PATH, headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert http_client.get(PATH, headers={"host": "evil.example"}).status_code == 421


def test_the_page_of_the_operator_alone_knows_where_to_ask(tmp_path):
    html = '<!doctype html><div id="keepleft" data-api-url="./"></div>'
    (tmp_path / "index.html").write_text(html)
    with client(decoder(), keys=KEYS, page_folder=tmp_path) as http_client:
        pages = {key: http_client.get("/explore/", headers=as_password(key)) for key in (A, OPERATOR)}
        assert pages[A].text == html
        assert pages[OPERATOR].text == html.replace("></div>", ' data-status-url="server"></div>')
        for name in ("content-type", "content-security-policy", "cache-control", "x-frame-options"):
            assert pages[A].headers[name] == pages[OPERATOR].headers[name], name
    with client(decoder(), page_folder=tmp_path) as http_client:
        assert 'data-status-url="server"' in http_client.get("/explore/").text


def test_watching_is_neither_usage_nor_a_line_of_the_log_and_goes_on_to_the_end():
    lines = []
    with client(decoder(), keys=KEYS, log=lambda level, fields: lines.append((level, fields))) as http_client:
        for _ in range(3):
            status = status_of(http_client)
        assert tenant_of(status, OPERATOR).requests == 0
        assert status.responses == {}
        assert [level for level, _ in lines] == ["debug"] * 3
        http_client.service.drain(0.0)
        assert status_of(http_client).status == "draining"
        assert http_client.post("/v1/completions", json=BODY, headers=bearer(A)).status_code == 503


# what it says ----------------------------------------------------------------------------------------


class Gated(ContinuousBatchingEngine):
    """Steps only when it is let."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gate = threading.Semaphore(0)
        self.num_submitted = 0

    def submit(self, handle):
        super().submit(handle)
        self.num_submitted += 1

    def step(self):
        return super().step() if self.gate.acquire(timeout=0.001) else []


def generate(tenant: Tenant, max_new_tokens: int = 50, length: int = 20) -> GenerationRequest:
    config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=2, suppress_tokens=[2])
    return GenerationRequest(list(range(3, 3 + length)), config, tenant=tenant)


@contextmanager
def gated_client():
    make_engine = partial(Gated, max_num_seqs=6, pages=40, page_size=8, weights=KEYS.weights)
    with client(decoder(), make_engine, keys=KEYS) as http_client:
        engine_thread = http_client.service.engine_thread

        engine = engine_thread.engine
        handles = []

        def submit(tenant: Tenant) -> None:
            handles.append(engine_thread.submit(generate(tenant)))

        def let_step(count: int) -> None:
            wait_until(lambda: engine.num_submitted == len(handles))
            before = engine.scheduler.num_steps
            engine.gate.release(count)
            wait_until(lambda: engine.scheduler.num_steps == before + count)

        def cancel_all() -> None:
            for handle in handles:
                engine_thread.cancel(handle)
            let_step(1)

        http_client.submit, http_client.let_step, http_client.cancel_all = submit, let_step, cancel_all
        yield http_client
        engine.gate.release(1000)  # to the end, if the test has failed


def test_numbers_are_right_while_requests_run():
    with gated_client() as http_client:
        tenants = [Tenant(A.tenant, user) for user in ("ann", "eve", "ann", "eve", "ann", "eve")]
        tenants += [Tenant(B.tenant)] * 4
        for tenant in tenants:
            http_client.submit(tenant)
        time.sleep(0.05)
        status = status_of(http_client)
        assert (status.queue.running_rows, status.queue.waiting, status.queue.in_flight) == (0, 10, 10)
        assert 0.05 <= status.queue.oldest_wait < 10
        assert status.cache is not None
        assert (status.cache.used, status.cache.pages, status.cache.page_size) == (0, 40, 8)

        http_client.let_step(4)
        status = status_of(http_client)
        assert (status.queue.running_rows, status.queue.running, status.queue.max_rows) == (6, 6, 6)
        assert (status.queue.waiting, status.queue.in_flight) == (4, 10)
        a, b, operator = (tenant_of(status, key) for key in (A, B, OPERATOR))
        assert (a.weight, b.weight, operator.weight) == (2, 1, 1)
        assert (a.share, b.share, operator.share) == (0.6667, 0.3333, 0)
        assert a.running_rows + b.running_rows == 6
        assert (a.running_rows + a.waiting, b.running_rows + b.waiting) == (6, 4)
        assert (a.in_flight, b.in_flight, operator.in_flight) == (6, 4, 0)
        assert (a.users, b.users, operator.users) == (2, 1, 0)
        assert operator.operator
        assert not a.operator
        assert a.prompt_tokens + b.prompt_tokens == status.prompt_tokens > 0
        assert a.generation_tokens + b.generation_tokens == status.generation_tokens > 0
        pool = http_client.service.engine_thread.engine.runner.pool
        assert status.cache.used + status.cache.prefix == pool.num_pages - pool.num_free > 6
        assert status.steps >= 4
        assert status.step_seconds > 0

        http_client.cancel_all()
        status = status_of(http_client)
        queue = status.queue
        assert (queue.running_rows, queue.paused, queue.waiting, queue.in_flight) == (0, 0, 0, 0)
        assert status.cache.used == 0
        assert status.cache.prefix > 0
        assert tenant_of(status, A).generation_tokens == a.generation_tokens


def test_a_paused_request_is_counted_as_paused():
    with gated_client() as http_client:
        for _ in range(6):
            http_client.submit(Tenant(B.tenant))
        http_client.let_step(2)
        for _ in range(3):
            http_client.submit(Tenant(A.tenant))
        http_client.let_step(1)
        status = status_of(http_client)
        b = tenant_of(status, B)
        assert tenant_of(status, A).running_rows == 3
        assert (b.running_rows, b.paused, b.waiting) == (3, 3, 0)
        assert (status.queue.paused, status.queue.waiting, status.queue.oldest_wait) == (3, 0, 0)
        http_client.cancel_all()


def test_usage_refusals_and_times_to_the_first_token_are_counted():
    with client(decoder(), keys=KEYS, limits=Limits(requests=1, choices=2, prompts=2)) as http_client:
        for body, status_code in ((BODY, 200), (BODY, 200), ({**BODY, "prompt": ["a", "b"]}, 429)):
            assert (
                http_client.post("/v1/completions", json=body, headers=bearer(A)).status_code == status_code
            )
        assert http_client.post("/v1/completions", json={}, headers=bearer(B)).status_code == 400
        status = status_of(http_client)
        a, b = tenant_of(status, A), tenant_of(status, B)
        assert (a.requests, a.rate_limited, b.requests, b.rate_limited) == (3, 1, 1, 0)
        assert status.responses == {"2xx": 2, "429": 1, "4xx": 1}
        assert status.time_to_first_token.requests == 2
        assert 0 < status.time_to_first_token.p50 <= status.time_to_first_token.p95
        own_metrics = http_client.get("/metrics", headers=bearer(A)).text
        assert "keepleft_key_rate_limited_total 1.0" in own_metrics
        assert status.tenants[0] == a  # the one with the most tokens is the first


def test_the_answer_is_bounded():
    keys = APIKeys([*(APIKey(f"key-{n}") for n in range(200)), OPERATOR])
    with client(decoder(), Stuck, keys=keys) as http_client:
        for n in range(30):
            http_client.service.engine_thread.engine.prompt_tokens[APIKey(f"key-{n}").tenant] = 1000 - n
        busy = APIKey("key-150")
        http_client.service.engine_thread.submit(generate(Tenant(busy.tenant)))
        status = status_of(http_client)
        assert (len(status.tenants), status.more_tenants) == (MAX_TENANTS, 201 - MAX_TENANTS)
        assert tenant_of(status, busy).in_flight == 1
        tokens = [tenant.prompt_tokens for tenant in status.tenants]
        assert tokens == sorted(tokens, reverse=True)
        assert tokens[0] == 1000
        answer = http_client.get(PATH, headers=bearer(OPERATOR))
        assert len(answer.content) < 16_384
        for key in (busy, OPERATOR):  # of a key nothing but the label is told
            assert key.secret not in answer.text
            assert key.tenant[:9] not in answer.text
        http_client.service.engine_thread.engine.is_stuck = False


def test_connections_are_counted_by_address():
    with running(decoder(), limits=Limits(connections=64, connections_per_address=4)) as (port, _, _):
        crowd = []
        try:
            for n in range(2, 2 + MAX_ADDRESSES + 1):
                address = (f"127.0.0.{n}", 0)
                count = 5 if n == 2 else 1
                crowd += [
                    socket.create_connection(("127.0.0.1", port), 30, source_address=address)
                    for _ in range(count)
                ]
        except OSError:
            pytest.skip("this system has no address 127.0.0.2")
        connections = httpx.get(f"http://127.0.0.1:{port}{PATH}").json()["connections"]
        assert (connections["limit"], connections["limit_per_address"]) == (64, 4)
        assert connections["refused"] == 1
        assert connections["addresses"] == MAX_ADDRESSES + 2  # this client has one too
        assert len(connections["top"]) == MAX_ADDRESSES
        assert connections["top"][0]["address"] == "127.0.0.2"
        assert connections["top"][0]["open"] >= 4
        for connection in crowd:
            connection.close()

        def only_one_is_open():
            answer = httpx.get(f"http://127.0.0.1:{port}{PATH}").json()["connections"]
            return (answer["open"], answer["addresses"]) == (1, 1)

        wait_until(only_one_is_open)


def test_work_beside_the_engine_is_counted():
    is_answered = threading.Event()

    class Waiting:
        def ask(self, question, params, tenant):
            is_answered.wait(30)
            return {}

    with running(decoder(), explorer=Waiting()) as (port, service, _):
        url = f"http://127.0.0.1:{port}/explore"
        threads = [
            threading.Thread(target=httpx.post, args=(f"{url}/model_info",), kwargs={"json": {}})
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: service.explorer_thread.counts() == (1, 2))
        work = {item["name"]: item for item in httpx.get(f"{url}/server").json()["beside_engine"]}
        assert work["questions"] == {"name": "questions", "running": 1, "waiting": 2}
        assert set(work) == set(get_args(service_module.WorkName))
        is_answered.set()
        for thread in threads:
            thread.join(30)
        wait_until(lambda: service.explorer_thread.counts() == (0, 0))


@pytest.mark.parametrize(
    ("load", "engine", "body"),
    [
        (encoder, EncoderEngine, ("/v1/embeddings", {"input": "the sea"})),
        (translator, ContinuousBatchingEngine, ("/v1/translate", {"input": "the sea", "max_new_tokens": 3})),
        (decoder, SequentialEngine, ("/v1/completions", BODY)),
    ],
)
def test_every_engine_says_what_it_is_doing(load, engine, body):
    with client(load(), engine) as http_client:
        assert http_client.post(body[0], json=body[1]).status_code == 200
        status = ServerStatus.model_validate_json(http_client.get(PATH).content)
        (tenant,) = status.tenants
        assert status.prompt_tokens == tenant.prompt_tokens > 0
        assert status.generation_tokens == tenant.generation_tokens
        assert (status.generation_tokens == 0) == (engine is EncoderEngine)
        assert (status.cache is None) == (engine is not ContinuousBatchingEngine)
        assert (status.queue.running, status.queue.waiting, status.queue.in_flight) == (0, 0, 0)
        assert "keepleft_engine_steps_total" in http_client.get("/metrics").text


# the engine's thread ---------------------------------------------------------------------------------


def test_a_busy_engine_is_asked_once_for_many_and_not_too_often():
    class Counted(Slow):
        wait = 0.002
        num_asked = 0

        def activity(self):
            self.num_asked += 1
            return super().activity()

    engine = Counted(decoder().model)
    engine_thread = EngineThread(engine)
    handle = engine_thread.submit(generate(Tenant(), 4000))
    start = time.monotonic()
    engine.num_asked = 0
    futures = []
    while time.monotonic() - start < 3 * STATUS_INTERVAL_SECONDS:
        futures.append(engine_thread.request_status())
        time.sleep(0.002)
    statuses = [future.result(10) for future in futures]
    elapsed = time.monotonic() - start
    assert len(futures) > 20
    assert 1 <= engine.num_asked <= elapsed / STATUS_INTERVAL_SECONDS + 2
    times = [status.taken_at for status in statuses]
    assert times == sorted(times)
    engine_thread.cancel(handle)
    engine_thread.drain(5)
    assert engine_thread.request_status().result(1).totals["in_flight"] == 0  # its thread has ended


def test_a_long_step_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(service_module, "STATUS_TIMEOUT_SECONDS", 0.05)
    is_let = threading.Event()

    class Long(SequentialEngine):
        def step(self):
            is_let.wait(30)
            return super().step()

    with client(decoder(), Long) as http_client:
        http_client.service.engine_thread.submit(generate(Tenant(), 2))
        time.sleep(0.1)
        status = ServerStatus.model_validate_json(http_client.get(PATH).content)
        assert status.engine_age >= 0.1
        assert http_client.get("/metrics").status_code == 200
        is_let.set()
        wait_until(lambda: not http_client.service.engine_thread.in_flight)
        monkeypatch.undo()
        status = ServerStatus.model_validate_json(http_client.get(PATH).content)
        assert status.queue.in_flight == 0
        assert status.engine_age < 10


def test_an_engine_that_cannot_say_goes_on():
    class Mute(SequentialEngine):
        is_mute = False

        def activity(self):
            if self.is_mute:
                raise KeyError("activity")
            return super().activity()

    with client(decoder(), Mute) as http_client:
        http_client.service.engine_thread.engine.is_mute = True
        assert http_client.get(PATH).status_code == 500
        assert http_client.post("/v1/completions", json=BODY).status_code == 200
        http_client.service.engine_thread.engine.is_mute = False
        assert http_client.get(PATH).status_code == 200


def test_activity_is_counted_by_key():
    def handle(tenant, submitted_at, started_at=None):
        return RequestHandle(
            PromptRequest("embed", [3], tenant=tenant), submitted_at=submitted_at, started_at=started_at
        )

    a, b = Tenant("a", "ann"), Tenant("b", "bob")
    waiting = [handle(a, 7.0), handle(a, 4.0, 5.0), handle(Tenant("a", "eve"), 9.0), handle(b, 9.5)]
    activity = count_activity([(a, 4), (a, 1)], [b], waiting, now=10.0)
    assert activity == {
        "a": KeyActivity(running_rows=5, running=2, waiting=3, oldest_wait=3.0, users=2),
        "b": KeyActivity(paused=1, waiting=1, oldest_wait=0.5, users=1),
    }
    assert json.dumps(count_activity([], [], [], 0.0)) == "{}"


def test_a_prompt_that_waits_for_pages_is_counted_once():
    engine = ContinuousBatchingEngine(build_model("gpt2"), max_num_seqs=4, pages=6, page_size=8)
    first, second = (RequestHandle(generate(Tenant(), 16)) for _ in range(2))
    for handle in (first, second):
        engine.submit(handle)
    while engine.busy:
        engine.step()
    stats = engine.stats()
    assert stats["prefix_cache_queries"] >= 2 * (19 // 8)
    assert stats["prefix_cache_queries"] <= 2 * (19 // 8) + stats["preemptions"] * 5
    assert 0 < stats["prefix_cache_hits"] <= stats["prefix_cache_queries"]


def test_quantiles_are_of_the_last_minutes():
    latencies = RecentLatencies()
    assert latencies.quantiles((0.5, 0.95), 0.0) == (0, [None, None])
    for n in range(100):
        latencies.add(float(n), now=1000.0)
    latencies.add(1e6, now=0.0)
    assert latencies.quantiles((0.5, 0.95), 1001.0) == (100, [50.0, 94.0])
    assert latencies.quantiles((0.5,), 2000.0) == (0, [None])
