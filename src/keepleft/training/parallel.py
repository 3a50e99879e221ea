"""Several processes: who they are, and the two ways to share the work. torchrun starts them; nothing here does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from keepleft.training.pupil import layers

Way = Literal["alone", "ddp", "fsdp"]


@dataclass(frozen=True)
class Team:
    """This process among all: which it is, of how many, on which device; ddp copies the model, fsdp shards it."""

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it never changes)
    way: Way = "alone"

    def wrap(self, pupil: nn.Module, *, half: bool) -> nn.Module:
        """The module to call: gradients of all processes are averaged in it."""
        if self.way == "ddp":
            from torch.nn.parallel import DistributedDataParallel
            return DistributedDataParallel(pupil, device_ids=[self.device] if self.device.type == "cuda" else None)
        if self.way == "fsdp":
            import warnings

            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # nothing here writes into one
            mesh = init_device_mesh(self.device.type, (self.world,))
            with torch.no_grad():
                for tensor in (*pupil.parameters(), *pupil.buffers()):  # everyone begins as the first process does, as in ddp
                    dist.broadcast(tensor, 0)
            for layer in layers(pupil.model):  # type: ignore[arg-type]
                cross: Any = getattr(layer, "cross", None)
                if cross is not None:
                    fully_shard(cross.kv, mesh=mesh, mp_policy=policy)  # asked outside the layer, when the source is read
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return fully_shard(pupil, mesh=mesh, mp_policy=policy)  # type: ignore[return-value]
        return pupil

    @contextmanager
    def whole(self, pupil: Any) -> Iterator[None]:
        """For a while the model inside can be called by itself: what no layer holds is there on every process."""
        if self.way == "fsdp":
            pupil.unshard()
        try:
            yield
        finally:
            if self.way == "fsdp":
                pupil.reshard()

    @contextmanager
    def quiet(self, pupil: Any, last: bool) -> Iterator[None]:
        """While gradients pile up nothing is sent; with the last micro-batch all of it is."""
        if self.way == "ddp" and not last:
            with pupil.no_sync():
                yield
        else:
            if self.way == "fsdp":
                pupil.set_requires_gradient_sync(last)
            yield

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def any(self, here: bool) -> bool:
        """Does one of the processes say so?"""
        if self.world == 1:
            return here
        return bool(self.total(torch.tensor(float(here), device=self.device)) > 0)

    def leave(self) -> None:
        """The end of the work together."""
        if self.way != "alone" and dist.is_initialized():
            dist.destroy_process_group()

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.world > 1:
            dist.barrier()

    def first(self, number: float) -> float:
        """What the first process says."""
        if self.world == 1:
            return number
        said = torch.tensor(number, dtype=torch.float64, device=self.device)
        dist.broadcast(said, 0)
        return float(said)


def found_device(device: str | None = None, local: int | None = None) -> torch.device:
    """The device that was asked for, or a GPU where there is one; `local`: which GPU, where several processes share them."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(kind, local) if kind == "cuda" and local is not None else torch.device(kind)
        torch.empty(0, device=chosen)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"the device {kind!r} was asked for, but PyTorch {torch.__version__} does not find it here: leave it "
                         "out, or give cpu; `keepleft doctor` shows what there is") from error
    return chosen


def join(way: Way | None = None, device: str | None = None) -> Team:
    """The team that torchrun has started, or this process alone. gloo connects CPUs, NCCL connects GPUs."""
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    chosen = found_device(device, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if world == 1 and way in (None, "alone", "ddp"):
        return Team(0, 1, chosen)
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(f"{way} was asked for, but this process is alone: start it with torchrun --nproc-per-node N "
                             "-m keepleft train …")
        patience = timedelta(hours=6)  # the first process prepares the data while the others wait
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=patience)
    return Team(dist.get_rank(), dist.get_world_size(), chosen, way if way not in (None, "alone") else "ddp")
