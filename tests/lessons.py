"""Small lessons to train on, and children to train in: what the tests of training share.

Children are forks of a server that has imported torch once, so that starting one takes no time; they can be killed.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keepleft as kl
from keepleft.data.batches import Batches, Bucketed, Packed
from keepleft.data.objectives import NextToken, Translation
from keepleft.data.store import Store
from keepleft.train import meter
from keepleft.train.parallel import Team
from keepleft.train.recipe import Recipe

VOCAB, LIMIT = 37, 120.0  # seconds that a child may take
CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["lessons", "keepleft.train.loop", "torch.distributed.fsdp", "torch.distributed.checkpoint"])


def store(records: int = 60, seed: int = 0) -> Store:
    """Texts of 1 to 9 tokens and an end, and the same backwards."""
    chance = np.random.default_rng(seed)
    texts = [[*chance.integers(3, VOCAB, chance.integers(1, 10)).tolist(), 2] for _ in range(records)]
    return Store.of(text=texts, src=texts, tgt=[[*text[-2::-1], 2] for text in texts])


def batches(design: kl.Design, shape: Bucketed | Packed = Bucketed(), **choices: Any) -> Batches:  # noqa: B008
    """Micro-batches of 48 tokens, three to a step, of uneven size."""
    objective = NextToken(1) if design.encoder is None else Translation(1)
    return Batches(choices.pop("store", None) or store(), objective, shape, **{"budget": 48, "accumulate": 3, **choices})


def design(kind: str = "decoder", **changes: Any) -> kl.Design:
    """Tiny, of one layer in each stack; dropout is on unless it is switched off."""
    choice = kl.presets.small({"decoder": kl.presets.llama, "both": kl.presets.marian}[kind])
    stacks = {name: kl.Stack(1, stack.mask) for name in ("encoder", "decoder") if (stack := getattr(choice, name))}
    plain = dict(vocab=VOCAB, dim=20, heads=2, feedforward=kl.FeedForward(14, "silu", gated=True), dropout=0.1, **stacks)
    return choice.but(**{**plain, **changes})


def model(choice: kl.Design, seed: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    return kl.build(choice, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def recipe(**changes: Any) -> Recipe:
    return Recipe(**{"steps": 12, "peak": 1e-2, "warmup": 3, "report": 100, "smoothing": 0.1, **changes})


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint in one file."""
    from safetensors.torch import load_file

    return load_file(folder / f"step-{step:08d}" / "tensors.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# children -----------------------------------------------------------------------------------------------------


def child(target: Callable[..., None], *given: Any) -> Any:
    process = CHILDREN.Process(target=_alone, args=(target, *given), daemon=True)
    process.start()
    return process


def _alone(target: Callable[..., None], *given: Any) -> None:
    torch.set_num_threads(1)
    meter.matmul_rate = lambda *_: 1e9  # it takes seconds to measure
    target(*given)


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


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def team(way: str, rank: int, world: int) -> Team:
    return Team(rank, world, torch.device("cpu"), way if world > 1 or way == "fsdp" else "alone")  # type: ignore[arg-type]
