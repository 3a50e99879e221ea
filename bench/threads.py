"""Threads and waiting policies on a CPU, alone and beside one busy process.

Threads of OpenMP wait for each other several hundred times in a step. By default they spin meanwhile, which
is fast on idle cores; beside another busy process the thread that is waited for has often lost its core to
one that only spins. Each setting is a process of its own: a number of threads, and how many times a thread
spins before it sleeps (GOMP_SPINCOUNT). The row `keepleft` is what the commands set. Settings take turns, the
medians count, each over the fastest setting and over one thread under the same conditions: higher is better.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from child_process import child_process
from command_line import make_parser, parse_arguments
from keepleft.cli.threads import SPIN_COUNT
from report import environment, print_table, system_load, write_json

Work = Callable[[], int]  # does a little, and says how many tokens that was


class Setting(NamedTuple):
    threads: int
    spins: int | None  # None: the default of OpenMP


def settings(cores: int) -> dict[str, Setting]:
    return {
        "one thread": Setting(1, None),
        "all, OpenMP's default": Setting(cores, None),
        "all, sleep at once": Setting(cores, 0),
        "all, 10,000 spins": Setting(cores, 10_000),
        "keepleft": Setting(cores, SPIN_COUNT),
    }


# -- the work, in a process of its own


def make_generation(smoke: bool, batch: int) -> Work:
    import torch

    import keepleft as kl
    from race_decode_cpu import DESIGNS, LENGTH, generate_keepleft, make_model, make_prompts

    design = kl.presets.small(DESIGNS["base"]) if smoke else DESIGNS["base"]
    model = kl.prepack(make_model(design), "float32")
    prompts = make_prompts(design, batch)

    def work() -> int:
        with torch.no_grad():
            generate_keepleft(model, prompts, 1)
        return batch * LENGTH

    return work


def make_serving(smoke: bool) -> Work:
    """Sixteen requests through the continuous-batching engine."""
    import keepleft as kl
    from keepleft.serving.engine.capacity import make_engine
    from keepleft.serving.engine.request import GenerationRequest, RequestHandle
    from race_decode_cpu import DESIGNS, LENGTH, make_model, make_prompts

    design = kl.presets.small(DESIGNS["base"]) if smoke else DESIGNS["base"]
    engine = make_engine(kl.prepack(make_model(design), "float32"), kv_cache_memory=0.1)
    prompts = make_prompts(design, 16).tolist()
    config = kl.GenerationConfig(max_new_tokens=LENGTH, min_new_tokens=LENGTH, decoder_start_token_id=0)

    def work() -> int:
        for prompt in prompts:
            engine.submit(RequestHandle(GenerationRequest(prompt, config), lambda event: None))
        while engine.busy:
            engine.step()
        return 16 * LENGTH

    return work


def make_training(smoke: bool) -> Work:
    import torch

    import keepleft as kl

    design = kl.presets.small(kl.presets.gpt2)
    if not smoke:
        design = design.but(vocab=8_000, dim=256, heads=8, feedforward=kl.FeedForward(1024, "gelu"))
    torch.manual_seed(0)
    model = kl.build(design).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    tokens = torch.randint(3, design.vocab, (16, 65))

    def work() -> int:
        logits = model(tokens[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return 16 * 64

    return work


def make_audit(smoke: bool) -> Work:
    import torch

    import keepleft as kl

    design = kl.presets.small(kl.presets.llama3)
    torch.manual_seed(0)
    model = kl.build(design if smoke else design.but(dim=256, heads=8, vocab=4_000)).eval()

    def work() -> int:
        kl.audit(model, budget="quick")
        return 1

    return work


WORKLOADS: dict[str, Callable[[bool], Work]] = {
    "generation, batch 1": lambda smoke: make_generation(smoke, 1),
    "generation, batch 16": lambda smoke: make_generation(smoke, 16),
    "serving, 16 requests": make_serving,
    "training": make_training,
    "audit": make_audit,
}


def run_worker(workload: str, threads: int, smoke: bool) -> None:
    """For each line of stdin, a number of seconds: work so long, and print tokens per second."""
    import torch

    torch.set_num_threads(threads)
    work = WORKLOADS[workload](smoke)
    work()
    print("ready", flush=True)
    for line in sys.stdin:
        tokens = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < float(line) or not tokens:
            tokens += work()
        print(tokens / max(elapsed, 1e-9), flush=True)


# -- measuring


@contextmanager
def start_worker(workload: str, setting: Setting, smoke: bool) -> Iterator[Any]:
    command = [sys.executable, __file__, "--worker", workload, "--threads", str(setting.threads)]
    environ = {**os.environ, "OMP_NUM_THREADS": str(setting.threads)}
    if setting.spins is not None:
        environ |= {"GOMP_SPINCOUNT": str(setting.spins)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with child_process([*command, *(["--smoke"] if smoke else [])], env=environ, **pipes) as process:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the worker for {workload} did not start")
        yield process


def ask(process: Any, seconds: float) -> float:
    process.stdin.write(f"{seconds}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def measure(workload: str, options: Any) -> list[dict[str, Any]]:
    """A row for each setting: tokens per second alone and beside a busy process."""
    chosen = settings(options.cores)
    names = [name for name in chosen if options.only is None or name in options.only]
    rates: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(start_worker(workload, chosen[name], options.smoke)) for name in names
        }
        for round_number in range(options.rounds):
            order = names[round_number % len(names) :] + names[: round_number % len(names)]
            for place in ("alone", "beside"):
                with ExitStack() as beside:
                    if place == "beside":
                        beside.enter_context(child_process([sys.executable, "-c", "while True: pass"]))
                        time.sleep(0.3)
                    for name in order:
                        rates.setdefault((name, place), []).append(ask(workers[name], options.seconds))
    rows = []
    for name in names:
        row: dict[str, Any] = {"setting": name}
        for place in ("alone", "beside"):
            rate = statistics.median(rates[name, place])
            row[f"{place} tok/s"] = rate
            row[f"{place}, of the best"] = rate / max(statistics.median(rates[n, place]) for n in names)
            row[f"{place}, of one thread"] = rate / statistics.median(rates[names[0], place])
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--only", nargs="+", help="only these settings")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--worker", help="used by the benchmark itself: the work of this process")
    parser.add_argument("--threads", type=int, help="with --worker: its threads")
    smoke_settings = ["one thread", "keepleft"]
    options = parse_arguments(
        parser, argv, seconds=0.0, rounds=1, workloads=["serving, 16 requests"], only=smoke_settings
    )
    if options.worker:
        run_worker(options.worker, options.threads, options.smoke)
        return 0
    print(f"{system_load()}, {options.cores} cores")
    tables = {}
    for workload in options.workloads:
        tables[workload] = measure(workload, options)
        print_table(workload, tables[workload])
    write_json(options.json, {"environment": environment(), **tables})
    return 0


if __name__ == "__main__":
    sys.exit(main())
