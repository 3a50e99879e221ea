"""Replicas by Ray Serve: each answers as one server would, and none that dies takes an answer with it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest

from batch.jobs import save
from cluster.processes import WAIT_SECONDS, processes_called, start_keepleft, wait_until
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from serving.tiny_services import CHAT, client, decoder

pytest.importorskip("ray", reason="needs ray: pip install 'keepleft[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the processes of Ray are found in /proc"),
]
DRIVER = Path(__file__).with_name("replica_driver.py")
REPLICA = "ServeReplica"
RAYS_WORDS = "\x1b[33m(raylet)"  # what Ray says of processes that died
NUM_REQUESTS = 300
ENDLESS = {"prompt": "the sea", "max_tokens": 3000, "logit_bias": {"2": -100}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(decoder(chat_template=CHAT), tmp_path_factory.mktemp("replicas") / "tiny")


class Replicas:
    """The replicas of a driver, as its tests see them."""

    def __init__(self, process: subprocess.Popen, port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"

    @property
    def pids(self) -> list[int]:
        return processes_called(REPLICA, self.process.pid)

    def command(self, word: str) -> None:
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline().strip()) != f"done {word}":
            assert line.startswith(RAYS_WORDS), line

    def wait_for(self, count: int) -> None:
        """Until so many replicas answer."""
        names = Counter()
        end = time.monotonic() + WAIT_SECONDS
        while len(names) < count:
            assert time.monotonic() < end, names
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"{self.url}/health", headers={"x-session-id": str(names.total())})
                if answer.status_code == 200:
                    names[answer.headers["x-replica"]] += 1
            time.sleep(0.02)


@contextmanager
def running(model, *words):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, str(DRIVER), model, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        if not line.startswith("ready"):
            process.kill()
            pytest.fail(f"the replicas do not start: {line}")
        yield Replicas(process, int(line.split()[1]))
    finally:
        if process.poll() is None:
            process.stdin.close()
        try:
            process.wait(WAIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        with suppress(OSError):
            process.stdin.close()


@pytest.fixture(scope="module")
def replicas(model):
    with running(model) as out:
        out.wait_for(2)
        yield out


def bodies() -> list[tuple[str, dict]]:
    """Mixed requests: greedy, sampled with a seed, beams, chats, scores.

    Two tokens to draw from: the last digits of a probability depend on the batch, and many tokens have many
    borders on which a draw may lie.
    """
    out = []
    for n in range(NUM_REQUESTS):
        prompt = f"the ship sails {n}"
        out.append(
            [
                ("completions", {"prompt": prompt, "max_tokens": 4 + n % 5, "seed": n, "top_k": 2}),
                ("completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0}),
                ("completions", {"prompt": prompt, "max_tokens": 5, "num_beams": 3, "temperature": 0}),
                (
                    "chat/completions",
                    {
                        "messages": [{"role": "user", "content": prompt}],
                        "max_tokens": 5,
                        "seed": n,
                        "top_k": 2,
                    },
                ),
                ("score", {"input": prompt}),
            ][n % 5]
        )
    return out


def content(answer: dict, number=float) -> object:
    """What must be equal: not ids and times. `number`: what becomes of a log-probability."""
    if "choices" in answer:
        return [
            (choice.get("text") or choice.get("message"), choice["finish_reason"])
            for choice in answer["choices"]
        ]
    return [
        (number(scored["logprob"]), [token["token"] for token in scored["tokens"]])
        for scored in answer["data"]
    ]


def nearly(value: float) -> object:
    return pytest.approx(value, abs=0.01)


@pytest.fixture(scope="module")
def expected(model) -> list:
    """What one server in this process answers."""
    engine = lambda model, tokenizer: ContinuousBatchingEngine(model, tokenizer, max_num_seqs=16)
    with client(decoder(chat_template=CHAT), engine) as http_client:
        answers = [http_client.post(f"/v1/{route}", json=body) for route, body in bodies()]
    assert {answer.status_code for answer in answers} == {200}
    return [content(answer.json(), nearly) for answer in answers]


def ask_all(url: str, *, on_answer=lambda number: None, workers: int = 8, retries: int = 2) -> list:
    """The answers to all requests, by OpenAI's client, which tries again by itself."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=60) as api:

        def ask(numbered):
            number, (route, body) = numbered
            answer = api.post(f"/{route}", body=body, cast_to=httpx.Response)
            on_answer(number)
            return content(answer.json())

        with ThreadPoolExecutor(workers) as threads:
            return list(threads.map(ask, enumerate(bodies())))


def test_replicas_answer_as_one_server_does(replicas, expected):
    assert ask_all(replicas.url, retries=0) == expected


def test_requests_of_a_session_find_the_same_replica(replicas):
    names = {}
    for n in range(40):
        session = f"user-{n % 10}"
        answer = httpx.get(f"{replicas.url}/v1/models", headers={"x-session-id": session})
        assert names.setdefault(session, answer.headers["x-replica"]) == answer.headers["x-replica"]
    assert len(set(names.values())) == 2
    without = {httpx.get(f"{replicas.url}/v1/models").headers["x-replica"] for _ in range(10)}
    assert len(without) == 2


def test_an_id_of_the_gateway_comes_back_once(replicas):
    answer = httpx.get(f"{replicas.url}/v1/models", headers={"x-request-id": "gateway-1"})
    assert answer.headers.get_list("x-request-id") == ["gateway-1"]


def metric(replicas, session: str, name: str) -> float:
    text = httpx.get(f"{replicas.url}/metrics", headers={"x-session-id": session}).text
    return float(re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)[1])


def test_a_client_that_leaves_frees_its_pages(replicas):
    gauge = "vllm:num_requests_running"
    headers = {"x-session-id": "leaver"}
    assert metric(replicas, "leaver", gauge) == 0
    with httpx.stream(
        "POST", f"{replicas.url}/v1/completions", json={**ENDLESS, "stream": True}, headers=headers
    ) as stream:
        lines = stream.iter_lines()  # httpx closes the stream with it
        next(lines)
        wait_until(lambda: metric(replicas, "leaver", gauge) == 1, "the request runs")
        assert metric(replicas, "leaver", "vllm:kv_cache_usage_perc") > 0
    wait_until(lambda: metric(replicas, "leaver", gauge) == 0, "the request was cancelled")


def test_too_many_requests_get_our_429(model):
    """The limits are those of the server, and so is the answer."""
    with (
        served(model, "--limits.requests", "1") as url,
        httpx.Client(base_url=url, timeout=60) as http_client,
    ):
        headers = {"x-session-id": "one"}

        def hold():
            with (
                suppress(httpx.HTTPError),
                http_client.stream(
                    "POST", "/v1/completions", json={**ENDLESS, "stream": True}, headers=headers
                ) as stream,
            ):
                lines = stream.iter_lines()
                next(lines)
                started.set()
                release.wait(60)

        started, release = threading.Event(), threading.Event()
        thread = threading.Thread(target=hold)
        thread.start()
        assert started.wait(60)
        answer = http_client.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        release.set()
        thread.join(60)
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert answer.headers["retry-after"] == "1"


@contextmanager
def served(model, *arguments):
    """The command: its address. It ends with Ctrl-C."""
    process = start_keepleft("serve", model, "--replicas", "1", "--port", "0", "--threads", "1", *arguments)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "the API at" in line:
                break
        else:
            pytest.fail("".join(lines))
        assert any("memory: " in line and "replica " in line for line in lines), lines
        yield re.search(r"http://\S+:\d+", line)[0]
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=WAIT_SECONDS)[1]
        assert process.returncode == 0
        assert error.strip() == "keepleft: shutting down the replicas"
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_a_killed_replica_costs_no_answer(replicas, expected):
    replicas.wait_for(2)
    victim = replicas.pids[0]

    def kill(number: int) -> None:
        if number == NUM_REQUESTS // 3:
            os.kill(victim, signal.SIGKILL)

    assert ask_all(replicas.url, on_answer=kill) == expected
    assert victim not in replicas.pids


def test_a_stream_that_breaks_says_so(replicas):
    replicas.wait_for(2)
    ends = []

    def read(session: str) -> None:
        lines = []
        try:
            with httpx.stream(
                "POST",
                f"{replicas.url}/v1/completions",
                json={**ENDLESS, "stream": True},
                headers={"x-session-id": session},
                timeout=60,
            ) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    started.add(session)
        except httpx.TransportError as error:
            lines.append(type(error).__name__)
        ends.append([line for line in lines if line][-1])

    started: set[str] = set()
    threads = [threading.Thread(target=read, args=(f"user-{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(started) == 6, "the streams")
    os.kill(replicas.pids[0], signal.SIGKILL)
    for thread in threads:
        thread.join(WAIT_SECONDS)
    broken = [end for end in ends if end != "data: [DONE]"]
    assert broken
    assert all(end == "RemoteProtocolError" for end in broken), ends


def test_an_update_under_load_loses_nothing(replicas, expected):
    replicas.wait_for(2)
    before = set(replicas.pids)
    answers = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answers.append(ask_all(replicas.url, workers=4, retries=2))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        replicas.command("update")
        wait_until(lambda: not before & set(replicas.pids), "all replicas are new")
    finally:
        stop.set()
        thread.join(WAIT_SECONDS)
    assert answers
    assert all(answer == expected for answer in answers)


def test_a_lost_machine_costs_no_answer(model, expected):
    with running(model, "nodes=2", "haproxy=0") as two_machines:
        two_machines.wait_for(2)
        lost = threading.Event()

        def lose(number: int) -> None:
            if number == NUM_REQUESTS // 3:
                two_machines.command("lose")
                lost.set()

        assert ask_all(two_machines.url, on_answer=lose, retries=8) == expected
        assert lost.is_set()
