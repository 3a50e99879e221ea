"""Clients that send their next request as soon as they have a response, in a process of their own.

Started by `GreedyClients`, so that the work of many clients does not count as latency of a server that
another client of the benchmark measures. They speak plain HTTP over sockets, which costs far less than an
HTTP library would. The process runs until its standard input is closed; then it prints what came of the
requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from child_process import child_process

RETRY_SECONDS = 0.2  # after a 429
FIRST_NUMBER = 9
STOP_SECONDS = 60.0


class Load(NamedTuple):
    """So many clients, each with such requests; `#` in a text of the body is a new number each time."""

    clients: int
    path: str
    body: dict[str, Any]


class GreedyClients:
    """The clients of a load; none at all without one. `start` returns when each has sent a request."""

    def __init__(self, address: str, key: str, load: Load | None) -> None:
        self.arguments = [address, key, json.dumps(load)]
        self.load = load
        self.statuses: Counter[str] = Counter()  # of the responses, known at the end
        self.median_seconds: float | None = None  # of the successful ones

    def __enter__(self) -> GreedyClients:
        with ExitStack() as stack:
            if self.load is not None:
                command = [sys.executable, str(Path(__file__)), *self.arguments]
                process = child_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
                self.process = stack.enter_context(process)
                self._wait_for("ready")
            self.stack = stack.pop_all()
        return self

    def start(self) -> None:
        if self.load is not None:
            assert self.process.stdin is not None
            self.process.stdin.write("start\n")
            self.process.stdin.flush()
            self._wait_for("started")

    def __exit__(self, *_: object) -> None:
        with self.stack:
            if self.load is not None:
                output, _ = self.process.communicate(timeout=STOP_SECONDS)
                result = json.loads(output)
                self.statuses.update(result["statuses"])
                self.median_seconds = result["median seconds"]

    def _wait_for(self, message: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if line != message:
            raise RuntimeError(f"the greedy clients said {line!r} instead of {message!r}")


async def run_clients(address: str, key: str, load: Load) -> None:
    statuses: Counter[str] = Counter()
    seconds: list[float] = []
    numbers = itertools.count(FIRST_NUMBER)
    template = json.dumps(load.body)

    async def run_client(connection: Connection) -> None:
        while True:
            start = time.perf_counter()
            status = await connection.receive()
            statuses[status] += 1
            if status == "200":
                seconds.append(time.perf_counter() - start)
            elif status == "429":
                await asyncio.sleep(RETRY_SECONDS)
            await send(connection)

    async def send(connection: Connection) -> None:
        await connection.send(load.path, template.replace("#", str(next(numbers))).encode())

    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    connections = [Connection(address, key) for _ in range(load.clients)]
    await asyncio.gather(*map(send, connections))
    print("started", flush=True)
    tasks = [asyncio.create_task(run_client(connection)) for connection in connections]
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    median_seconds = statistics.median(seconds) if seconds else None
    print(json.dumps({"statuses": statuses, "median seconds": median_seconds}), flush=True)


class Connection:
    """One connection, opened again where the server has closed it."""

    def __init__(self, address: str, key: str) -> None:
        url = urlsplit(address)
        self.host = url.hostname
        self.port = url.port
        self.headers = f"host: {url.netloc}\r\nauthorization: Bearer {key}\r\ncontent-type: application/json"
        self.writer: asyncio.StreamWriter | None = None

    async def send(self, path: str, body: bytes) -> None:
        if self.writer is None:
            self.reader, self.writer = await asyncio.open_connection(self.host, self.port)
        head = f"POST {path} HTTP/1.1\r\n{self.headers}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    async def receive(self) -> str:
        """The status of the response, whose body is read and dropped."""
        assert self.writer is not None
        try:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            headers = dict(line.split(": ", 1) for line in head.split("\r\n")[1:-2])
            await self.reader.readexactly(int(headers["content-length"]))
        except (OSError, asyncio.IncompleteReadError):
            head, headers = "- closed", {"connection": "close"}
        if headers.get("connection") == "close":
            self.writer.close()
            with suppress(OSError):
                await self.writer.wait_closed()
            self.writer = None
        return head.split()[1]


if __name__ == "__main__":
    asyncio.run(run_clients(sys.argv[1], sys.argv[2], Load(*json.loads(sys.argv[3]))))
