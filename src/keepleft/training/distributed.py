"""Distributed training: rank and world size, DDP, FSDP2, and the collectives that the loop needs.

torchrun starts the processes; nothing here does.
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
from keepleft.models.heads import LossModule
from keepleft.training.activation_checkpointing import stack_layers

ParallelStrategy = Literal["alone", "ddp", "fsdp"]


@dataclass(frozen=True)
class DistributedContext:
    """This process among all of them, and how they share the work.

    With "ddp" (DistributedDataParallel) each process has a copy of the model, with "fsdp" (fully sharded data
    parallel, FSDP2) a shard of each parameter; "alone" is a single process.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 (it never changes)
    strategy: ParallelStrategy = "alone"

    def wrap(self, loss_module: nn.Module, *, mixed_precision: bool) -> nn.Module:
        """The module to call in place of `loss_module`: it averages the gradients of all processes."""
        if self.strategy == "ddp":
            from torch.nn.parallel import DistributedDataParallel

            return DistributedDataParallel(
                loss_module, device_ids=[self.device] if self.device.type == "cuda" else None
            )
        if self.strategy == "fsdp":
            import warnings

            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            assert isinstance(loss_module, LossModule)  # without MixedPrecision: FSDP casts by its own policy
            # the views that FSDP2 returns must not be written to, and nothing here does
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
            policy = MixedPrecisionPolicy()
            if mixed_precision:
                policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            mesh = init_device_mesh(self.device.type, (self.world_size,))
            with torch.no_grad():
                for tensor in (*loss_module.parameters(), *loss_module.buffers()):
                    dist.broadcast(tensor, 0)  # all start from the weights of the first process, as in DDP
            for layer in stack_layers(loss_module.model):
                if hasattr(layer, "cross"):  # kv is called outside its layer, when the source is encoded
                    fully_shard(layer.cross.kv, mesh=mesh, mp_policy=policy)
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            return fully_shard(loss_module, mesh=mesh, mp_policy=policy)  # type: ignore[return-value]
        return loss_module

    @contextmanager
    def unshard(self, loss_module: Any) -> Iterator[None]:
        """Within this context the model can be called without the loss module around it.

        FSDP all-gathers the parameters outside the layers (embeddings, head, final norms) on every process.
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
        """Gradient accumulation: processes exchange gradients only with the last micro-batch of a step."""
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
        """Whether the value is true in any process."""
        (out,) = self.any_rank_each(value)
        return out

    def any_rank_each(self, *values: bool) -> tuple[bool, ...]:
        """Of each value, whether it is true in any process."""
        if self.world_size == 1:
            return values
        counts = self.all_reduce(torch.tensor([float(value) for value in values], device=self.device))
        return tuple(count > 0 for count in counts.tolist())

    def destroy(self) -> None:
        """Leave the process group."""
        if self.strategy != "alone" and dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world_size > 1:
            dist.barrier()

    def broadcast(self, value: float) -> float:
        """The value that the first process has."""
        if self.world_size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(tensor, 0)
        return float(tensor)


def init_distributed(
    strategy: ParallelStrategy | None = None, device: str | None = None
) -> DistributedContext:
    """The process group that torchrun has started, or this process alone. GPUs use NCCL, CPUs gloo.

    Raises ValueError if FSDP is asked for and there is no process group.
    """
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
                f"{strategy} was asked for, but this process is alone: start it with torchrun "
                "--nproc-per-node N -m keepleft train …"
            )
        timeout = timedelta(hours=6)  # the first process prepares the data while the others wait
        dist.init_process_group("nccl" if torch_device.type == "cuda" else "gloo", timeout=timeout)
    return DistributedContext(
        dist.get_rank(),
        dist.get_world_size(),
        torch_device,
        strategy if strategy not in (None, "alone") else "ddp",
    )
