"""One caller beside many: how long a small request waits, and how even a stream flows, beside greedy ones.

A server with two API keys. The greedy key has many clients, each of which sends its next request as soon as
it has a response. The small one sends a short request now and then, or reads one stream. Both are measured
alone first: the ratio is what the others cost. The greedy clients have a process of their own
(greedy_clients.py), so that their work does not count as latency of the server; it still takes time of the
same cores. The model is tiny unless --model names another, such as SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from child_process import child_process
from command_line import make_parser, parse_arguments
from greedy_clients import GreedyClients, Load
from report import environment, print_table, write_json
from soak import make_model

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 120.0
SETTLE_SECONDS = 1.0  # between the start of the greedy clients and the first measurement
PAUSE_SECONDS = 0.05  # between two requests of the small caller
Measurement = tuple[list[float], GreedyClients]


def completion(tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": "a ship sails on", "max_tokens": tokens, "min_new_tokens": tokens, **fields}


def words(count: int) -> str:
    return " ".join(itertools.islice(itertools.cycle("the sea is calm and a ship sails on".split()), count))


def small_caller_loads(tokens: int) -> dict[str, Load]:
    completions = partial(Load, path="/v1/completions")
    explorer_question = {"text": "the sea", "num_beams": 8, "max_new_tokens": 20}
    return {
        "60 clients": completions(60, body=completion(tokens)),
        "120 clients": completions(120, body=completion(tokens)),
        "300 clients": completions(300, body=completion(tokens)),
        "20 clients with 16 beams": completions(20, body=completion(tokens, num_beams=16, temperature=0)),
        "120 clients, a new user each time": completions(120, body=completion(tokens, user="user #")),
        "8 clients with 64 embeddings": Load(8, "/v1/embeddings", {"input": [words(80)] * 64}),
        "8 clients with 16 scores": Load(8, "/v1/score", {"input": [words(80)] * 16}),
        "4 clients with grammars": completions(4, body=completion(8, regex="[a-z]{8,#}")),
        "4 clients in the explorer": Load(4, "/explore/beam", explorer_question),
    }


def stream_loads(tokens: int) -> dict[str, Load]:
    """Each of them one client, with requests of up to `tokens` tokens."""
    prompt = list(range(100, 100 + tokens))
    echo = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    return {
        "embeddings of 8 texts": Load(1, "/v1/embeddings", {"input": [prompt[: tokens // 4]] * 8}),
        "scores": Load(1, "/v1/score", {"input": words(tokens)}),
        "echo with logprobs": Load(1, "/v1/completions", echo),
        "long prompts": Load(1, "/v1/completions", {"prompt": prompt, "max_tokens": 2}),
        "beam search in the explorer": Load(
            1, "/explore/beam", {"text": "the sea", "num_beams": 8, "max_new_tokens": 20}
        ),
    }


def select(loads: dict[str, Load], names: list[str] | None) -> list[tuple[str, Load]]:
    return [(name, load) for name, load in loads.items() if names is None or name in names]


@contextmanager
def serve(model: str, arguments: Sequence[str]) -> Iterator[str]:
    """`keepleft serve` with the keys small and greedy: its address."""
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "keys.txt"
        key_file.write_text("small-key\ngreedy-key\n")
        command = [sys.executable, "-m", "keepleft", "serve", model, "--port", "0", "--log-level", "error"]
        path = os.environ.get("PYTHONPATH", str(ROOT / "src"))
        with child_process(
            [*command, "--api-key-file", str(key_file), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as process:
            yield _wait_for_address(process)


def _wait_for_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and (line := process.stderr.readline()):
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found[0]
    raise RuntimeError("the server did not start")


def request_as_small_key(address: str, body: dict[str, Any]) -> HTTPConnection:
    """Send a completion request; the connection has its response."""
    url = urlsplit(address)
    connection = HTTPConnection(url.hostname or "", url.port, timeout=600)
    headers = {"authorization": "Bearer small-key", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return connection


def time_small_caller(address: str, load: Load | None, repeats: int) -> Measurement:
    """Seconds of each of the small key's requests, one after the other, each over a new connection."""
    seconds = []
    failures: Counter[str] = Counter()
    with GreedyClients(address, "greedy-key", load) as clients:
        clients.start()
        time.sleep(SETTLE_SECONDS)
        for _ in range(repeats):
            start = time.perf_counter()
            with closing(request_as_small_key(address, completion(10, temperature=0))) as connection:
                response = connection.getresponse()
                response.read()
            seconds.append(time.perf_counter() - start)
            if response.status != 200:
                failures[f"small: {response.status}"] += 1
            time.sleep(PAUSE_SECONDS)
    clients.statuses.update(failures)
    return seconds, clients


def time_stream(address: str, load: Load | None, tokens: int) -> Measurement:
    """Seconds between the chunks of one stream of the small key; the others come when it flows."""
    body = completion(tokens, stream=True, temperature=0)
    times = []
    with (
        GreedyClients(address, "greedy-key", load) as clients,
        closing(request_as_small_key(address, body)) as connection,
    ):
        for line in connection.getresponse():
            if line.startswith(b"data:"):
                times.append(time.perf_counter())
                if len(times) == 1:
                    clients.start()
    return [end - start for start, end in pairwise(times)], clients


def measure(address: str, options: Any) -> dict[str, list[dict[str, Any]]]:
    time_small_caller(address, None, 3)  # warm up
    small_caller = partial(time_small_caller, address, repeats=options.repeats)
    stream = partial(time_stream, address, tokens=options.stream_tokens)
    parts = {
        "small": (small_caller, select(small_caller_loads(options.tokens), options.only)),
        "stream": (stream, select(stream_loads(options.prompt_tokens), options.only)),
    }
    return {name: measure_part(*parts[name]) for name in options.parts}


def measure_part(
    measure_one: Callable[..., Measurement], loads: list[tuple[str, Load]]
) -> list[dict[str, Any]]:
    """A row alone, and one beside each load."""
    alone, clients = measure_one(load=None)
    rows = [_row("alone", alone, alone, clients)]
    for name, load in loads:
        seconds, clients = measure_one(load=load)
        rows.append(_row(name, seconds, alone, clients))
        print(f"  {name}: {rows[-1]['times alone (median)']:.1f}", file=sys.stderr, flush=True)
        time.sleep(SETTLE_SECONDS)
    return rows


def _row(name: str, seconds: list[float], alone: list[float], clients: GreedyClients) -> dict[str, Any]:
    median = statistics.median(seconds)
    statuses = sorted(clients.statuses.items())
    return {
        "beside": name,
        "median ms": 1000 * median,
        "95 % ms": 1000 * _percentile(seconds, 0.95),
        "longest ms": 1000 * max(seconds),
        "times alone (median)": median / statistics.median(alone),
        "times alone (95 %)": _percentile(seconds, 0.95) / _percentile(alone, 0.95),
        "times alone (longest)": max(seconds) / max(alone),
        "others' responses": ", ".join(f"{count} x {status}" for status, count in statuses),
        "others' seconds": "" if clients.median_seconds is None else clients.median_seconds,
    }


def _percentile(values: list[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", help="a model directory or an installed model; a tiny one if not given")
    parser.add_argument("--parts", nargs="+", default=["small", "stream"], choices=["small", "stream"])
    parser.add_argument("--only", nargs="+", help="only these rows")
    parser.add_argument("--repeats", type=int, default=20, help="requests of the small caller")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of each greedy completion")
    parser.add_argument("--stream-tokens", type=int, default=100, help="tokens of the stream")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="tokens of long prompts")
    options = parse_arguments(parser, argv, repeats=2, tokens=10, stream_tokens=10, prompt_tokens=40)
    arguments = ["--max-model-len", "4096"] if options.model is None else []
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            make_model(Path(folder))
        with serve(options.model or folder, arguments) as address:
            tables = measure(address, options)
    titles = {"small": "A request of 10 tokens", "stream": "The chunks of a stream"}
    for name, rows in tables.items():
        print_table(titles[name], rows)
    write_json(options.json, {"environment": environment(), **tables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
