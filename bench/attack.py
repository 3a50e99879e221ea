"""Clients that mean harm: does /health still answer meanwhile, and what do they cost the server?

Starts a server with a small model of random weights on 127.0.0.1 for each attack, which runs for a bounded
time. While it runs, a second client asks for /health over new connections. An attack is a row
of ATTACKS: a name and a coroutine that returns what came of it. PYTHONPATH chooses another version of the
server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from child_process import child_process
from command_line import make_parser, parse_arguments
from peak_memory import status_bytes
from report import environment, print_table, write_json
from soak import make_model

ROOT = Path(__file__).resolve().parents[1]
ATTACKER = "127.0.0.2"  # an address of its own, so that limits for one address spare the client that measures
HEALTH_TIMEOUT = 30.0
HEALTH_INTERVAL = 0.02
MAX_BODY = 4 << 20
GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
GET_OPENAPI = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Target:
    """The server under attack. `scale` shrinks an attack to toy size; `seconds` bounds it."""

    port: int
    scale: float
    seconds: float

    def count(self, full_size: int) -> int:
        return max(1, int(full_size * self.scale))


@dataclass(frozen=True)
class Attack:
    """`run` returns the status, or what came of it. `descriptors`: the server's limit of open files."""

    name: str
    run: Callable[[Target], Awaitable[str]]
    descriptors: int | None = None


# clients ---------------------------------------------------------------------------------------------


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def connect(target: Target, stack: ExitStack) -> Connection:
    """A connection from the attacker's address, which the stack cuts off."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, local_addr=(ATTACKER, 0))
    stack.callback(abort, writer)  # which would close itself if nobody held it
    return reader, writer


async def read_status(reader: asyncio.StreamReader) -> str:
    """The status of the response, or that there was none."""
    try:
        line = await reader.readline()
    except ConnectionError:
        return "closed"
    return line.split()[1].decode() if line.startswith(b"HTTP/") else "closed"


async def send(target: Target, data: bytes) -> str:
    """Send bytes over one connection; the status of the first response."""
    with ExitStack() as stack:
        reader, writer = await connect(target, stack)
        writer.write(data)
        return await read_status(reader)


def post(headers: str, path: str = "/v1/completions") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{headers}\r\n\r\n"
    ).encode()


def body_attack(name: str, template: str, item: str, count: int, path: str = "/v1/completions") -> Attack:
    """A body below the size limit that repeats one item; `#` in the item is its number in hexadecimal."""

    async def run(target: Target) -> str:
        numbers = range(target.count(count))
        items = [item.replace("#", f"{n:x}") for n in numbers]
        body = template.replace("ITEMS", ",".join(items)).encode()
        assert len(body) <= MAX_BODY, (name, len(body))
        return await send(target, post(f"content-length: {len(body)}", path) + body)

    return Attack(name, run)


async def watch_lockout(target: Target) -> str:
    """How long others are locked out while the attackers hold on to their connections."""
    started = time.monotonic()
    served_since: float | None = None
    while (now := time.monotonic()) - started < target.seconds:
        status, _ = await asyncio.to_thread(ask_health, target.port)
        if status != "200":
            served_since = None
        elif served_since is None:
            served_since = now
        elif now - served_since > 3:
            break
        await asyncio.sleep(0.2)
    if served_since is None:
        return f"locked out for {target.seconds:.0f} s"
    return f"locked out for {served_since - started:.0f} s"


async def flood_connections(target: Target, data: bytes, *, count: int, repeat: int = 1) -> str:
    """Many connections, each of which sends `data` and never reads."""
    with ExitStack() as stack:
        for _ in range(target.count(count)):
            with suppress(OSError):
                reader, writer = await connect(target, stack)
                reader._transport.pause_reading()  # type: ignore[attr-defined]
                writer.write(data * repeat)
        return await watch_lockout(target)


async def pipeline(target: Target) -> str:
    """Many requests at once over one connection, whose responses are read for ten seconds."""
    with ExitStack() as stack:
        reader, writer = await connect(target, stack)
        writer.write(GET_HEALTH * target.count(8000))
        responses = 0
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(min(10.0, target.seconds)):
                while piece := await reader.read(1 << 16):
                    responses += piece.count(b"HTTP/1.1 200")
                    if responses >= target.count(8000):
                        break
        return f"{responses} answered"


async def large_headers(target: Target) -> str:
    return await send(target, GET_HEALTH[:-2] + b"x-large: " + b"a" * target.count(120_000) + b"\r\n\r\n")


async def tiny_chunks(target: Target) -> str:
    text = b'{"prompt": "' + b"a" * target.count(1_000_000) + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text)
    return await send(target, post("transfer-encoding: chunked") + chunks + b"0\r\n\r\n")


async def smuggle(target: Target) -> str:
    """Two lengths in one request: is what follows it taken for a second request?"""
    head = post("content-length: 6\r\ntransfer-encoding: chunked")
    with ExitStack() as stack:
        reader, writer = await connect(target, stack)
        writer.write(head + b"0\r\n\r\n" + GET_HEALTH[:-2] + b"connection: close\r\n\r\n")
        status = await read_status(reader)
        rest = await reader.read()
    return f"{status}, {'both' if b'ready' in rest else 'one'} answered"


async def drip(target: Target) -> str:
    """A body that nobody reads, a byte at a time: how long does the server listen?"""
    started = time.monotonic()
    with ExitStack() as stack:
        reader, writer = await connect(target, stack)
        writer.write(GET_HEALTH[:-2] + b"content-length: 1000000\r\n\r\n")
        with suppress(ConnectionError):
            while time.monotonic() - started < target.seconds:
                writer.write(b"a")
                await writer.drain()
                await asyncio.sleep(0.2)
                if reader.at_eof():
                    return "closed"
            return "still open"
        return "closed"


async def send_nested(target: Target) -> str:
    body = b'{"prompt": ' + b"[" * target.count(2_000_000) + b"]" * target.count(2_000_000) + b"}"
    return await send(target, post(f"content-length: {len(body)}") + body)


NEVER_READ = partial(flood_connections, data=GET_OPENAPI, count=1100, repeat=400)
HALF_HEADER = partial(flood_connections, data=GET_HEALTH[:-2], count=1100)
FEW_DESCRIPTORS = partial(flood_connections, data=GET_HEALTH[:-2], count=400)
ATTACKS = [
    body_attack("1.3 million objects as prompt", '{"prompt": [ITEMS]}', "{}", 1_300_000),
    body_attack("a million floats as prompt", '{"prompt": [ITEMS]}', "0.5", 1_000_000),
    body_attack("two million messages", '{"messages": [ITEMS]}', "0", 2_000_000, "/v1/chat/completions"),
    body_attack("320,000 unknown fields", '{"prompt": "a", ITEMS}', '"#":0', 320_000),
    body_attack("a million empty bad words", '{"prompt": "a", "bad_words_ids": [ITEMS]}', "[]", 1_000_000),
    body_attack("a million empty stop strings", '{"prompt": "a", "stop": [ITEMS]}', '""', 1_000_000),
    body_attack("a million lists as metadata", '{"prompt": 1, "metadata": {"a": [ITEMS]}}', "[]", 1_000_000),
    body_attack("260,000 floats, within the limits", '{"prompt": [ITEMS]}', "0.123456789", 260_000),
    body_attack("one string of 590,000 escapes", '{"prompt": "ITEMS"}', "\\u0041", 590_000),
    Attack("two million opening brackets", send_nested),
    Attack("headers of 120 kB", large_headers),
    Attack("a body in a million 1-byte chunks", tiny_chunks),
    Attack("Content-Length with Transfer-Encoding", smuggle),
    Attack("8,000 pipelined requests", pipeline),
    Attack("a GET whose body drips in", drip),
    Attack("1,100 clients that never read", NEVER_READ),
    Attack("1,100 clients with half a header", HALF_HEADER),
    Attack("400 clients, 256 file descriptors", FEW_DESCRIPTORS, descriptors=256),
]


# the server and the second client --------------------------------------------------------------------


def ask_health(port: int) -> tuple[str, float]:
    """Ask over a new connection: the status and the seconds it took."""
    import http.client

    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HEALTH_TIMEOUT)
    try:
        connection.request("GET", "/health")
        status = str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        status = type(error).__name__
    finally:
        connection.close()
    return status, time.perf_counter() - started


@dataclass
class HealthProbe:
    """Asks for /health again and again, in a thread, until it is stopped."""

    port: int
    latencies: list[float] = field(default_factory=list)
    failures: int = 0

    def __enter__(self) -> HealthProbe:
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join(2 * HEALTH_TIMEOUT)

    def _run(self) -> None:
        while not self.stopping.is_set() or not self.latencies:
            status, seconds = ask_health(self.port)
            self.latencies.append(seconds)
            self.failures += status != "200"
            self.stopping.wait(HEALTH_INTERVAL)


@contextmanager
def serve(folder: Path, descriptors: int | None, log: Path) -> Iterator[tuple[int, int]]:
    """`keepleft serve` in its own process, whose stderr goes to a file: its port and process id."""
    command = [sys.executable, "-m", "keepleft", "serve", str(folder), "--port", "0"]
    command += ["--log-level", "error", "--kv-cache-memory", "0.02", "--threads", "1"]
    if descriptors is not None:
        command = ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh", *command]
    path = os.environ.get("PYTHONPATH", str(ROOT / "src"))
    environ = {**os.environ, "PYTHONPATH": path}
    with log.open("w") as stderr, child_process(command, stderr=stderr, env=environ) as child:
        end = time.monotonic() + 120
        while not (ready := re.search(r"127\.0\.0\.1:(\d+)/v1", log.read_text())):
            if child.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield int(ready[1]), child.pid


def run_attack(attack: Attack, target: Target, pid: int, log: Path) -> dict[str, Any]:
    """One row of the table."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the high-water mark to what is resident now
    memory_before = status_bytes("VmRSS", pid)
    log_before = log.stat().st_size

    async def run() -> str:
        try:
            return await asyncio.wait_for(attack.run(target), target.seconds + 10)
        except TimeoutError:
            return "none"
        except OSError as error:
            return type(error).__name__

    with HealthProbe(target.port) as probe:
        started = time.perf_counter()
        outcome = asyncio.run(run())
        seconds = time.perf_counter() - started
    return {
        "attack": attack.name,
        "status": outcome,
        "seconds": round(seconds, 2),
        "worst /health ms": round(1000 * max(probe.latencies)),
        "/health failed": f"{probe.failures}/{len(probe.latencies)}",
        "memory MiB": round((status_bytes("VmHWM", pid) - memory_before) / (1 << 20)),
        "log kB": round((log.stat().st_size - log_before) / 1000),
    }


def run_attacks(attacks: list[Attack], folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Attacks on one server."""
    rows = []
    log = folder / "server.log"
    with serve(folder / "model", attacks[0].descriptors, log) as (port, pid):
        for attack in attacks:
            print(attack.name, "…", file=sys.stderr, flush=True)
            rows.append(run_attack(attack, Target(port, options.scale, options.seconds), pid, log))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the attacks")
    parser.add_argument(
        "--seconds", type=float, default=80.0, help="seconds after which an attack is given up"
    )
    options = parse_arguments(parser, argv, scale=0.002, seconds=0.2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 8192)), hard))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        attacks = [attack for attack in ATTACKS if options.only in attack.name]
        # a new server for each attack, so that none finds memory that another one has left
        for _, group in groupby(attacks, lambda attack: attack.descriptors if options.smoke else attack.name):
            rows += run_attacks(list(group), Path(folder), options)
    print(json.dumps(environment()))
    print_table("attacks", rows)
    write_json(options.json, {"attacks": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
