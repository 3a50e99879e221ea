"""keepleft serve: a model directory behind a port, and a graceful shutdown."""

from __future__ import annotations

import errno
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
from keepleft.serving.http import served_app, server
from serving.tiny_services import CHAT, decoder

LONG = {"prompt": "the sea", "logit_bias": {"2": -100}, "stream": True}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "small"
    kl.save(*decoder(chat_template=CHAT)[:2], folder)
    return folder


@contextmanager
def served(model_folder, *options, env=None):
    """The command in its own process: its address, the process, and the lines of its stderr."""
    threads = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "keepleft", "serve", model_folder, "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **threads, **(env or {})},
    )
    lines = []
    ready = threading.Event()

    def read():
        for line in process.stderr:
            lines.append(line)
            if "/v1" in line and "http://" in line:
                ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert ready.wait(60), lines
        address = re.search(r"http://\S+:\d+", "".join(lines))[0]
        yield address, process, lines
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
        reader.join(30)
        process.stderr.close()


def read_stream(address, body, chunks):
    try:
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    chunks.append(line.removeprefix("data: "))
    except httpx.TransportError:
        chunks.append("lost")


def start_streams(address, bodies):
    """Streams, each read in a thread, after the first chunk of the first one."""
    streams = [[] for _ in bodies]
    threads = [
        threading.Thread(target=read_stream, args=(address, body, stream))
        for body, stream in zip(bodies, streams, strict=True)
    ]
    end = time.monotonic() + 30
    for n, thread in enumerate(threads, 1):
        thread.start()
        while not streams[0] or _in_flight(address) < n:
            assert time.monotonic() < end
            time.sleep(0.01)
    return streams, threads


def _in_flight(address):
    metrics = httpx.get(f"{address}/metrics").text
    return float(re.search(r"^keepleft_engine_in_flight (\S+)$", metrics, re.M)[1])


def wait_for_exit(process, threads):
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert process.wait(60) == 0


def test_under_load_requests_in_flight_finish_and_no_new_ones_are_accepted(model_folder):
    with served(model_folder, "--shutdown-timeout", "60") as (address, process, lines):
        streams, threads = start_streams(
            address, [{**LONG, "max_tokens": count} for count in (1500, 1200, 1200)]
        )
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
        wait_for_exit(process, threads)
        assert codes == {"health", "new"}
        for stream in streams:
            assert stream[-1] == "[DONE]"
            assert json.loads(stream[-2])["choices"][0]["finish_reason"] == "length"
    assert any("shutting down; 3 in flight, with 60 seconds to finish" in line for line in lines), lines
    log_lines = [json.loads(line) for line in lines if line.startswith("{")]
    done = [
        (line["route"], line["ended"]) for line in log_lines if line.get("completion_tokens") in (1500, 1200)
    ]
    assert done == [("/v1/completions", None)] * 3
    assert all("Traceback" not in line for line in lines), lines


def test_what_takes_longer_than_the_shutdown_timeout_is_cancelled_with_an_error(model_folder):
    with served(model_folder, "--shutdown-timeout", "0.3") as (address, process, _):
        streams, threads = start_streams(address, [{**LONG, "max_tokens": 4000}] * 2)
        process.send_signal(signal.SIGINT)
        wait_for_exit(process, threads)
        for stream in streams:
            *_, last, error = stream
            assert json.loads(last)["choices"][0]["finish_reason"] == "cancelled"
            assert json.loads(error)["error"]["code"] == "shutting_down"


def test_a_second_signal_does_not_wait(model_folder):
    with served(model_folder, "--shutdown-timeout", "600") as (address, process, _):
        streams, threads = start_streams(address, [{**LONG, "max_tokens": 4000}])
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        wait_for_exit(process, threads)
        assert streams[0][-1] != "[DONE]"


def test_the_directory_is_served_with_a_key_and_a_name(model_folder):
    options = "--served-model-name sea --max-model-len 32 --limits.n 2 --max-requests 5".split()
    environment = {"KEEPLEFT_API_KEY": "from-the-environment"}
    with served(model_folder, *options, env=environment) as (address, process, lines):
        assert httpx.get(f"{address}/v1/models").status_code == 401
        with httpx.Client(
            base_url=address, headers={"authorization": "Bearer from-the-environment"}
        ) as http_client:
            (model,) = http_client.get("/v1/models").json()["data"]
            assert (model["id"], model["max_model_len"]) == ("sea", 32)
            assert http_client.post("/v1/completions", json={"prompt": "a", "n": 3}).status_code == 400
            chat = {"messages": [{"role": "user", "content": "hi"}], "model": "sea", "max_tokens": 3}
            assert http_client.post("/v1/chat/completions", json=chat).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    log_text = "".join(lines)
    assert "from-the-environment" not in log_text
    assert len([line for line in lines if not line.startswith("{")]) == 1  # the address


def test_an_audit_for_the_page_does_not_delay_the_shutdown(model_folder):
    with served(model_folder) as (address, process, _):
        assert (
            httpx.post(f"{address}/explore/audit", json={"action": "start"}, timeout=60).json()["state"]
            == "running"
        )
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_an_audit_for_the_page_is_followed_and_stopped(model_folder):
    with served(model_folder) as (address, _, _):

        def ask(question, **params):
            return httpx.post(f"{address}/explore/{question}", json=params, timeout=60).json()

        audit = {"budget": "full", "client": "page"}
        states = [ask("audit", action="start", **audit)["state"]]
        while (answer := ask("audit", **audit))["progress"]["calls"] == 0:
            states.append(answer["state"])
            time.sleep(0.05)
        assert {*states} == {"running"}
        assert answer["progress"]["checks"][0]["name"] == "future"
        assert ask("mask", expression="causal", length=4, padding={"left": 0, "right": 0}, packing=[])["rows"]
        if ask("audit", action="stop", **audit)["state"] == "done":
            return  # a fast machine
        while (state := ask("audit", **audit)["state"]) == "stopping":
            time.sleep(0.05)
        assert state == "stopped"


class Ran:
    """Replaces Server.run, and records the servers."""

    def __init__(self, monkeypatch):
        self.made = []
        monkeypatch.setattr(
            "keepleft.serving.http.server.Server.run", lambda server: self.made.append(server)
        )


def test_usage_errors(model_folder, tmp_path, monkeypatch, capsys):
    Ran(monkeypatch)
    (tmp_path / "none.txt").write_text("# nothing\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(model_folder)
    for options, message in (
        (["nowhere"], "there is no model directory nowhere"),
        ([str(model_folder), "--port", "70000"], "--port is 70000"),
        ([str(model_folder), "--threads", "0"], "--threads is 0"),
        ([str(run)], f"did you mean {run / 'model'}?"),
        ([str(model_folder), "--device", "what"], "--device is 'what', which PyTorch"),
        ([str(model_folder), "--max-model-len", "0"], "--max-model-len is 0"),
        ([str(model_folder), "--api-key-file", str(tmp_path / "none.txt")], "holds no API key"),
        ([str(model_folder), "--limits.body", "0"], "--limits.body is 0"),
        ([str(model_folder), "--shutdown-timeout", "-1"], "--shutdown-timeout is -1"),
        ([str(model_folder), "--api-key", "a b\n"], "an API key is empty, or has characters"),
    ):
        port = [] if "--port" in options else ["--port", "0"]  # a server of somebody else may have port 8000
        assert main(["serve", *options, *port]) == 2, options
        assert message in capsys.readouterr().err


def test_keys_come_from_a_file_and_a_public_server_without_keys_is_warned_of(
    model_folder, tmp_path, monkeypatch, capsys
):
    ran = Ran(monkeypatch)
    (tmp_path / "keys.txt").write_text("# of two friends\nfirst\n\nsecond\n")
    keys_file = str(tmp_path / "keys.txt")
    serve = ["serve", str(model_folder), "--port", "0"]
    assert main([*serve, "--host", "0.0.0.0", "--api-key-file", keys_file]) == 0
    assert capsys.readouterr().err == ""
    assert main([*serve, "--host", "0.0.0.0"]) == 0
    assert "whoever reaches 0.0.0.0 can use this model: set KEEPLEFT_API_KEY" in capsys.readouterr().err
    assert main(serve) == 0
    assert capsys.readouterr().err == ""
    assert len(ran.made) == 3


@pytest.mark.parametrize("when", ["before the model is loaded", "while it is loaded"])
def test_a_port_in_use_is_one_message(when, model_folder, capsys, monkeypatch):
    loaded = []
    load = served_app.load_for_inference
    monkeypatch.setattr(
        served_app, "load_for_inference", lambda *args, **kw: loaded.append(1) or load(*args, **kw)
    )
    if when == "while it is loaded":
        monkeypatch.setattr(server, "check_address", lambda host, port: None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(model_folder), "--port", str(port)]) == 2
    message = f"cannot listen on 127.0.0.1:{port}: another program listens there; --port 0 takes a free one"
    assert capsys.readouterr().err == f"keepleft: {message}\n"
    assert len(loaded) == (when == "while it is loaded")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (
            OSError(errno.EACCES, "Permission denied"),
            r"this user may not \(Permission denied\); give a --port",
        ),
        (OSError(errno.EADDRNOTAVAIL, "no such address"), "no such address; look at --host and --port"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_an_error_with_its_remedy(error, remedy):
    assert re.search(remedy, str(server.listen_error("192.0.2.1", 80, error)))
    with pytest.raises(OSError, match=r"cannot listen on no-such-host\.invalid:1"):
        server.check_address("no-such-host.invalid", 1)
    server.check_address("anywhere", 0)
