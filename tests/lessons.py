"""Small lessons to train on, and children to train in: what the tests of training share.

Children are forks of a server that has imported torch once, so that starting one takes no time; they can be killed.
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
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keepleft as kl
from keepleft.data.batches import Batches, BucketedLayout, PackedLayout
from keepleft.data.objectives import NextToken, Translation
from keepleft.data.token_store import TokenStore
from keepleft.disk import atomic
from keepleft.training import mfu
from keepleft.training.distributed import DistributedContext
from keepleft.training.loop import train
from keepleft.training.lora import add_lora
from keepleft.training.recipe import Recipe

VOCAB, LIMIT = 37, 120.0  # seconds that a child may take
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["lessons", "keepleft.models.build", "torch._dynamo", "torch.distributed.fsdp",
                                 "torch.distributed.checkpoint", "torch.utils.checkpoint"])


def store(records: int = 60, seed: int = 0) -> TokenStore:
    """Texts of 1 to 9 tokens and an end, and the same backwards."""
    chance = np.random.default_rng(seed)
    texts = [[*chance.integers(3, VOCAB, chance.integers(1, 10)).tolist(), 2] for _ in range(records)]
    return TokenStore.from_lists(text=texts, src=texts, tgt=[[*text[-2::-1], 2] for text in texts])


def batches(design: kl.Design, shape: BucketedLayout | PackedLayout = BucketedLayout(), **choices: Any) -> Batches:  # noqa: B008
    """Micro-batches of 48 tokens, three to a step, of uneven size."""
    objective = NextToken(1) if design.encoder is None else Translation(1)
    return Batches(choices.pop("store", None) or store(), objective, shape, **{"budget": 48, "accumulate": 3, **choices})


def design(kind: str = "decoder", **changes: Any) -> kl.Design:
    """Tiny, of one layer in each stack; dropout is on unless it is switched off."""
    choice = kl.presets.small({"decoder": kl.presets.llama, "both": kl.presets.marian}[kind])
    stacks = {name: kl.StackDesign(1, stack.mask) for name in ("encoder", "decoder") if (stack := getattr(choice, name))}
    plain = dict(vocab=VOCAB, dim=20, heads=2, feedforward=kl.FeedForward(14, "silu", gated=True), dropout=0.1, **stacks)
    return choice.but(**{**plain, **changes})


def model(choice: kl.Design, seed: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    return kl.build(choice, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"steps": 12, "lr": 1e-2, "warmup": 3, "log_every": 100, "label_smoothing": 0.1, **changes})


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in one file."""
    from safetensors.torch import load_file

    return load_file(folder / f"step-{step:08d}" / "tensors.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(folder: str | Path | None, kind: str = "both", *, recipe: Recipe, **choices: Any) -> list[Any]:
    """Train from wherever the folder stands, on data with three uneven micro-batches to a step."""
    choice = design(kind)
    return list(train(model(choice), batches(choice), recipe, folder=folder, **choices))


# children -----------------------------------------------------------------------------------------------------


def child(target: Callable[..., None], *given: Any) -> Any:
    process = CHILDREN.Process(target=_alone, args=(target, *given), daemon=True)
    process.start()
    return process


def _alone(target: Callable[..., None], *given: Any) -> None:
    torch.set_num_threads(1)
    mfu.peak_matmul_flops = lambda *_: 1e9  # it takes seconds to measure
    target(*given)


def begun(folder: str, kind: str, chosen: Recipe, started: Any) -> None:
    """A run that saves as long as it learns, so that whoever kills it at random hits either; says when it has begun."""
    sync = atomic.sync
    atomic.sync = lambda path: (sync(path), time.sleep(0.004))[0]
    run(folder, kind, recipe=chosen, stop=lambda: started.set() or False)


def together(world: int, target: Callable[..., None], *given: Any) -> None:
    """Run target(rank, world, …) in so many processes that can talk to each other; an error in one is an error here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [child(_joined, rank, world, port, target, given) for rank in range(world)]
    try:
        for process in processes:
            process.join(LIMIT)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world, f"the processes ended with {codes}"
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()


def _joined(rank: int, world: int, port: int, target: Callable[..., None], given: tuple[Any, ...]) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world),
                   "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT / 2))
    target(rank, world, *given)
    dist.destroy_process_group()


def shared(rank: int, world: int, jobs: list[dict[str, Any]]) -> None:
    """Several runs, one after the other; the first process writes down how each ended, all weights together."""
    from safetensors.torch import save_file

    for job in jobs:
        job = {"kind": "both", "recipe": {}, "until": None, "lora": False, "trouble": None, "folder": None, **job}
        pupil, choice = model(design(job["kind"]), seed=rank + 1), design(job["kind"])  # the first one's weights count
        if job["lora"]:
            add_lora(pupil, 2, seed=rank)
        said: dict[str, Any] = {"notes": [], "steps": []}
        try:
            for report in train(pupil, batches(choice, rank=rank, world_size=world), recipe(**job["recipe"]), folder=job["folder"],
                                distributed=team(job["way"], rank, world), measure=partial(likelihood, rank),
                                stop=partial(_stopping, pupil, rank, job, count(1))):
                said["notes"] += report.notes
                said["steps"].append(report.step)
                said |= {"loss": report.loss, "norm": report.grad_norm, "measures": report.measures, "tokens": report.tokens}
        except (OSError, FloatingPointError) as error:
            said["error"] = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in pupil.state_dict().items()}
        Path(f"{job['out']}.{rank}.json").write_text(json.dumps(said))
        if rank == 0:
            save_file({name: tensor.detach().contiguous() for name, tensor in whole.items()}, f"{job['out']}.safetensors")


def likelihood(rank: int, pupil: Any) -> dict[str, float]:
    """The model called by itself; each process has an opinion of its own, and the first one's counts."""
    tokens = torch.arange(3, 15).view(2, 6)
    given = (tokens, tokens) if isinstance(pupil, kl.EncoderDecoder) else (tokens,)
    return {"loss": float(pupil(*given).logsumexp(-1).mean()) + rank}


def _stopping(pupil: Any, rank: int, job: dict[str, Any], steps: Iterator[int]) -> bool:
    step = next(steps)
    if rank == 1 and step == 3 and job["trouble"] == "nan":
        for p in pupil.parameters():  # in this process alone; whatever it computes from here on is no number
            (p.to_local() if hasattr(p, "to_local") else p).data.fill_(math.nan)
    if rank == job.get("starved") and step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))  # no file may grow beyond
    return rank == job.get("told", 0) and step == job["until"]  # it is enough to tell one


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def team(way: str, rank: int, world: int) -> DistributedContext:
    return DistributedContext(rank, world, torch.device("cpu"), way if world > 1 or way == "fsdp" else "alone")  # type: ignore[arg-type]
