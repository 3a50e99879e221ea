"""Generation on a CPU, greedy and with 4 beams, against CTranslate2 and transformers.

keepleft runs with plain weights (`plain`), prepacked by kl.prepack (`prepacked`) and with a compiled decode
step (`compiled`). All have the same random weights, read the same 24 tokens and generate 24; no sequence ends
early. Each implementation is a process of its own; they take turns, the medians count. A ratio is tokens per
second, keepleft over CTranslate2 in the same precision: higher is better. `agreement` is the share of tokens
that are the same as CTranslate2's. On a busy machine `--threads 1 --clock process` counts CPU time.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

import ctranslate2_weights
import keepleft as kl
from command_line import make_parser, parse_arguments
from report import environment, print_table, system_load, token_agreement, write_json
from transformers_models import to_transformers

LENGTH, NUM_BEAMS = 24, 4
MIN_ROUNDS = 3
PAUSE = 0.3  # seconds until the threads of the implementation before have gone to sleep
SPAWN = multiprocessing.get_context("spawn")
TARGETS = {"float32": 1.2, "int8": 2.0}
DESIGNS = {
    "gpt2": kl.presets.gpt2,
    "base": kl.presets.marian.but(vocab=32_000, feedforward=kl.FeedForward(2048, "relu")),
    "small": kl.presets.marian.but(
        vocab=8_000,
        dim=256,
        heads=4,
        feedforward=kl.FeedForward(1024, "relu"),
        encoder=kl.StackDesign(3, (kl.full,), final_norm=False),
        decoder=kl.StackDesign(3, (kl.causal,), final_norm=False),
    ),
}
Generate = Callable[[Tensor, int], list[list[int]]]  # prompts and beams → tokens


def generate_keepleft(model: Any, prompts: Tensor, num_beams: int) -> list[list[int]]:
    """By the public function."""
    completions = kl.completions(
        model,
        None,
        prompts.tolist(),
        num_beams=num_beams,
        max_new_tokens=LENGTH,
        length_penalty=0.0 if num_beams > 1 else None,
    )
    return [candidates[0].tokens for candidates in completions]


def generate_ctranslate2(engine: Any, prompts: Tensor, num_beams: int) -> list[list[int]]:
    rows = [ctranslate2_weights.token_names(row) for row in prompts.tolist()]
    if hasattr(engine, "translate_batch"):
        results = engine.translate_batch(
            rows,
            beam_size=num_beams,
            min_decoding_length=LENGTH,
            max_decoding_length=LENGTH,
            length_penalty=0,
        )
        return [ctranslate2_weights.token_numbers(result.hypotheses[0]) for result in results]
    results = engine.generate_batch(
        rows,
        beam_size=num_beams,
        min_length=LENGTH,
        max_length=LENGTH,
        length_penalty=0,
        include_prompt_in_result=False,
    )
    return [result.sequences_ids[0] for result in results]


@torch.no_grad()
def generate_transformers(model: Any, prompts: Tensor, num_beams: int) -> list[list[int]]:
    sequences = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        num_beams=num_beams,
        do_sample=False,
        min_new_tokens=LENGTH,
        max_new_tokens=LENGTH,
        length_penalty=0.0,
        forced_eos_token_id=None,
    )
    return [row[-LENGTH:].tolist() for row in sequences]


def make_generate(implementation: str, design: kl.Design, folder: str, threads: int) -> Generate:
    """An implementation, such as `prepacked int8`, ready to generate."""
    torch.set_num_threads(threads)
    name, _, dtype = implementation.partition(" ")
    if name == "ctranslate2":
        engine = ctranslate2_weights.open_engine(Path(folder), design, dtype, threads)
        return partial(generate_ctranslate2, engine)
    model = make_model(design)
    if name == "transformers":
        return partial(generate_transformers, to_transformers(model))
    if name != "plain":
        model = kl.prepack(model, dtype, compiled=name == "compiled")
    return partial(generate_keepleft, model)


def make_model(design: kl.Design) -> Any:
    torch.manual_seed(0)
    model = kl.build(design).eval()
    model.notes = {"bos_token_id": 0, "decoder_start_token_id": 0, "pad_token_id": 1}
    return model


def make_prompts(design: kl.Design, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, design.vocab, (batch, LENGTH), generator=generator)


def worker(pipe: Any, implementation: str, design: kl.Design, folder: str, threads: int, clock: str) -> None:
    """One implementation in a process of its own: idle threads of one library spin, and slow another down.

    Receives (batch, beams), and sends the seconds and the tokens; ends when it receives None.
    """
    generate = make_generate(implementation, design, folder, threads)
    now = time.perf_counter if clock == "wall" else time.process_time
    pipe.send("ready")
    while (message := pipe.recv()) is not None:
        batch, num_beams = message
        prompts = make_prompts(design, batch)
        started = now()
        tokens = generate(prompts, num_beams)
        pipe.send((now() - started, tokens))


def race(
    pipes: dict[str, Any], batch: int, num_beams: int, seconds: float
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """The seconds of each implementation, in rounds, and its tokens. Each round starts with another one."""
    samples: dict[str, list[float]] = {name: [] for name in pipes}
    tokens = {}
    names = list(pipes)
    min_rounds = MIN_ROUNDS if seconds else 1
    stop_at = None
    while stop_at is None or time.perf_counter() < stop_at or len(samples[names[0]]) < min_rounds:
        for name in names:
            pipes[name].send((batch, num_beams))
            sample, tokens[name] = pipes[name].recv()
            if stop_at is not None:  # the first round is a warm-up
                samples[name].append(sample)
            time.sleep(PAUSE if seconds else 0.0)
        stop_at = stop_at or time.perf_counter() + seconds
        names.append(names.pop(0))
    return samples, tokens


def measure(name: str, options: Any) -> Iterator[dict[str, Any]]:
    """A row for each number of beams and batch size."""
    design = kl.presets.small(DESIGNS[name]) if options.smoke else DESIGNS[name]
    start = threading.Thread if options.smoke else SPAWN.Process  # a process takes seconds to start
    modes = ["prepacked", "ctranslate2", *(["compiled"] if options.compiled else [])]
    implementations = [f"{mode} {dtype}" for dtype in options.dtypes for mode in modes]
    implementations += ["plain", "transformers"] if options.transformers else []
    with tempfile.TemporaryDirectory() as folder:
        ctranslate2_weights.convert(make_model(design), Path(folder))
        pipes = {}
        for implementation in implementations:
            pipes[implementation], other_end = SPAWN.Pipe()
            arguments = (other_end, implementation, design, folder, options.threads, options.clock)
            start(target=worker, args=arguments, daemon=True).start()
            assert pipes[implementation].recv() == "ready"
        for num_beams in (1, NUM_BEAMS):
            for batch in options.batches:
                samples, tokens = race(pipes, batch, num_beams, options.seconds)
                row: dict[str, Any] = {"model": name, "beams": num_beams, "batch": batch}
                for implementation, seconds in samples.items():
                    row[implementation] = round(batch * LENGTH / statistics.median(seconds))
                for dtype in options.dtypes:
                    for mode in modes:
                        if mode != "ctranslate2":
                            pairs = zip(
                                samples[f"ctranslate2 {dtype}"], samples[f"{mode} {dtype}"], strict=True
                            )
                            ratio = statistics.median(peer / keepleft for peer, keepleft in pairs)
                            row[f"{mode} {dtype} ratio"] = round(ratio, 2)
                    agreement = token_agreement(tokens[f"prepacked {dtype}"], tokens[f"ctranslate2 {dtype}"])
                    row[f"agreement {dtype}"] = round(agreement, 2)
                peer_samples = samples[f"ctranslate2 {options.dtypes[0]}"]
                row["noise"] = round(statistics.median(peer_samples) / min(peer_samples), 1)
                print(row, flush=True)
                yield row
        for pipe in pipes.values():
            pipe.send(None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="to spend on each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", default=list(DESIGNS), choices=DESIGNS)
    parser.add_argument("--dtypes", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument(
        "--no-transformers",
        dest="transformers",
        action="store_false",
        help="neither transformers nor keepleft with plain weights",
    )
    parser.add_argument(
        "--compiled", action="store_true", help="also with a compiled step: some minutes the first time"
    )
    options = parse_arguments(parser, argv, seconds=0.0, threads=1, batches=[2], models=["gpt2", "small"])
    print(f"{system_load()}, {options.threads} threads, {options.clock} clock")
    rows = []
    for name in options.models:
        model_rows = list(measure(name, options))
        print_table(
            f"{name}: tokens per second, and keepleft over CTranslate2 (targets: {TARGETS})", model_rows
        )
        rows += model_rows
    write_json(options.json, {"environment": environment(), "targets": TARGETS, "rows": rows})


if __name__ == "__main__":
    main()
