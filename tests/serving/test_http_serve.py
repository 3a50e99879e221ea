"""keepleft serve: a directory behind a port, and an orderly end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import httpx
import pytest

import keepleft as kl
from keepleft.cli import main
from serving.tiny_services import CHAT, decoder

LONG = {"prompt": "the sea", "logit_bias": {"2": -100}, "stream": True}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "small"
    kl.save(*decoder(chat_template=CHAT)[:2], folder)
    return folder


@contextmanager
def served(place, *words, env=None):
    """The command in a process of its own: its address, the process, and the lines that it writes."""
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "keepleft", "serve", str(place), "--port", "0", *words],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **threads, **(env or {})},
    )
    lines = []
    there = threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "/v1" in line and "http://" in line:
                there.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert there.wait(60), lines
        address = re.search(r"http://\S+:\d+", "".join(lines))[0]
        yield address, process, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(30)
        process.stderr.close()


def streamed(address, body, heard):
    try:
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    heard.append(line.removeprefix("data: "))
    except httpx.TransportError:
        heard.append("lost")


def begun(address, bodies):
    """Streams, each in a thread: the first has begun, the others wait."""
    heard = [[] for _ in bodies]
    threads = [
        threading.Thread(target=streamed, args=(address, body, one))
        for body, one in zip(bodies, heard, strict=True)
    ]
    end = time.monotonic() + 30
    for n, thread in enumerate(threads, 1):
        thread.start()
        while not heard[0] or _waiting(address) < n:
            assert time.monotonic() < end
            time.sleep(0.01)
    return heard, threads


def _waiting(address):
    found = httpx.get(f"{address}/metrics").text
    return float(re.search(r"^keepleft_engine_in_flight (\S+)$", found, re.M)[1])


def finished(process, threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert process.wait(60) == 0


def test_under_load_what_was_begun_comes_to_its_end_and_nothing_new_is_taken(place):
    with served(place, "--shutdown-timeout", "60") as (address, process, lines):
        heard, threads = begun(address, [{**LONG, "max_tokens": count} for count in (1500, 1200, 1200)])
        process.send_signal(signal.SIGTERM)
        codes = set()
        while any(thread.is_alive() for thread in threads) and not {"health", "new"} <= codes:
            try:
                if httpx.get(f"{address}/health").json() == {"status": "draining"}:
                    codes.add("health")
                answer = httpx.post(f"{address}/v1/completions", json={"prompt": "a"})
                if answer.status_code == 503 and "retry-after" in answer.headers:
                    codes.add("new")
            except httpx.TransportError:
                break
        finished(process, threads)
        assert codes == {"health", "new"}
        for one in heard:
            assert one[-1] == "[DONE]"
            assert json.loads(one[-2])["choices"][0]["finish_reason"] == "length"
    told = [json.loads(line) for line in lines if line.startswith("{")]
    done = [(line["route"], line["ended"]) for line in told if line.get("completion_tokens") in (1500, 1200)]
    assert done == [("/v1/completions", None)] * 3
    assert all("Traceback" not in line for line in lines), lines


def test_what_takes_longer_than_the_drain_is_cancelled_and_told_why(place):
    with served(place, "--shutdown-timeout", "0.3") as (address, process, _):
        heard, threads = begun(address, [{**LONG, "max_tokens": 4000}] * 2)
        process.send_signal(signal.SIGINT)
        finished(process, threads)
        for one in heard:
            *_, last, error = one
            assert json.loads(last)["choices"][0]["finish_reason"] == "cancelled"
            assert json.loads(error)["error"]["code"] == "shutting_down"


def test_a_second_signal_does_not_wait(place):
    with served(place, "--shutdown-timeout", "600") as (address, process, _):
        heard, threads = begun(address, [{**LONG, "max_tokens": 4000}])
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        finished(process, threads)
        assert heard[0][-1] != "[DONE]"


def test_the_directory_is_served_with_a_key_and_a_name(place):
    words = ("--served-model-name", "sea", "--max-model-len", "32", "--limits.n", "2", "--max-requests", "5")
    with served(place, *words, env={"KEEPLEFT_API_KEY": "from-the-environment"}) as (address, process, lines):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        with httpx.Client(base_url=address, headers={"authorization": "Bearer from-the-environment"}) as made:
            (model,) = made.get("/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("sea", 32)
            assert made.post("/v1/completions", json={"prompt": "a", "n": 3}).status_code == 400
            chat = {"messages": [{"role": "user", "content": "hi"}], "model": "sea", "max_tokens": 3}
            assert made.post("/v1/chat/completions", json=chat).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    whole = "".join(lines)
    assert "from-the-environment" not in whole
    assert len([line for line in lines if not line.startswith("{")]) == 1  # the address


def test_an_audit_for_the_page_does_not_stand_in_the_way_of_the_end(place):
    with served(place) as (address, process, _):
        assert (
            httpx.post(f"{address}/explore/leaks", json={"wait": False}, timeout=60).json()["state"]
            == "running"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


class Ran:
    """In place of the server: what it was made with."""

    def __init__(self, monkeypatch):
        self.made = []
        monkeypatch.setattr(
            "keepleft.serving.http.server.Server.run", lambda server: self.made.append(server)
        )


def test_wrong_use_is_told(place, tmp_path, monkeypatch, capsys):
    Ran(monkeypatch)
    (tmp_path / "none.txt").write_text("# nothing\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(place)
    for words, said in (
        (["nowhere"], "there is no model directory nowhere"),
        ([str(place), "--port", "70000"], "--port is 70000"),
        ([str(place), "--threads", "0"], "--threads is 0"),
        ([str(run)], f"did you mean {run / 'model'}?"),
        ([str(place), "--device", "what"], "the device 'what' was asked"),
        ([str(place), "--max-model-len", "0"], "max_model_len is 0"),
        ([str(place), "--api-key-file", str(tmp_path / "none.txt")], "holds no API key"),
        ([str(place), "--limits.body", "0"], "the limit body is 0"),
        ([str(place), "--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
        ([str(place), "--api-key", "a b\n"], "an API key is empty, or has characters"),
    ):
        assert main(["serve", *words]) == 2, words
        assert said in capsys.readouterr().err


def test_keys_come_from_a_file_and_an_open_door_is_warned_of(place, tmp_path, monkeypatch, capsys):
    ran = Ran(monkeypatch)
    (tmp_path / "keys.txt").write_text("# of two friends\nfirst\n\nsecond\n")
    assert main(["serve", str(place), "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys.txt")]) == 0
    assert capsys.readouterr().err == ""
    assert main(["serve", str(place), "--host", "0.0.0.0"]) == 0
    assert "whoever reaches 0.0.0.0 can use this model: give --api-key" in capsys.readouterr().err
    assert main(["serve", str(place)]) == 0
    assert capsys.readouterr().err == ""
    assert len(ran.made) == 3


def test_a_port_that_is_taken_is_told(place, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(place), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}: is another server there?" in capsys.readouterr().err
