"""Serving translations on a CPU in int8 against CTranslate2 behind the same HTTP server, 32 clients at once.

Both have the same server, routes and tokenizer; only the engine differs. CTranslate2 has no continuous
batching: its engine here either takes all waiting requests, at most 32, as one batch, and what arrives
meanwhile waits for its end (`dynamic batching`); or it gets one request at a time, and the library's own
queue and workers do the rest (`request queue`). The clients are one process; each sends its next request as
soon as it has a response. Sources have 6 to 40 words, the weights are random, no sequence ends early: each
gets 1.1 times as many tokens as its source.
"""

from __future__ import annotations

import asyncio
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from child_process import child_process
from command_line import make_parser, parse_arguments
from report import environment, print_table, write_json

VOCABS = {"base": 32_000, "small": 8_000}
ENGINES = ("keepleft", "dynamic batching", "request queue")
WORDS = (6, 40)
TOKENS_PER_WORD = 1.1
Row = dict[str, Any]


def make_design(size: str, smoke: bool) -> Any:
    import keepleft as kl

    if smoke:
        return kl.presets.small(kl.presets.marian).but(feedforward=kl.FeedForward(128, "relu"))
    layers, width = (6, 2048) if size == "base" else (3, 1024)
    stack = lambda mask: kl.StackDesign(layers, (mask,), final_norm=False)
    design = kl.presets.marian.but(
        vocab=VOCABS[size],
        feedforward=kl.FeedForward(width, "relu"),
        encoder=stack(kl.full),
        decoder=stack(kl.causal),
    )
    return design if size == "base" else design.but(dim=256, heads=4)


def make_models(design: Any, folder: Path) -> None:
    """A model directory with a tokenizer of as many words, and the same for CTranslate2."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    import ctranslate2_weights
    import keepleft as kl

    torch.manual_seed(0)
    model = kl.build(design).eval()
    # no end token: each sequence gets its full length
    model.notes = {"bos_token_id": 0, "decoder_start_token_id": 0, "pad_token_id": 0}
    words = {token: number for number, token in enumerate(ctranslate2_weights.SPECIAL_TOKENS)}
    words |= {f"w{number}": number for number in range(len(words), design.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kl.save(model, tokenizer, folder / "keepleft")
    ctranslate2_weights.convert(model, folder / "ctranslate2")


class CTranslate2Engine:
    """CTranslate2 as an engine of the server: dynamic batching, or the library's own request queue."""

    def __init__(self, folder: Path, use_queue: bool, threads: int, max_batch_size: int) -> None:
        import ctranslate2

        workers = (
            dict(inter_threads=threads, intra_threads=1)
            if use_queue
            else dict(inter_threads=1, intra_threads=threads)
        )
        self.translator = ctranslate2.Translator(str(folder), compute_type="int8", **workers)
        self.waiting: deque[Any] = deque()
        self.running: list[tuple[Any, Any]] = []
        self.use_queue = use_queue
        self.max_batch_size = max_batch_size
        self.prompt_tokens: Counter[str] = Counter()
        self.generation_tokens: Counter[str] = Counter()  # by API key

    busy = property(lambda self: bool(self.waiting or self.running))

    def validate(self, request: Any) -> None:
        pass

    def submit(self, handle: Any) -> None:
        self.waiting.append(handle)

    def clear(self) -> None:
        self.waiting.clear()

    def stats(self) -> dict[str, float]:
        return {
            "running": 0,
            "waiting": len(self.waiting),
            "prompt_tokens": self.prompt_tokens.total(),
            "generation_tokens": self.generation_tokens.total(),
        }

    def activity(self) -> Any:
        from keepleft.serving.engine.activity import count_activity

        running = [(handle.request.tenant, 1) for handle, _ in self.running]
        return count_activity(running, (), self.waiting, time.monotonic())

    def step(self) -> Any:
        count = min(self.max_batch_size, len(self.waiting))
        handles = [self.waiting.popleft() for _ in range(count)]
        if not self.use_queue:
            results = self._translate(handles) if handles else []
            return [self._finish(handle, result) for handle, result in zip(handles, results, strict=True)]
        self.running += [(handle, self._translate([handle], asynchronous=True)[0]) for handle in handles]
        done = [(handle, job) for handle, job in self.running if job.done()]
        done_handles = {handle for handle, _ in done}
        self.running = [(handle, job) for handle, job in self.running if handle not in done_handles]
        if not done:
            time.sleep(0.0005)
        return [self._finish(handle, job.result()) for handle, job in done]

    def _translate(self, handles: list[Any], **options: Any) -> Any:
        import ctranslate2_weights

        length = max(handle.request.options.max_new_tokens for handle in handles)
        return self.translator.translate_batch(
            [ctranslate2_weights.token_names(handle.request.tokens) for handle in handles],
            beam_size=1,
            max_batch_size=self.max_batch_size,
            max_decoding_length=length,
            min_decoding_length=length,
            end_token=["</s>"],
            **options,
        )

    def _finish(self, handle: Any, result: Any) -> Any:
        from keepleft.decoding.hypotheses import FinishedSequence
        from keepleft.serving.engine.request import FinishEvent

        tokens = [int(word) if word.isdigit() else 0 for word in result.hypotheses[0]]
        tokens = tokens[: handle.request.options.max_new_tokens]
        self.generation_tokens[handle.request.tenant.key] += len(tokens)
        return handle, FinishEvent(0, "length", FinishedSequence(tokens, 0.0), last=True)


def make_server(
    engine_name: str, folder: Path, threads: int, clients: int, on_ready: Callable[[str, int], None]
) -> Any:
    import torch

    from keepleft.pipelines.loading import load_for_inference
    from keepleft.serving.engine import capacity
    from keepleft.serving.engine.thread import run_in_own_thread
    from keepleft.serving.http.app import make_app
    from keepleft.serving.http.middleware.auth import APIKeys
    from keepleft.serving.http.server import Server
    from keepleft.serving.http.service import Service

    torch.set_num_threads(threads)
    loaded = run_in_own_thread(
        lambda: load_for_inference(str(folder / "keepleft"), dtype="int8", device="cpu")
    )
    if engine_name == "keepleft":
        torch.set_num_threads(capacity.best_threads(loaded.model))
        engine: Any = run_in_own_thread(lambda: capacity.make_engine(loaded.model, loaded.tokenizer))
    else:
        engine = CTranslate2Engine(folder / "ctranslate2", engine_name == "request queue", threads, clients)
    service = Service(loaded, engine, name="race")
    app = make_app(
        service, keys=APIKeys([]), allowed_hosts=None, allowed_origins=[], log=lambda level, message: None
    )
    return Server(app, service, host="127.0.0.1", port=0, shutdown_timeout=1.0, on_ready=on_ready)


def serve(engine_name: str, folder: Path, threads: int, clients: int) -> None:
    """Serve in this process until a signal; the first line printed is the port."""
    from keepleft.serving.http.served_app import SWITCH_INTERVAL

    sys.setswitchinterval(SWITCH_INTERVAL)
    make_server(engine_name, folder, threads, clients, lambda host, port: print(port, flush=True)).run()


@contextmanager
def server_process(engine_name: str, folder: Path, threads: int, clients: int) -> Iterator[int]:
    """The port of a server in a process of its own."""
    command = [sys.executable, __file__, "--serve", engine_name, str(folder)]
    command += ["--threads", str(threads), "--clients", str(clients)]
    with child_process(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())


@contextmanager
def server_thread(engine_name: str, folder: Path, threads: int, clients: int) -> Iterator[int]:
    """The port of a server in a thread of this process, for a smoke run."""
    ports: queue.Queue[int] = queue.Queue()
    server = make_server(engine_name, folder, threads, clients, lambda host, port: ports.put(port))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield ports.get(timeout=60)
    finally:
        server.stop()
        thread.join(30)


async def run_clients(port: int, seconds: float, clients: int, vocab: int) -> tuple[float, list[float]]:
    """Tokens per second, and the latency of each response. Every client sends at least one request."""
    import httpx

    latencies: list[float] = []
    num_tokens, stop_at = 0, time.perf_counter() + seconds
    limits = httpx.Limits(max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=limits) as http:

        async def run_client(number: int) -> None:
            nonlocal num_tokens
            rng = random.Random(number)
            is_first = True
            while is_first or time.perf_counter() < stop_at:
                num_words = rng.randint(*WORDS)
                text = " ".join(f"w{rng.randint(3, vocab - 1)}" for _ in range(num_words))
                length = round(TOKENS_PER_WORD * num_words)
                sent = time.perf_counter()
                response = await http.post(
                    "/v1/translate", json={"model": "race", "input": text, "max_new_tokens": length}
                )
                response.raise_for_status()
                if is_first or time.perf_counter() < stop_at:
                    latencies.append(time.perf_counter() - sent)
                    num_tokens += length
                is_first = False

        started = time.perf_counter()
        await asyncio.gather(*map(run_client, range(clients)))
    return num_tokens / (min(time.perf_counter(), max(stop_at, started + 1e-3)) - started), latencies


def measure(size: str, options: Any) -> list[Row]:
    design = make_design(size, options.smoke)
    start = server_thread if options.smoke else server_process
    results: dict[str, list[tuple[float, list[float]]]] = {engine: [] for engine in options.engines}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_models(design, folder)
        for _ in range(options.rounds):
            for engine in options.engines:  # one server at a time: the cores are few
                with start(engine, folder, options.threads, options.clients) as port:
                    load = lambda seconds, port=port: asyncio.run(
                        run_clients(port, seconds, options.clients, design.vocab)
                    )
                    load(options.warmup)
                    results[engine].append(load(options.seconds))
    speeds = {engine: statistics.median(speed for speed, _ in runs) for engine, runs in results.items()}
    rows = []
    for engine, runs in results.items():
        latencies = sorted(latency for _, run in runs for latency in run)
        row = {"model": size, "engine": engine, "tok/s": round(speeds[engine])}
        if "keepleft" in speeds:
            row["keepleft over it"] = speeds["keepleft"] / speeds[engine]
        row["p50 s"] = latencies[len(latencies) // 2]
        row["p99 s"] = latencies[int(0.99 * (len(latencies) - 1))]
        rows.append(row)
        print(row, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=VOCABS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds of load before measuring")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--serve", nargs=2, metavar=("ENGINE", "FOLDER"), help="be one of the servers")
    options = parse_arguments(
        parser, argv, sizes=["small"], clients=4, seconds=0.2, warmup=0.0, rounds=1, threads=1
    )
    if options.serve:
        serve(options.serve[0], Path(options.serve[1]), options.threads, options.clients)
        return
    rows = [row for size in options.sizes for row in measure(size, options)]
    title = f"{options.clients} clients, int8, {options.threads} threads: tokens per second and latency"
    print_table(title, rows)
    write_json(options.json, {"environment": environment(), "rows": rows})


if __name__ == "__main__":
    main()
