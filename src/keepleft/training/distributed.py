"""Several processes: who they are, and the two ways to share the work.

torchrun starts them; nothing here does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from keepleft.devices import pick_device
from keepleft.training.loss_module import stack_layers

ParallelStrategy = Literal["alone", "ddp", "fsdp"]


@dataclass(frozen=True)
class DistributedContext:
    """This process among all: which it is, of how many, on which device; ddp copies the model, fsdp shards
    it.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it never changes)
    strategy: ParallelStrategy = "alone"

    def wrap(self, loss_module: nn.Module, *, mixed_precision: bool) -> nn.Module:
        """The module to call: gradients of all processes are averaged in it."""
        if self.strategy == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(
                loss_module, device_ids=[self.device] if self.device.type == "cuda" else None
            )
        if self.strategy == "fsdp":
            import warnings

            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = (
                MixedPrecisionPolicy(torch.bfloat16, torch.float32)
                if mixed_precision
                else MixedPrecisionPolicy()
            )
            # nothing here writes into one
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            mesh = init_device_mesh(self.device.type, (self.world_size,))
            with torch.no_grad():
                for tensor in (
                    *loss_module.parameters(),
                    *loss_module.buffers(),
                ):  # everyone begins as the first process does, as in ddp
                    dist.broadcast(tensor, 0)
            for layer in stack_layers(loss_module.model):  # type: ignore[arg-type]
                cross: Any = getattr(layer, "cross", None)
                if cross is not None:
                    # asked outside the layer, when the source is read
                    fully_shard(cross.kv, mesh=mesh, mp_policy=policy)
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return fully_shard(loss_module, mesh=mesh, mp_policy=policy)  # type: ignore[return-value]
        return loss_module

    @contextmanager
    def unsharded(self, loss_module: Any) -> Iterator[None]:
        """For a while the model inside can be called by itself: what no layer holds is there on every
        process.
        """
        if self.strategy == "fsdp":
            loss_module.unshard()
        try:
            yield
        finally:
            if self.strategy == "fsdp":
                loss_module.reshard()

    @contextmanager
    def no_sync(self, loss_module: Any, last: bool) -> Iterator[None]:
        """While gradients pile up nothing is sent; with the last micro-batch all of it is."""
        if self.strategy == "ddp" and not last:
            with loss_module.no_sync():
                yield
        else:
            if self.strategy == "fsdp":
                loss_module.set_requires_gradient_sync(last)
            yield

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any_rank(self, value: bool) -> bool:
        """Does one of the processes say so?"""
        if self.world_size == 1:
            return value
        return bool(self.all_reduce(torch.tensor(float(value), device=self.device)) > 0)

    def destroy(self) -> None:
        """The end of the work together."""
        if self.strategy != "alone" and dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Go on when all have come here."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value: float) -> float:
        """What the first process says."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor)


def init_distributed(
    strategy: ParallelStrategy | None = None, device: str | None = None
) -> DistributedContext:
    """The team that torchrun has started, or this process alone. gloo connects CPUs, NCCL connects GPUs."""
    import os

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch_device = pick_device(device, local_rank)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    if world_size == 1 and strategy in (None, "alone", "ddp"):
        return DistributedContext(0, 1, torch_device)
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                f"{strategy} was asked for, but this process is alone: start it with torchrun --nproc-per-node N "
                "-m keepleft train …"
            )
        timeout = timedelta(hours=6)  # the first process prepares the data while the others wait
        dist.init_process_group("nccl" if torch_device.type == "cuda" else "gloo", timeout=timeout)
    return DistributedContext(
        dist.get_rank(),
        dist.get_world_size(),
        torch_device,
        strategy if strategy not in (None, "alone") else "ddp",
    )
