"""Serving on a GPU in bfloat16: 512 requests of mixed length at once, ours against transformers.

Translation (encoder-decoder base, made-up weights): sources of 8 to 64 tokens, for each a text of 1.2 times
as many. transformers has no continuous batching for such models: its `generate` takes the requests sorted by
length, 32 at a time, and each batch as long as its longest. Completion (GPT-2 124M): prompts of 16 to 256
tokens, 64 more for each; transformers' continuous batching. Only tokens that were asked for count. Afterwards
requests come at random, half as many as could be served in the same time, and the time to the first token of
each is measured.
"""

from __future__ import annotations

import inspect
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.request import Event, FinishEvent, GenerationRequest, RequestHandle
from keepleft.serving.engine.thread import EngineThread
from report import about, arguments, show, write

COUNT = 512
STATIC = 32
MORE = 64
DESIGNS = {
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "gpt2": kl.presets.gpt2,
}
TUNED: dict[
    str, dict[str, Any]
] = {  # without flash attention all at work look at one another, masked: fewer may be quicker
    "continuous": {},
    **{f"continuous, {rows}": {"max_requests_per_batch": rows} for rows in (32, 64, 128)},
}
Texts = list[list[int]]


def asks(name: str, vocab: int) -> list[GenerationRequest]:
    dice, out = random.Random(0), []
    for _ in range(COUNT):
        size = dice.randint(8, 64) if name == "base" else dice.randint(16, 256)
        limit = round(1.2 * size) if name == "base" else MORE
        options = GenerationConfig(max_new_tokens=limit, decoder_start_token_id=0 if name == "base" else None)
        out.append(GenerationRequest([dice.randint(3, vocab - 1) for _ in range(size)], options))
    return out


def engine(model: Any, name: str) -> ContinuousBatchingEngine:
    """Beginnings are not shared: the same prompts come again and again here."""
    out = ContinuousBatchingEngine(
        model,
        max_num_seqs=COUNT,
        pages=6_000 if name == "base" else 14_000,
        page_size=16,
        source_pages=4_000,
        prefill_chunk_size=1 << 13,
        max_model_len=512,
        enable_prefix_caching=False,
    )
    out.runner.warm_up()
    return out


def ours(engine: ContinuousBatchingEngine, some: list[GenerationRequest]) -> Callable[[], Texts]:
    def run() -> Texts:
        told: dict[RequestHandle, list[int]] = {RequestHandle(ask): [] for ask in some}
        for ticket in told:
            engine.submit(ticket)
        while engine.busy:
            for ticket, event in engine.step():
                if isinstance(event, FinishEvent):
                    assert event.sequence is not None, event
                    told[ticket] = event.sequence.tokens
        return list(told.values())

    return run


def peer(model: Any) -> Any:
    from transformers import GPT2LMHeadModel, MarianMTModel

    with tempfile.TemporaryDirectory() as folder:
        kl.save(model, None, folder)
        kind = MarianMTModel if isinstance(model, kl.EncoderDecoder) else GPT2LMHeadModel
        out = kind.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    out.generation_config.eos_token_id = out.generation_config.forced_eos_token_id = None
    out.generation_config.pad_token_id = 0
    return out


def static(model: Any, some: list[GenerationRequest], cache: str | None) -> Callable[[], Texts]:
    """Sorted by length, 32 at a time."""
    order = sorted(range(len(some)), key=lambda n: len(some[n].tokens))
    said = {} if cache is None else {"cache_implementation": cache}

    def run() -> Texts:
        out: Texts = [[] for _ in some]
        for first in range(0, len(order), STATIC):
            which = order[first : first + STATIC]
            rows = [list(some[n].tokens) for n in which]
            width, most = max(map(len, rows)), max(some[n].options.max_new_tokens or 0 for n in which)
            tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device="cuda")
            there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device="cuda")
            with torch.no_grad():
                found = model.generate(
                    tokens,
                    attention_mask=there,
                    num_beams=1,
                    do_sample=False,
                    max_new_tokens=most,
                    min_new_tokens=most,
                    **said,
                )
            for n, row in zip(which, found[:, -most:].tolist(), strict=True):
                out[n] = row[: some[n].options.max_new_tokens]
        return out

    return run


def continuous(model: Any, some: list[GenerationRequest], settings: dict[str, Any]) -> Callable[[], Texts]:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    said = {
        "generation_config": GenerationConfig(
            max_new_tokens=MORE, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(max_memory_percent=0.2, **settings),
    }
    known = inspect.signature(model.generate_batch).parameters
    said |= {
        name: value
        for name, value in (("persistent_manager", True), ("progress_bar", False))
        if name in known
    }

    def run() -> Texts:
        found = model.generate_batch(inputs=[list(ask.tokens) for ask in some], **said)
        if "warmup" in known:
            said["warmup"] = False  # it is warm from now on
        rows = sorted(found.values(), key=lambda one: int(str(one.request_id).rsplit("_", 1)[-1]))
        return [list(one.generated_tokens) for one in rows]

    return run


def first_tokens(engine: ContinuousBatchingEngine, some: list[GenerationRequest], rate: float) -> list[float]:
    """Seconds to the first token, or for a whole answer where nothing is told before, of requests that come
    at random.
    """
    running, dice = EngineThread(engine), random.Random(1)
    came: list[float] = []
    heard: dict[int, float] = {}

    def hear(n: int) -> Callable[[Event], None]:
        return lambda event: heard.setdefault(n, time.perf_counter()) and None

    for n, ask in enumerate(some):
        time.sleep(dice.expovariate(rate))
        came.append(time.perf_counter())
        running.submit(ask, hear(n))
    running.drain(60)
    return sorted(heard[n] - moment for n, moment in enumerate(came))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument("--alone", action="store_true", help="ours without transformers")
    parser.add_argument(
        "--static", action="store_true", help="transformers' static cache too, which it compiles"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="transformers' continuous batching with other settings too"
    )
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no GPU here: nothing to race")
        return
    rows, waits = [], []
    for name in chosen.models:
        torch.manual_seed(0)
        model = kl.build(DESIGNS[name], device="cuda", dtype=torch.bfloat16).eval()
        model.notes = {
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        some = asks(name, model.design.vocab)
        serving = engine(model, name)
        works = {"ours": ours(serving, some)}
        # before others are there: their threads go on in between
        waits.append(half_load(name, serving, some, works["ours"]))
        print(waits[-1], flush=True)
        if not chosen.alone:
            other = peer(model)
            if name == "gpt2":
                works |= {
                    side: continuous(other if side == "continuous" else peer(model), some, settings)
                    for side, settings in TUNED.items()
                    if side == "continuous" or chosen.tuned
                }
            else:
                works["batches"] = static(other, some, None)
            if chosen.static and name == "base":
                works["static cache"] = static(other, some, "static")
        said, times = {}, {side: [] for side in works}
        for side, work in works.items():
            before = time.perf_counter()
            said[side] = work()
            print(name, side, "warm-up", round(time.perf_counter() - before, 2), flush=True)
        for _ in range(chosen.rounds):
            for side, work in works.items():
                torch.cuda.synchronize()
                before = time.perf_counter()
                work()
                torch.cuda.synchronize()
                times[side].append(time.perf_counter() - before)
        total = sum(ask.options.max_new_tokens or 0 for ask in some)
        speeds = {side: total / statistics.median(some_times) for side, some_times in times.items()}
        for side, speed in speeds.items():
            row: dict[str, Any] = {
                "model": name,
                "side": side,
                "tok/s": round(speed),
                "ours over it": speeds["ours"] / speed,
                "seconds": statistics.median(times[side]),
            }
            pairs = [
                a == b
                for x, y in zip(said["ours"], said[side], strict=True)
                for a, b in zip(x, y, strict=True)
            ]
            rows.append(row | {"same": round(sum(pairs) / len(pairs), 3)})
            print(rows[-1], flush=True)
        del model, serving
        torch.cuda.empty_cache()
    show("512 requests: tokens a second that were asked for", rows)
    show("time to the first token at half load, milliseconds", waits)
    write(chosen.json, {"about": about(), "rows": rows, "waits": waits})


def half_load(
    name: str, serving: ContinuousBatchingEngine, some: list[GenerationRequest], work: Callable[[], Texts]
) -> dict[str, Any]:
    seconds = []
    for _ in range(4):
        before = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - before)
    rate = len(some) / statistics.median(seconds[1:]) / 2
    first_tokens(serving, some[:256], rate)  # numbers of rows that were not seen before are recorded
    found = first_tokens(serving, some, rate)
    at = lambda share: round(1e3 * found[min(len(found) - 1, int(share * len(found)))], 1)
    return {"model": name, "requests/s": round(rate), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99)}


if __name__ == "__main__":
    main()
