"""One caller beside many: how long a small request waits, and how even a stream flows, beside greedy ones.

A server with two API keys. The greedy key has many clients, each of which sends its next request as soon as
it has a response. The small one sends a short request now and then, or reads one stream. Both are measured
alone first: the ratio is what the others cost. The model is tiny unless --model names another, such as
SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from child_process import child_process
from command_line import make_parser, parse_arguments
from report import environment, print_table, write_json
from soak import make_model

Request = tuple[str, dict[str, Any]]  # path and body
Measure = Callable[..., Awaitable[tuple[list[float], Counter[str]]]]  # takes a load
ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 120.0
SETTLE_SECONDS = 1.0  # between the start of the greedy clients and the first measurement
names = itertools.count()


class Load(NamedTuple):
    """What the greedy key does: so many clients, each with such requests."""

    clients: int
    request: Callable[[], Request]


def completion(tokens: int, **fields: Any) -> Request:
    body = {"prompt": "a ship sails on", "max_tokens": tokens, "min_new_tokens": tokens, **fields}
    return "/v1/completions", body


def words(count: int) -> str:
    return " ".join(itertools.islice(itertools.cycle("the sea is calm and a ship sails on".split()), count))


def small_caller_loads(tokens: int) -> dict[str, Load]:
    return {
        "60 clients": Load(60, lambda: completion(tokens)),
        "120 clients": Load(120, lambda: completion(tokens)),
        "300 clients": Load(300, lambda: completion(tokens)),
        "20 clients with 16 beams": Load(20, lambda: completion(tokens, num_beams=16, temperature=0)),
        "120 clients, a new user each time": Load(
            120, lambda: completion(tokens, user=f"user {next(names)}")
        ),
        "8 clients with 64 embeddings": Load(8, lambda: ("/v1/embeddings", {"input": [words(80)] * 64})),
        "8 clients with 16 scores": Load(8, lambda: ("/v1/score", {"input": [words(80)] * 16})),
        "4 clients with grammars": Load(4, lambda: completion(8, regex=f"[a-z]{{8,{9 + next(names) % 99}}}")),
        "4 clients in the explorer": Load(
            4, lambda: ("/explore/beam", {"text": "the sea", "num_beams": 8, "max_new_tokens": 20})
        ),
    }


def stream_loads(tokens: int) -> dict[str, Load]:
    """Each of them one client, with requests of up to `tokens` tokens."""
    return {
        "embeddings of 8 texts": Load(
            1, lambda: ("/v1/embeddings", {"input": [list(range(100, 100 + tokens // 4))] * 8})
        ),
        "scores": Load(1, lambda: ("/v1/score", {"input": words(tokens)})),
        "echo with logprobs": Load(
            1,
            lambda: (
                "/v1/completions",
                {"prompt": list(range(100, 100 + tokens)), "echo": True, "logprobs": 1, "max_tokens": 1},
            ),
        ),
        "long prompts": Load(
            1, lambda: ("/v1/completions", {"prompt": list(range(100, 100 + tokens)), "max_tokens": 2})
        ),
        "beam search in the explorer": Load(
            1, lambda: ("/explore/beam", {"text": "the sea", "num_beams": 8, "max_new_tokens": 20})
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
        with child_process(
            [*command, "--api-key-file", str(key_file), *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        ) as process:
            yield _wait_for_address(process)


def _wait_for_address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and (line := process.stderr.readline()):
        if found := re.search(r"http://[\d.]+:\d+", line):
            return found[0]
    raise RuntimeError("the server did not start")


@asynccontextmanager
async def greedy_clients(http: Any, load: Load | None) -> AsyncIterator[Counter[str]]:
    """Run the clients of a load; the statuses of their responses."""
    statuses: Counter[str] = Counter()

    async def run_client(load: Load) -> None:
        while True:
            path, body = load.request()
            response = await http.post(path, json=body, headers={"authorization": "Bearer greedy-key"})
            statuses[str(response.status_code)] += 1
            if response.status_code == 429:
                await asyncio.sleep(0.2)

    tasks = [asyncio.create_task(run_client(load)) for _ in range(load.clients)] if load else []
    if tasks:
        await asyncio.sleep(SETTLE_SECONDS)
    try:
        yield statuses
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def time_small_caller(http: Any, load: Load | None, repeats: int) -> tuple[list[float], Counter[str]]:
    """Seconds of each of the small key's requests, one after the other."""
    path, body = completion(10, temperature=0)
    seconds = []
    async with greedy_clients(http, load) as statuses:
        for _ in range(repeats):
            start = time.perf_counter()
            response = await http.post(path, json=body, headers={"authorization": "Bearer small-key"})
            seconds.append(time.perf_counter() - start)
            if response.status_code != 200:
                statuses[f"small: {response.status_code}"] += 1
            await asyncio.sleep(0.05)
    return seconds, statuses


async def time_stream(http: Any, load: Load | None, tokens: int) -> tuple[list[float], Counter[str]]:
    """Seconds between the chunks of one stream of the small key."""
    path, body = completion(tokens, stream=True, temperature=0)
    gaps = []
    async with greedy_clients(http, None) as statuses:
        request = http.stream("POST", path, json=body, headers={"authorization": "Bearer small-key"})
        async with request as response:
            last = None
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                now = time.perf_counter()
                if last is None and load is not None:  # the stream flows: now the others come
                    asyncio.get_running_loop().create_task(_run_for_a_while(http, load, statuses, response))
                if last is not None:
                    gaps.append(now - last)
                last = now
    return gaps, statuses


async def _run_for_a_while(http: Any, load: Load, statuses: Counter[str], response: Any) -> None:
    async with greedy_clients(http, load) as load_statuses:
        while not response.is_closed:
            await asyncio.sleep(0.05)
    statuses.update(load_statuses)


async def measure(address: str, options: Any) -> dict[str, list[dict[str, Any]]]:
    import httpx

    limits = httpx.Limits(max_connections=400, max_keepalive_connections=400)
    async with httpx.AsyncClient(base_url=address, timeout=600, limits=limits) as http:
        await time_small_caller(http, None, 3)  # warm up
        small_caller = partial(time_small_caller, http, repeats=options.repeats)
        stream = partial(time_stream, http, tokens=options.stream_tokens)
        parts = {
            "small": (small_caller, select(small_caller_loads(options.tokens), options.only)),
            "stream": (stream, select(stream_loads(options.prompt_tokens), options.only)),
        }
        return {name: await measure_part(*parts[name]) for name in options.parts}


async def measure_part(measure_one: Measure, loads: list[tuple[str, Load]]) -> list[dict[str, Any]]:
    """A row alone, and one beside each load."""
    alone, _ = await measure_one(load=None)
    rows = [_row("alone", alone, alone, Counter())]
    for name, load in loads:
        seconds, statuses = await measure_one(load=load)
        rows.append(_row(name, seconds, alone, statuses))
        print(f"  {name}: {rows[-1]['times alone (median)']:.1f}", file=sys.stderr, flush=True)
        await asyncio.sleep(SETTLE_SECONDS)
    return rows


def _row(name: str, seconds: list[float], alone: list[float], statuses: Counter[str]) -> dict[str, Any]:
    median = statistics.median(seconds)
    return {
        "beside": name,
        "median ms": 1000 * median,
        "95 % ms": 1000 * _percentile(seconds, 0.95),
        "longest ms": 1000 * max(seconds),
        "times alone (median)": median / statistics.median(alone),
        "times alone (95 %)": _percentile(seconds, 0.95) / _percentile(alone, 0.95),
        "others' responses": ", ".join(f"{count} x {status}" for status, count in sorted(statuses.items())),
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
            tables = asyncio.run(measure(address, options))
    titles = {"small": "A request of 10 tokens", "stream": "The chunks of a stream"}
    for name, rows in tables.items():
        print_table(titles[name], rows)
    write_json(options.json, {"environment": environment(), **tables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
