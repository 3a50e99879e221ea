"""Replicas and workers on Ray against one process without it: requests and rows per second on this machine.

The same tiny decoder is served by `keepleft serve`, and by one and two replicas; the clients are connections
of this process, each of which sends its next request as soon as it has an answer: few, so that one engine
takes them all in a batch that costs hardly more than one row, or many, so that it is busy with rows. The same
rows are a batch job in one process, and on one and two workers, timed from the first result to the last.
`Ray's share` is the processor time of Ray's own processes (proxy, controller, object store, …) in that of all
that serve. Rounds alternate.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from command_line import make_parser, parse_arguments
from report import environment, print_table, write_json

LOADS = ((16, 64), (48, 64), (192, 32))  # connections, and tokens of a request
ROW_TOKENS = 8
TEXTS = ["the sea is calm, and the ship sails on", "12 345"]
MIB = 1 << 20
Row = dict[str, Any]


def make_model(folder: Path) -> Path:
    """A tiny decoder with a tokenizer, random weights."""
    import torch

    import keepleft as kl
    from keepleft.data.tokenizer import train_tokenizer

    tokenizer = train_tokenizer("bpe", TEXTS * 3, 300, running_text=True, min_frequency=2)
    design = kl.presets.small(kl.presets.llama3).but(vocab=tokenizer.get_vocab_size())
    model = kl.build(design, generator=torch.Generator().manual_seed(0)).eval()
    kl.save(model, tokenizer, folder)
    return folder


@contextmanager
def server(model: Path, replicas: int | None) -> Iterator[tuple[str, int]]:
    """`keepleft serve`, and its process id."""
    command = [sys.executable, "-m", "keepleft", "serve", str(model), "--port", "0", "--threads", "1"]
    command += ["--log-level", "error"] + ([] if replicas is None else ["--replicas", str(replicas)])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if match := re.search(r"API at (http://\S+)/v1", line):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield match[1], process.pid
                break
        else:
            raise RuntimeError("".join(lines))
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stderr.close()


class Client:
    """A connection that sends its next request as soon as it has an answer. It takes little time itself: on a
    small machine, that would be missing where a second replica could use it.
    """

    def __init__(self, address: tuple[str, int], n: int, new_tokens: int) -> None:
        self.address = address
        self.prompt = f"the sea {n}"
        self.new_tokens = new_tokens
        self.count = 0
        self.connect()

    def connect(self) -> None:
        self.socket = socket.create_connection(self.address, timeout=60)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received = b""
        self.ask()

    def ask(self) -> None:
        prompt = f"{self.prompt} {self.count}"
        body = json.dumps({"prompt": prompt, "max_tokens": self.new_tokens, "temperature": 0}).encode()
        host = ":".join(map(str, self.address))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        self.socket.sendall(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)

    def read(self) -> bool:
        """Read on; whether the answer is complete. Raises ConnectionError where the server has hung up."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise ConnectionError("the server has closed the connection")
        self.received += received
        head, end, body = self.received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: *(\d+)", head) if end else None
        if length is None or len(body) < int(length[1]):
            return False
        assert head.startswith(b"HTTP/1.1 200"), head
        self.received = b""
        self.count += 1
        return True


def requests_per_second(url: str, seconds: float, connections: int, new_tokens: int) -> float:
    """Of clients that ask as fast as they are answered."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    started = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        clients = [Client((address.hostname, address.port), n, new_tokens) for n in range(connections)]
        for client in clients:
            selector.register(client.socket, selectors.EVENT_READ, client)
        while selector.get_map():
            is_over = time.perf_counter() - started > seconds
            for key, _ in selector.select(60):
                client = key.data
                try:
                    is_complete = client.read()
                except ConnectionError:  # HAProxy begins anew when it has heard of another replica
                    selector.unregister(client.socket)
                    client.connect()
                    selector.register(client.socket, selectors.EVENT_READ, client)
                    continue
                if is_complete and is_over:
                    selector.unregister(client.socket)
                    client.socket.close()
                elif is_complete:
                    client.ask()
    return sum(client.count for client in clients) / (time.perf_counter() - started)


def measure_serving(model: Path, replicas: int | None, seconds: float) -> dict[tuple[int, int], Row]:
    """A row for each load."""
    from keepleft.cluster.memory import process_memory, processor_seconds

    out = {}
    with server(model, replicas) as (url, pid):
        for load in LOADS:
            requests_per_second(url, seconds / 4, *load)  # warm-up
            before = processor_seconds(pid)
            rate = requests_per_second(url, seconds, *load)
            used = {name: value - before.get(name, 0.0) for name, value in processor_seconds(pid).items()}
            memory = process_memory(pid)
            ours = sum(memory.get("replica", []))
            out[load] = {
                "rate": rate,
                "Ray's share": 1 - used["replica"] / sum(used.values()) if replicas else 0.0,
                "replicas MiB": ours // MIB,
                "Ray MiB": (sum(map(sum, memory.values())) - ours) // MIB,
            }
    return out


def measure_batch(model: Path, rows: Path, workers: int | None) -> Row:
    """Rows per second, between the first part that is done and the last."""
    from keepleft.batch import local
    from keepleft.batch.job import make_job
    from keepleft.batch.tasks import TaskSpec
    from keepleft.decoding.generation_config import GenerationConfig

    options = GenerationConfig(max_new_tokens=ROW_TOKENS, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        job = make_job(TaskSpec(task="generate", model=str(model), options=options), [str(rows)], folder)
        started = time.perf_counter()
        if workers is None:
            reports = local.run_parts(job, job.parts)
        else:
            from keepleft.cluster.batch_workers import run_parts

            reports = run_parts(job, job.parts, workers=workers, gpus_per_worker=0, address=None)
        times = []
        with closing(reports):
            for report in reports:
                times.append((time.perf_counter(), report.num_rows))
    num_rows = sum(count for _, count in times[1:])
    return {"rate": num_rows / max(1e-9, times[-1][0] - times[0][0]), "start": times[0][0] - started}


def summarize(name: str, rows: list[Row], plain: float) -> Row:
    """The medians of an arm."""
    rate = statistics.median(row["rate"] for row in rows)
    extra = {
        key: statistics.median(row[key] for row in rows) for key in rows[0] if key not in ("rate", "mark")
    }
    return {"": name, "per second": rate, "to one process": rate / plain, **extra}


def main(arguments: list[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of load in each round")
    parser.add_argument("--rows", type=int, default=12_000)
    options = parse_arguments(parser, arguments)
    if options.smoke:
        options.rounds, options.seconds, options.rows = 1, 0.5, 300
    replica_counts = (None, 1) if options.smoke else (None, 1, 2)
    serving: dict[tuple[int, int], dict[int | None, list[Row]]] = {
        load: {count: [] for count in replica_counts} for load in LOADS
    }
    batch: dict[int | None, list[Row]] = {count: [] for count in replica_counts}
    with tempfile.TemporaryDirectory() as temporary:
        model = make_model(Path(temporary) / "tiny")
        rows = Path(temporary) / "rows.txt"
        rows.write_text("".join(f"the ship {n}\n" for n in range(options.rows)))
        for _ in range(options.rounds):
            for count in replica_counts:
                for load, row in measure_serving(model, count, options.seconds).items():
                    serving[load][count].append(row)
                batch[count].append(measure_batch(model, rows, count))
    names = {None: "one process", 1: "1 on Ray", 2: "2 on Ray"}
    result = {}
    titles = {
        f"requests of {new_tokens} tokens by {connections} clients": arms
        for (connections, new_tokens), arms in serving.items()
    }
    for title, arms in (*titles.items(), (f"rows of {ROW_TOKENS} tokens", batch)):
        plain = statistics.median(row["rate"] for row in arms[None])
        result[title] = [summarize(names[count], measured, plain) for count, measured in arms.items()]
        print_table(f"{title} per second", result[title])
    print_table("machine", [environment()])
    write_json(options.json, {**result, "environment": environment()})


if __name__ == "__main__":
    main()
