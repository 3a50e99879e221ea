"""Behind a gateway: request ids, the label of a replica, gauges under vLLM's names, probes."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from contextlib import ExitStack
from typing import get_args

import httpx
import pytest
import yaml

from keepleft.cli import main
from keepleft.cli.command_table import find_command
from keepleft.cli.parser import build_parser
from keepleft.cli.serve import REPLICA_VARIABLE
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.encoder import EncoderEngine
from keepleft.serving.engine.request import GenerationRequest
from keepleft.serving.engine.sequential import SequentialEngine
from keepleft.serving.http.limits import Limits
from keepleft.serving.http.metrics import MAX_REPLICA_LENGTH, Metrics
from keepleft.serving.http.middleware.auth import API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, APIKey, APIKeys
from keepleft.serving.http.request_id import MAX_REQUEST_ID_LENGTH
from keepleft.serving.http.routes.status import LIVE_STATUSES, READY_STATUSES, health_response
from keepleft.serving.http.schemas.responses import HealthStatus
from keepleft.serving.http.server import GRACEFUL_SHUTDOWN_SECONDS
from keepleft.serving.http.service import Service
from serving.test_http_docs import PAGE, blocks
from serving.test_http_misbehaving_clients import Stuck, wait_until
from serving.test_http_serve import model_folder, served  # noqa: F401 (a fixture)
from serving.tiny_services import Slow, client, decoder, encoder, running

pytestmark = pytest.mark.usefixtures("one_thread")
BODY = {"prompt": "the sea", "max_tokens": 3, "seed": 1}
OUR_ID = re.compile(r"req_[0-9a-f]{24}")


def logged_client(lines, *args, **options):
    return client(decoder(), *args, log=lambda level, fields: lines.append(fields), **options)


# request ids -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_id", ["a", "7d8f5c1e-0a52-4b7e-9d1a-2f6f0e9b3c11", "Root=1-67891233:abc/def+g.h", "x" * 128]
)
def test_a_plain_id_is_taken_over_in_the_header_the_log_and_the_body(request_id):
    lines = []
    with logged_client(lines) as http_client:
        answer = http_client.post("/v1/completions", json=BODY, headers={"x-request-id": request_id})
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == [request_id]
    assert lines[0]["id"] == request_id
    assert answer.json()["id"] == f"cmpl-{request_id}"


@pytest.mark.parametrize(
    "request_id",
    [
        "",
        "x" * (MAX_REQUEST_ID_LENGTH + 1),
        "two words",
        "a, b",
        'a","level":"error',
        "a\x1b[31m",
        "a\tb",
        "a\nb",
        "a\n",
        "a\r\nset-cookie: b=c",
        "\x00",
        "<b>a</b>",
        "${jndi:ldap://a/b}",
        "é",
        "１２３",
    ],
)
def test_any_other_id_is_replaced_by_one_of_ours(request_id):
    lines = []
    with logged_client(lines) as http_client:
        answer = http_client.get("/v1/models", headers={"x-request-id": request_id.encode("utf-8")})
    assert answer.status_code == 200
    (answered_id,) = answer.headers.get_list("x-request-id")
    assert OUR_ID.fullmatch(answered_id)
    assert lines[0]["id"] == answered_id
    assert "set-cookie" not in answer.headers


def test_two_ids_are_replaced_by_one_of_ours():
    with client(decoder()) as http_client:
        for names in (("x-request-id", "x-request-id"), ("X-Request-Id", "x-request-ID")):
            headers = [(name, "a-plain-id") for name in names]
            answer = http_client.get("/v1/models", headers=headers)
            (answered_id,) = answer.headers.get_list("x-request-id")
            assert OUR_ID.fullmatch(answered_id)


def test_an_id_is_taken_over_whatever_the_answer_is(monkeypatch):
    def break_down(*_):
        raise ZeroDivisionError

    headers = {"x-request-id": "gateway-1"}
    lines = []
    with logged_client(lines, keys=APIKeys(["a-key"])) as http_client:
        answer = http_client.get("/v1/models", headers=headers)
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (401, ["gateway-1"])
        monkeypatch.setattr(Service, "check_model", break_down)
        authorized = {**headers, "authorization": "Bearer a-key"}
        answer = http_client.post("/v1/completions", json=BODY, headers=authorized)
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (500, ["gateway-1"])
        assert "it was logged under gateway-1" in answer.json()["error"]["message"]
    assert {line["id"] for line in lines} == {"gateway-1"}


def test_over_a_socket_the_id_comes_back_once_and_unchanged():
    with (
        running(decoder()) as (port, _, _),
        socket.create_connection(("127.0.0.1", port), timeout=10) as connection,
    ):
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nX-Request-ID:  Gate.Way-7 \r\n"
            b"connection: close\r\n\r\n"
        )
        head = b"".join(iter(lambda: connection.recv(4096), b"")).partition(b"\r\n\r\n")[0]
    (line,) = [line for line in head.split(b"\r\n") if line.lower().startswith(b"x-request-id")]
    assert line.partition(b": ")[2] == b"Gate.Way-7"


def test_a_request_with_the_id_of_another_neither_disturbs_it_nor_gets_its_answer():
    bodies = [
        {**BODY, "prompt": prompt, "max_tokens": 12, "stream": True} for prompt in ("the sea", "a ship")
    ]
    headers = {"x-request-id": "the-same"}
    lines = []
    with running(decoder(), Slow, log=lambda level, fields: lines.append(fields)) as (port, service, _):
        address = f"http://127.0.0.1:{port}/v1/completions"
        alone = [httpx.post(address, json=body, timeout=60).text for body in bodies]
        together = {}

        def ask(number):
            together[number] = httpx.post(address, json=bodies[number], headers=headers, timeout=60).text

        threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(service.engine_thread.in_flight) == 2)
        leaving = {**bodies[0], "max_tokens": 500, "logit_bias": {"2": -100}}
        with httpx.stream("POST", address, json=leaving, headers=headers, timeout=60) as stream:
            next(stream.iter_lines())  # the client leaves in the middle
        for thread in threads:
            thread.join(60)
        wait_until(lambda: not service.engine_thread.in_flight)
        wait_until(lambda: len(lines) == 5)

    def texts(stream):
        events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
        return [choice["text"] for event in events for choice in json.loads(event)["choices"]]

    for number in (0, 1):
        assert '"id":"cmpl-the-same"' in together[number]
        assert texts(together[number]) == texts(alone[number])
    assert sum(line["id"] == "the-same" for line in lines) == 3  # each request has a line of its own


# the label of a replica ------------------------------------------------------------------------------

KEYS = APIKeys([APIKey("a-key", name="team-a"), APIKey("the-operator", operator=True)])
OPERATOR = {"authorization": "Bearer the-operator"}


def samples(text):
    """Names with labels, and values, of metrics that do not depend on the clock."""
    lines = [line.rpartition(" ") for line in text.splitlines() if line]
    return [name if re.search(r"seconds|_created", name) else (name, value) for name, _, value in lines]


def read_metrics(key="the-operator", **options):
    with client(decoder(), keys=KEYS, **options) as http_client:
        headers = {"authorization": "Bearer a-key"}
        assert http_client.post("/v1/completions", json=BODY, headers=headers).status_code == 200
        return http_client.get("/metrics", headers={"authorization": f"Bearer {key}"}).text


@pytest.mark.parametrize("key", ["the-operator", "a-key"])
def test_the_replica_is_a_label_of_every_metric_and_nothing_else_changes(key):
    plain, labelled = read_metrics(key), read_metrics(key, replica="pod-7")
    assert "replica" not in plain
    sample_lines = [line for line in labelled.splitlines() if not line.startswith("#")]
    assert sample_lines
    assert all(line.count('replica="pod-7"') == 1 for line in sample_lines)
    unlabelled = re.sub(r'\{replica="pod-7"\}|replica="pod-7",|,replica="pod-7"', "", labelled)
    assert samples(unlabelled) == samples(plain)


@pytest.mark.parametrize("name", ["", "a b", 'a"b', "a\nb", "é", "x" * (MAX_REPLICA_LENGTH + 1)])
def test_the_name_of_a_replica_is_plain(name):
    with pytest.raises(ValueError, match=r"the name of the replica is .*: use at most"):
        read_metrics(replica=name)


@pytest.mark.parametrize("way", ["option", "environment", "both"])
def test_serve_takes_the_name_of_the_replica_by_option_or_environment(way, model_folder):  # noqa: F811
    options = [] if way == "environment" else ["--replica", "pod-7"]
    variable = {"option": "", "environment": "pod-7", "both": "another"}[way]
    with served(model_folder, *options, env={"KEEPLEFT_REPLICA": variable}) as (address, process, lines):
        assert httpx.get(f"{address}/v1/models").status_code == 200
        assert 'keepleft_prompt_tokens_total{replica="pod-7"} 0.0' in httpx.get(f"{address}/metrics").text
        process.terminate()
        assert process.wait(30) == 0
    (line,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert (line["route"], line["replica"]) == ("/v1/models", "pod-7")


def test_a_replica_without_a_plain_name_is_refused_before_its_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setenv("KEEPLEFT_REPLICA", "pod 7")
    assert main(["serve", "no-such-model", "--port", "0"]) == 2
    assert "the name of the replica is 'pod 7': use at most 253 letters" in capsys.readouterr().err


# gauges under vLLM's names ---------------------------------------------------------------------------

ENDLESS = {"prompt": "the sea", "max_tokens": 500, "logit_bias": {"2": -100}, "stream": True}


def read_gauges(text):
    """Of each gauge under vLLM's names, its labels and its value."""
    assert set(re.findall(r"^# TYPE vllm:(\w+) (\w+)", text, re.M)) == {
        ("num_requests_running", "gauge"),
        ("num_requests_waiting", "gauge"),
        ("kv_cache_usage_perc", "gauge"),
    }
    lines = re.findall(r"^vllm:(\w+)\{(.*)\} (\S+)$", text, re.M)
    assert {labels for _, labels, _ in lines} == {'model_name="tiny"'}
    return {name: float(value) for name, _, value in lines}


class TwoRows(ContinuousBatchingEngine):
    """A batch of two rows and a few pages; its steps take long enough to be seen."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer, max_num_seqs=2, pages=40, page_size=16)

    def step(self):
        time.sleep(0.01)
        return super().step()


def test_the_gauges_are_the_load_of_the_engine():
    with running(decoder(), TwoRows) as (port, service, _):
        address = f"http://127.0.0.1:{port}"
        read = lambda: read_gauges(httpx.get(f"{address}/metrics").text)
        idle = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
        assert read() == idle
        with ExitStack() as streams:
            for _ in range(5):
                stream = httpx.stream("POST", f"{address}/v1/completions", json=ENDLESS, timeout=60)
                streams.enter_context(stream)
            wait_until(lambda: read()["num_requests_running"] == 2)
            gauges = read()
            assert gauges["num_requests_waiting"] == 3
            assert 0 < gauges["kv_cache_usage_perc"] <= 1
        wait_until(lambda: not service.engine_thread.in_flight)
        wait_until(lambda: read() == idle)  # what only the prefix cache holds is free, as in vLLM


def test_what_came_during_a_step_counts_as_waiting():
    with running(decoder(), Stuck) as (port, service, _):
        for _ in range(3):
            service.engine_thread.submit(GenerationRequest([5, 6], GenerationConfig(max_new_tokens=3)))
        gauges = read_gauges(httpx.get(f"http://127.0.0.1:{port}/metrics").text)
        assert (gauges["num_requests_running"], gauges["num_requests_waiting"]) == (0, 3)
        service.abort_all()
        service.engine_thread.engine.is_stuck = False


def test_an_encoder_has_the_gauges_too():
    with client(encoder(), EncoderEngine) as http_client:
        assert set(read_gauges(http_client.get("/metrics").text).values()) == {0.0}


def test_the_name_of_the_model_is_quoted_in_its_label():
    text = Metrics('runs/"a"\n\\b').render({}).decode()
    assert 'vllm:num_requests_waiting{model_name="runs/\\"a\\"\\n\\\\b"} 0.0' in text


def test_only_the_operator_sees_the_gauges():
    assert "vllm:" not in read_metrics("a-key")
    assert "vllm:num_requests_waiting" in read_metrics("the-operator")
    with client(decoder(), keys=KEYS) as http_client:
        assert http_client.get("/metrics").status_code == 401


# probes ----------------------------------------------------------------------------------------------

READY_PATHS = ("/health", "/health/ready")
LIVE_PATH = "/health/live"


def probe(http_client):
    """The status, and the status codes of readiness and liveness; all paths agree."""
    answers = {path: http_client.get(path) for path in (*READY_PATHS, LIVE_PATH)}
    (status,) = {answer.json()["status"] for answer in answers.values()}
    (ready_code,) = {answers[path].status_code for path in READY_PATHS}
    for answer in answers.values():
        assert answer.json() == {"status": status}
        assert ("retry-after" in answer.headers) == (answer.status_code == 503)
    return status, ready_code, answers[LIVE_PATH].status_code


def test_a_server_that_drains_is_live_and_not_ready():
    with client(decoder()) as http_client:
        assert probe(http_client) == ("ready", 200, 200)
        http_client.service.drain(1.0)
        assert probe(http_client) == ("draining", 503, 200)


def test_a_server_that_drains_is_live_while_its_last_requests_run():
    with running(decoder(), Slow, shutdown_timeout=60) as (port, service, server):
        address = f"http://127.0.0.1:{port}"
        with (
            httpx.Client(base_url=address, timeout=60) as http_client,
            http_client.stream("POST", "/v1/completions", json=ENDLESS) as stream,
        ):
            next(stream.iter_lines())
            server.stop()
            wait_until(lambda: service.draining)
            assert probe(http_client) == ("draining", 503, 200)
        wait_until(lambda: not service.engine_thread.in_flight)


class BrokenEngine(SequentialEngine):
    """Breaks in a way that ends its thread."""

    def submit(self, handle):
        raise MemoryError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_whose_engine_has_ended_is_neither_ready_nor_live():
    with client(decoder(), BrokenEngine) as http_client:
        assert probe(http_client) == ("ready", 200, 200)
        handle = http_client.service.engine_thread.submit(GenerationRequest([5], GenerationConfig()))
        http_client.service.engine_thread.thread.join(10)
        assert probe(http_client) == ("failed", 503, 503)
        http_client.service.draining = True
        assert probe(http_client) == ("failed", 503, 503)  # it will not finish what it has
        http_client.service.engine_thread.in_flight.discard(handle)


class HangingEngine(SequentialEngine):
    """Its steps do not end before `may_go_on` is set."""

    def __init__(self, model, tokenizer):
        super().__init__(model, tokenizer)
        self.may_go_on = threading.Event()

    def step(self):
        assert self.may_go_on.wait(30)
        return super().step()


def test_a_step_that_does_not_end_makes_the_server_neither_ready_nor_live():
    seconds = 0.3
    with client(decoder(), HangingEngine, limits=Limits(step_seconds=seconds)) as http_client:
        engine_thread = http_client.service.engine_thread
        time.sleep(2 * seconds)
        assert probe(http_client) == ("ready", 200, 200)  # an engine that waits for work has no step
        start = time.monotonic()
        engine_thread.submit(GenerationRequest([5, 6], GenerationConfig(max_new_tokens=3)))
        wait_until(lambda: http_client.get(LIVE_PATH).status_code == 503)
        assert time.monotonic() - start >= seconds
        assert probe(http_client) == ("stalled", 503, 503)
        http_client.service.draining = True
        assert probe(http_client) == ("stalled", 503, 503)
        http_client.service.draining = False
        engine_thread.engine.may_go_on.set()
        wait_until(lambda: not engine_thread.in_flight)
        assert probe(http_client) == ("ready", 200, 200)  # the step was only long


def test_many_short_steps_are_not_a_long_one():
    with client(decoder(), Slow, limits=Limits(step_seconds=0.5)) as http_client:
        body = {**ENDLESS, "max_tokens": 60, "stream": False}
        statuses = set()
        request = threading.Thread(target=http_client.post, args=("/v1/completions",), kwargs={"json": body})
        request.start()
        while request.is_alive():
            statuses.add(http_client.service.status)
            time.sleep(0.01)
    assert statuses == {"ready"}


def test_the_engine_is_not_asked_for_its_health(monkeypatch):
    with client(decoder()) as http_client:
        monkeypatch.setattr(http_client.service.engine_thread, "condition", None)  # held for ever
        assert probe(http_client) == ("ready", 200, 200)
        monkeypatch.undo()


def test_probes_need_no_key_and_are_documented():
    with client(decoder(), keys=KEYS) as http_client:
        assert probe(http_client) == ("ready", 200, 200)
        assert http_client.get("/health/other").status_code == 401
        document = http_client.get("/openapi.json", headers=OPERATOR).json()
        for path in (*READY_PATHS, LIVE_PATH):
            operation = document["paths"][path]["get"]
            assert operation["security"] == []
            for status in ("200", "503"):
                schema = operation["responses"][status]["content"]["application/json"]["schema"]
                assert schema["$ref"].endswith("/HealthResponse")
        health = document["components"]["schemas"]["HealthResponse"]["properties"]["status"]
        assert health["enum"] == ["ready", "draining", "stalled", "failed"]


def test_probes_are_logged_at_debug_only():
    lines = []
    log = lambda level, fields: lines.append((level, fields["route"]))
    with client(decoder(), log=log) as http_client:
        probe(http_client)
    assert sorted(lines) == [("debug", path) for path in sorted((*READY_PATHS, LIVE_PATH))]


# docs/serving.md -------------------------------------------------------------------------------------


def test_the_deployment_of_the_docs_fits_the_server():
    (block,) = blocks("yaml")
    deployment = yaml.safe_load(block)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    selector = deployment["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["template"]["metadata"]["labels"] == selector
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    command, *arguments = container["args"]
    options = build_parser(find_command(command).load()).parse_args(arguments)
    assert (options.host, options.port) == ("0.0.0.0", ports["http"])
    assert {variable["name"] for variable in container["env"]} == {
        API_KEY_VARIABLE,
        OPERATOR_KEY_VARIABLE,
        REPLICA_VARIABLE,
    }
    with client(decoder(), keys=KEYS) as http_client:
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
        for http_get in probes.values():
            assert http_get["port"] in ports
            assert http_client.get(http_get["path"]).json() == {"status": "ready"}
        http_client.service.drain(1.0)
        codes = {name: http_client.get(http_get["path"]).status_code for name, http_get in probes.items()}
    assert codes == {"startup": 200, "readiness": 503, "liveness": 200}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 10 * 60  # "ten minutes to load"
    sleep_seconds = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    shutdown_seconds = options.shutdown_timeout + GRACEFUL_SHUTDOWN_SECONDS
    assert pod["terminationGracePeriodSeconds"] > sleep_seconds + shutdown_seconds


def test_the_proxy_of_the_docs_fits_the_limits():
    text = "\n".join(blocks("nginx"))
    limits = Limits()
    number = lambda pattern: int(re.search(pattern, text)[1])
    assert number(r"keepalive_timeout (\d+)s;") < limits.idle_seconds
    assert number(r"client_max_body_size (\d+)m;") << 20 == limits.body
    assert number(r"proxy_read_timeout (\d+)s;") >= limits.seconds
    assert text.count("{") == text.count("}")


def test_every_status_of_health_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+) \| (\d+) \|$", PAGE, re.M)
    assert [status for status, *_ in rows] == list(get_args(HealthStatus))
    for status, ready_code, live_code in rows:
        assert health_response(status, READY_STATUSES).status_code == int(ready_code)
        assert health_response(status, LIVE_STATUSES).status_code == int(live_code)
