"""Serving translations on a CPU in 8 bits: ours against CTranslate2 behind the same HTTP front, 32 clients at
once.

Both are the same server, routes and tokenizer; only the engine differs. CTranslate2 has no continuous
batching: its engine here takes all that waits, at most 32, as one batch, and what comes meanwhile waits for
its end (`batches`); or it gets one request at a time and the library's own queue and two workers do the rest
(`queue`). Clients are one process that asks again as soon as it has an answer. Sources have 6 to 40 words,
the weights are made up, no text ends before its length: 1.1 times as many tokens.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from report import about, arguments, show, write

SIZES = {"base": dict(vocab=32_000), "small": dict(vocab=8_000, dim=256, heads=4)}
CLIENTS, WORDS = 32, (6, 40)


def design(name: str) -> Any:
    import keepleft as kl

    wide = 2048 if name == "base" else 1024
    out = kl.presets.marian.but(feedforward=kl.FeedForward(wide, "relu"), **SIZES[name])
    stack = lambda mask: kl.StackDesign(6 if name == "base" else 3, (mask,), final_norm=False)
    return out.but(encoder=stack(kl.full), decoder=stack(kl.causal))


def made(name: str, folder: Path) -> None:
    """A model directory with a tokenizer of as many words, and the same for CTranslate2."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    import ctranslated
    import keepleft as kl

    torch.manual_seed(0)
    model = kl.build(design(name)).eval()
    # no end: each text gets its length
    model.notes = {"bos_token_id": 0, "decoder_start_token_id": 0, "pad_token_id": 0}
    words = {
        **{word: n for n, word in enumerate(ctranslated.NAMES)},
        **{f"w{n}": n for n in range(3, model.design.vocab)},
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kl.save(model, tokenizer, folder / "ours")
    ctranslated.write(model, folder / "theirs")


class Theirs:
    """CTranslate2 as an engine: what waits is one batch, or each request goes to the library's own queue."""

    def __init__(self, folder: Path, queue: bool, threads: int) -> None:
        import ctranslate2

        workers = (
            dict(inter_threads=threads, intra_threads=1)
            if queue
            else dict(inter_threads=1, intra_threads=threads)
        )
        self.translator = ctranslate2.Translator(str(folder), compute_type="int8", **workers)
        self.waiting: deque[Any] = deque()
        self.begun: list[tuple[Any, Any]] = []
        self.queue = queue
        self.written = 0

    busy = property(lambda self: bool(self.waiting or self.begun))

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
            "prompt_tokens": 0,
            "generation_tokens": self.written,
        }

    def step(self) -> Any:
        some = [self.waiting.popleft() for _ in range(min(CLIENTS, len(self.waiting)))]
        if not self.queue:
            return [pair for (pair,) in self._ended(some, self._asked(some))]
        self.begun += [(ticket, self._asked([ticket], asynchronous=True)[0]) for ticket in some]
        ready = {ticket for ticket, job in self.begun if job.done()}
        done = [(ticket, job) for ticket, job in self.begun if ticket in ready]
        self.begun = [(ticket, job) for ticket, job in self.begun if ticket not in ready]
        if not done:
            time.sleep(0.0005)
        return [pair for ticket, job in done for (pair,) in self._ended([ticket], [job.result()])]

    def _asked(self, some: list[Any], **more: Any) -> Any:
        names = ("<s>", "</s>", "<unk>")
        sources = [[names[n] if n < 3 else str(n) for n in ticket.request.tokens] for ticket in some]
        most = max(ticket.request.options.max_new_tokens for ticket in some)
        return self.translator.translate_batch(
            sources,
            beam_size=1,
            max_batch_size=CLIENTS,
            max_decoding_length=most,
            min_decoding_length=most,
            end_token=[names[1]],
            **more,
        )

    def _ended(self, some: list[Any], found: list[Any]) -> Any:
        from keepleft.decoding.hypotheses import FinishedSequence
        from keepleft.serving.engine.request import FinishEvent

        for ticket, one in zip(some, found, strict=True):
            tokens = [int(word) if word.isdigit() else 0 for word in one.hypotheses[0]][
                : ticket.request.options.max_new_tokens
            ]
            self.written += len(tokens)
            yield ((ticket, FinishEvent(0, "length", FinishedSequence(tokens, 0.0), last=True)),)


def serve(side: str, folder: Path, threads: int) -> None:
    """One of the servers, for a process of its own."""
    import torch

    from keepleft.cli.serve import SWITCH_INTERVAL
    from keepleft.pipelines.loading import load_for_inference
    from keepleft.serving.engine import capacity
    from keepleft.serving.engine.thread import run_in_own_thread
    from keepleft.serving.http.app import make_app
    from keepleft.serving.http.middleware.auth import APIKeys
    from keepleft.serving.http.server import Server
    from keepleft.serving.http.service import Service

    torch.set_num_threads(threads)
    sys.setswitchinterval(SWITCH_INTERVAL)
    found = run_in_own_thread(lambda: load_for_inference(str(folder / "ours"), dtype="int8", device="cpu"))
    torch.set_num_threads(capacity.best_threads(found.model))
    serving: Any = run_in_own_thread(lambda: capacity.make_engine(found.model, found.tokenizer))
    if side != "ours":
        serving = Theirs(folder / "theirs", side == "queue", threads)
    service = Service(found, serving, name="race")
    front = make_app(
        service, keys=APIKeys([]), allowed_hosts=None, allowed_origins=[], log=lambda level, what: None
    )
    Server(
        front,
        service,
        host="127.0.0.1",
        port=0,
        shutdown_timeout=1.0,
        on_ready=lambda host, port: print(port, flush=True),
    ).run()


async def clients(port: int, seconds: float) -> tuple[float, list[float]]:
    """32 of them for so long: tokens a second, and how long each answer took."""
    import httpx

    waits: list[float] = []
    tokens, stop = 0, time.perf_counter() + seconds
    many = httpx.Limits(max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, limits=many) as client:

        async def one(n: int) -> None:
            nonlocal tokens
            dice = random.Random(n)
            while time.perf_counter() < stop:
                size = dice.randint(*WORDS)
                text, limit = " ".join(f"w{dice.randint(3, 7_999)}" for _ in range(size)), round(1.1 * size)
                before = time.perf_counter()
                answer = await client.post(
                    "/v1/translate", json={"model": "race", "input": text, "max_new_tokens": limit}
                )
                answer.raise_for_status()
                if time.perf_counter() < stop:
                    waits.append(time.perf_counter() - before)
                    tokens += limit

        before = time.perf_counter()
        await asyncio.gather(*(one(n) for n in range(CLIENTS)))
    return tokens / (min(time.perf_counter(), stop) - before), waits


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=SIZES)
    parser.add_argument("--sides", nargs="+", default=["ours", "batches", "queue"])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--serve", nargs=2, metavar=("SIDE", "FOLDER"), help="be one of the servers")
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve[0], Path(chosen.serve[1]), chosen.threads)
        return
    rows = []
    for size in chosen.sizes:
        with tempfile.TemporaryDirectory() as folder:
            made(size, Path(folder))
            rows += raced(size, Path(folder), chosen)
    show(f"{CLIENTS} clients, int8, {chosen.threads} threads: tokens a second", rows)
    write(chosen.json, {"about": about(), "rows": rows})


def raced(size: str, folder: Path, chosen: Any) -> list[dict[str, Any]]:
    found: dict[str, list[tuple[float, list[float]]]] = {side: [] for side in chosen.sides}
    for _ in range(chosen.rounds):
        for side in chosen.sides:  # one server at a time: the cores are few
            child = subprocess.Popen(
                [sys.executable, __file__, "--serve", side, str(folder), "--threads", str(chosen.threads)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None
            try:
                port = int(child.stdout.readline())
                asyncio.run(clients(port, 2.0))  # warm
                found[side].append(asyncio.run(clients(port, chosen.seconds)))
            finally:
                child.terminate()
                threading.Timer(15, child.kill).start()
                child.wait(30)
    speeds = {side: statistics.median(speed for speed, _ in runs) for side, runs in found.items()}
    out = []
    for side, runs in found.items():
        waits = sorted(wait for _, some in runs for wait in some)
        out.append(
            {
                "model": size,
                "side": side,
                "tok/s": round(speeds[side]),
                "ours over it": speeds["ours"] / speeds[side],
                "p50 s": waits[len(waits) // 2],
                "p99 s": waits[int(0.99 * (len(waits) - 1))],
            }
        )
        print(out[-1], flush=True)
    return out


if __name__ == "__main__":
    main()
