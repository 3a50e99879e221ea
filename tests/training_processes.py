"""Training runs in child processes, which can be killed, and in several processes at once (DDP, FSDP).

The children are forks of a server that has imported torch once, so that starting one takes no time.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import count
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

import keepleft as kl
import tiny_training as tiny
from keepleft.disk import atomic
from keepleft.training.distributed import DistributedContext
from keepleft.training.loop import train
from keepleft.training.lora import add_lora
from keepleft.training.recipe import Recipe

CHILD_TIMEOUT = 120.0  # seconds
FORK_SERVER = multiprocessing.get_context("forkserver")
FORK_SERVER.set_forkserver_preload(
    [
        "training_processes",
        "keepleft.models.build",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.checkpoint",
        "torch.utils.checkpoint",
    ]
)


# one child --------------------------------------------------------------------------------------------------


def start_child(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    process = FORK_SERVER.Process(target=_child_main, args=(target, *args), daemon=True)
    process.start()
    return process


def _child_main(target: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    target(*args)


def run_with_slow_saves(folder: str, kind: str, recipe: Recipe, started: Any) -> None:
    """Train, spending as much time on saving as on learning, so that a kill at random hits either.

    The event `started` is set at the first step.
    """
    sync = atomic.sync
    atomic.sync = lambda path: (sync(path), time.sleep(0.004))[0]
    tiny.run(folder, kind, recipe=recipe, stop=lambda: started.set() or False)


# several processes ------------------------------------------------------------------------------------------


def run_distributed(world_size: int, target: Callable[..., None], *args: Any) -> None:
    """Call target(rank, world_size, …) in the processes of a new group; an error in one is an error here."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    processes = [
        start_child(_distributed_main, rank, world_size, port, target, args) for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.join(CHILD_TIMEOUT)
        exit_codes = [process.exitcode for process in processes]
        assert exit_codes == [0] * world_size, f"the processes ended with {exit_codes}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _distributed_main(
    rank: int, world_size: int, port: int, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    dist.init_process_group("gloo", timeout=timedelta(seconds=CHILD_TIMEOUT / 2))
    target(rank, world_size, *args)
    dist.destroy_process_group()


JOB_DEFAULTS: dict[str, Any] = {
    "kind": "both",
    "recipe": {},
    "lora": False,
    "folder": None,
    "stop_step": None,
    "stop_rank": 0,  # the process that is told to stop
    "nan_rank": None,  # the process whose weights become NaN after step 3
    "full_disk_rank": None,  # the process whose disk is full after step 3
}


def train_jobs(rank: int, world_size: int, jobs: list[dict[str, Any]]) -> None:
    """Several runs in turn. Each writes its reports to OUT.RANK.json and its weights to OUT.safetensors."""
    for job in jobs:
        job = {**JOB_DEFAULTS, **job}
        design = tiny.design(job["kind"])
        model = tiny.model(design, seed=rank + 1)  # the weights of the first process count
        if job["lora"]:
            add_lora(model, 2, seed=rank)
        summary: dict[str, Any] = {"notes": [], "steps": []}
        reports = train(
            model,
            tiny.batches(design, rank=rank, world_size=world_size),
            tiny.recipe(**job["recipe"]),
            folder=job["folder"],
            distributed=distributed_context(job["strategy"], rank, world_size),
            measure=partial(measure, rank),
            stop=partial(_spoil_or_stop, model, rank, job, count(1)),
        )
        try:
            for report in reports:
                summary["notes"] += report.notes
                summary["steps"].append(report.step)
                summary |= {
                    "loss": report.loss,
                    "grad_norm": report.grad_norm,
                    "measures": report.measures,
                    "tokens": report.tokens,
                }
        except (OSError, FloatingPointError) as error:
            summary["error"] = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        weights = {
            name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            for name, tensor in model.state_dict().items()
        }
        Path(f"{job['out']}.{rank}.json").write_text(json.dumps(summary))
        if rank == 0:
            detached = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
            save_file(detached, f"{job['out']}.safetensors")


def measure(rank: int, model: Any) -> dict[str, float]:
    """A number from the model, called by itself. It differs between processes; that of the first counts."""
    tokens = torch.arange(3, 15).view(2, 6)
    inputs = (tokens, tokens) if isinstance(model, kl.EncoderDecoder) else (tokens,)
    return {"loss": float(model(*inputs).logsumexp(-1).mean()) + rank}


def _spoil_or_stop(model: Any, rank: int, job: dict[str, Any], steps: Iterator[int]) -> bool:
    step = next(steps)
    if rank == job["nan_rank"] and step == 3:
        for p in model.parameters():  # in this process alone; whatever it computes from here on is NaN
            (p.to_local() if hasattr(p, "to_local") else p).data.fill_(math.nan)
    if rank == job["full_disk_rank"] and step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))  # no file may grow beyond
    return rank == job["stop_rank"] and step == job["stop_step"]


def distributed_context(strategy: str, rank: int, world_size: int) -> DistributedContext:
    strategy = strategy if world_size > 1 or strategy == "fsdp" else "alone"
    return DistributedContext(rank, world_size, torch.device("cpu"), strategy)  # type: ignore[arg-type]
