"""Serving on a GPU in bfloat16: 512 requests of mixed length at once, against transformers.

Translation (encoder-decoder base, random weights): sources of 8 to 64 tokens, each translated into 1.2 times
as many. transformers has no continuous batching for such models: its `generate` takes the requests sorted by
length, 32 at a time, each batch as long as its longest. Completion (GPT-2 124M): prompts of 16 to 256 tokens,
64 new tokens each; transformers' continuous batching. Only tokens that were asked for count. Afterwards
requests arrive at random at half the rate that could be served, and the time to first token is measured.
"""

from __future__ import annotations

import inspect
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import keepleft as kl
from command_line import add_device, choose_device, make_parser, parse_arguments
from keepleft.decoding.generation_config import GenerationConfig
from keepleft.serving.engine.continuous import ContinuousBatchingEngine
from keepleft.serving.engine.request import Event, FinishEvent, GenerationRequest, RequestHandle
from keepleft.serving.engine.thread import EngineThread
from report import environment, print_table, token_agreement, write_json
from timing import latency, take_turns
from transformers_models import to_transformers

STATIC_BATCH_SIZE = 32
DESIGNS = {
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "gpt2": kl.presets.gpt2,
}
# without flash attention the requests of a batch attend to one another, masked: fewer may be faster
CONTINUOUS_BATCHING: dict[str, dict[str, Any]] = {
    "continuous batching": {},
    **{f"continuous batching, {rows}": {"max_requests_per_batch": rows} for rows in (32, 64, 128)},
}
TokenLists = list[list[int]]
Generate = Callable[[], TokenLists]


def make_requests(name: str, vocab: int, count: int, scale: float) -> list[GenerationRequest]:
    """Requests of random tokens; lengths are multiplied by `scale`."""
    rng = random.Random(0)
    requests = []
    for _ in range(count):
        size = rng.randint(8, 64) if name == "base" else rng.randint(16, 256)
        max_new_tokens = 1.2 * size if name == "base" else 64
        config = GenerationConfig(
            max_new_tokens=round(max_new_tokens * scale), decoder_start_token_id=0 if name == "base" else None
        )
        tokens = [rng.randint(3, vocab - 1) for _ in range(round(size * scale))]
        requests.append(GenerationRequest(tokens, config))
    return requests


def make_engine(model: Any, name: str, max_num_seqs: int, smoke: bool) -> ContinuousBatchingEngine:
    """Without prefix caching: the same prompts come again and again here."""
    pages = 200 if smoke else 6_000 if name == "base" else 14_000
    engine = ContinuousBatchingEngine(
        model,
        max_num_seqs=max_num_seqs,
        pages=pages,
        page_size=16,
        source_pages=200 if smoke else 4_000,
        prefill_chunk_size=1 << 13,
        max_model_len=512,
        enable_prefix_caching=False,
    )
    engine.runner.warm_up()
    return engine


def generate_keepleft(engine: ContinuousBatchingEngine, requests: list[GenerationRequest]) -> Generate:
    def generate() -> TokenLists:
        tokens: dict[RequestHandle, list[int]] = {RequestHandle(request): [] for request in requests}
        for handle in tokens:
            engine.submit(handle)
        while engine.busy:
            for handle, event in engine.step():
                if isinstance(event, FinishEvent):
                    assert event.sequence is not None, event
                    tokens[handle] = event.sequence.tokens
        return list(tokens.values())

    return generate


def generate_static_batches(
    model: Any, requests: list[GenerationRequest], cache: str | None, device: str
) -> Generate:
    """transformers' `generate`, requests sorted by length, 32 at a time."""
    order = sorted(range(len(requests)), key=lambda number: len(requests[number].tokens))
    cache_options = {} if cache is None else {"cache_implementation": cache}

    def generate() -> TokenLists:
        outputs: TokenLists = [[] for _ in requests]
        for first in range(0, len(order), STATIC_BATCH_SIZE):
            numbers = order[first : first + STATIC_BATCH_SIZE]
            rows = [list(requests[number].tokens) for number in numbers]
            width = max(map(len, rows))
            length = max(requests[number].options.max_new_tokens or 0 for number in numbers)
            tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
            attention_mask = torch.tensor(
                [[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device
            )
            with torch.no_grad():
                sequences = model.generate(
                    tokens,
                    attention_mask=attention_mask,
                    num_beams=1,
                    do_sample=False,
                    max_new_tokens=length,
                    min_new_tokens=length,
                    **cache_options,
                )
            for number, row in zip(numbers, sequences[:, -length:].tolist(), strict=True):
                outputs[number] = row[: requests[number].options.max_new_tokens]
        return outputs

    return generate


def generate_continuous(model: Any, requests: list[GenerationRequest], settings: dict[str, Any]) -> Generate:
    """transformers' continuous batching."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    max_new_tokens = requests[0].options.max_new_tokens
    arguments: dict[str, Any] = {
        "generation_config": GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(max_memory_percent=0.2, **settings),
    }
    parameters = inspect.signature(model.generate_batch).parameters  # they differ between releases
    for name, value in (("persistent_manager", True), ("progress_bar", False)):
        if name in parameters:
            arguments[name] = value

    def generate() -> TokenLists:
        results = model.generate_batch(inputs=[list(request.tokens) for request in requests], **arguments)
        if "warmup" in parameters:
            arguments["warmup"] = False  # it is warm from now on
        in_order = sorted(results.values(), key=lambda result: int(str(result.request_id).rsplit("_", 1)[-1]))
        return [list(result.generated_tokens) for result in in_order]

    return generate


def times_to_first_token(
    engine: ContinuousBatchingEngine, requests: list[GenerationRequest], rate: float
) -> list[float]:
    """Seconds to the first token, sorted, of requests that arrive at random, `rate` per second.

    Where an engine streams nothing, the first event is the whole response.
    """
    engine_thread, rng = EngineThread(engine), random.Random(1)
    arrivals: list[float] = []
    first_events: dict[int, float] = {}

    def record(number: int) -> Callable[[Event], None]:
        return lambda event: first_events.setdefault(number, time.perf_counter()) and None

    for number, request in enumerate(requests):
        time.sleep(rng.expovariate(rate))
        arrivals.append(time.perf_counter())
        engine_thread.submit(request, record(number))
    engine_thread.drain(60)
    return sorted(first_events[number] - arrival for number, arrival in enumerate(arrivals))


def measure_half_load(
    name: str,
    engine: ContinuousBatchingEngine,
    requests: list[GenerationRequest],
    generate: Generate,
    rounds: int,
) -> dict[str, Any]:
    """Percentiles of the time to first token at half the rate that can be served, in milliseconds."""
    seconds = [latency(generate) for _ in range(1 + rounds)]
    rate = len(requests) / statistics.median(seconds[1:]) / 2
    # batch sizes that were not seen before are captured as CUDA graphs in a first run
    times_to_first_token(engine, requests[: len(requests) // 2], rate)
    times = times_to_first_token(engine, requests, rate)
    percentile = lambda share: round(1e3 * times[min(len(times) - 1, int(share * len(times)))], 1)
    return {
        "model": name,
        "requests/s": round(rate),
        "p50 ms": percentile(0.5),
        "p90 ms": percentile(0.9),
        "p99 ms": percentile(0.99),
    }


def make_peers(
    name: str, model: Any, requests: list[GenerationRequest], options: Any, device: str
) -> dict[str, Generate]:
    """transformers in all the ways that are asked for."""
    convert = lambda: to_transformers(model, model.token.weight.dtype, device)
    if name == "gpt2":
        if device != "cuda":
            print("transformers' continuous batching takes too long to start on a CPU: left out")
            return {}
        settings = CONTINUOUS_BATCHING if options.tuned else {"continuous batching": {}}
        return {
            label: generate_continuous(convert(), requests, setting) for label, setting in settings.items()
        }
    transformers = convert()
    peers = {"sorted batches": generate_static_batches(transformers, requests, None, device)}
    if options.static:
        peers["static cache"] = generate_static_batches(transformers, requests, "static", device)
    return peers


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_device(parser)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument("--no-transformers", dest="transformers", action="store_false")
    parser.add_argument(
        "--static", action="store_true", help="also transformers' static cache, which it compiles"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="also transformers' continuous batching with other batch sizes"
    )
    options = parse_arguments(parser, argv, requests=4, rounds=1)
    device = choose_device(options)
    if device is None:
        return
    rows, half_load_rows = [], []
    for name in options.models:
        torch.manual_seed(0)
        design = kl.presets.small(DESIGNS[name]) if options.smoke else DESIGNS[name]
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = kl.build(design, device=device, dtype=dtype).eval()
        model.notes = {
            "bos_token_id": 0,
            "decoder_start_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        requests = make_requests(name, design.vocab, options.requests, 0.125 if options.smoke else 1.0)
        engine = make_engine(model, name, options.requests, options.smoke)
        works = {"keepleft": generate_keepleft(engine, requests)}
        # before transformers is there: its threads go on in between
        half_load_rows.append(measure_half_load(name, engine, requests, works["keepleft"], options.rounds))
        print(half_load_rows[-1], flush=True)
        if options.transformers:
            works |= make_peers(name, model, requests, options, device)
        tokens = {}
        for side, work in works.items():
            started = time.perf_counter()
            tokens[side] = work()
            print(name, side, "warm-up", round(time.perf_counter() - started, 2), flush=True)
        samples = take_turns(works, options.rounds, device=device)
        num_tokens = sum(request.options.max_new_tokens or 0 for request in requests)
        speeds = {side: num_tokens / statistics.median(seconds) for side, seconds in samples.items()}
        for side, speed in speeds.items():
            rows.append(
                {
                    "model": name,
                    "engine": side,
                    "tok/s": round(speed),
                    "keepleft over it": speeds["keepleft"] / speed,
                    "seconds": statistics.median(samples[side]),
                    "agreement": round(token_agreement(tokens["keepleft"], tokens[side]), 3),
                }
            )
            print(rows[-1], flush=True)
        del model, engine
        if device == "cuda":
            torch.cuda.empty_cache()
    print_table(f"{options.requests} requests: tokens per second that were asked for", rows)
    print_table("time to first token at half load", half_load_rows)
    write_json(options.json, {"environment": environment(), "rows": rows, "half load": half_load_rows})


if __name__ == "__main__":
    main()
