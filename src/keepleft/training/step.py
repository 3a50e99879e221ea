"""One step: every micro-batch forward and back, then clipping and the change of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.attention.attend import MIN_QUERIES_WITHOUT_TABLE
from keepleft.cuda_graph import capture_graph
from keepleft.training.distributed import DistributedContext
from keepleft.training.ema import EMA
from keepleft.training.loss_module import LossModule, checkpoint_activations
from keepleft.training.optimizer import init_state, make_optimizers
from keepleft.training.precision import MixedPrecision
from keepleft.training.recipe import Recipe

EAGER_STEPS = 3  # steps before the kernels of one are recorded
ASSUMED_FLOPS = 3e14  # operations a second of a good GPU
# one kernel for a norm's two gradients takes twice as long
COMPILE_OPTIONS: dict[str, Any] = {"triton.mix_order_reduction": False}
MIN_COMPILE_SECONDS = (
    120  # seconds of training, at that rate, from which compiling takes less time than it saves
)


class TrainStep:
    """Called with the batches of a step it changes the weights, and says loss, plain, right and the norm of
    the gradients.
    """

    def __init__(
        self,
        loss_module: Any,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        recipe: Recipe,
        ema: EMA | None,
        distributed: DistributedContext,
        mixed_precision: bool = False,
    ) -> None:
        self.loss_module = loss_module
        self.optimizers = optimizers
        self.recipe = recipe
        self.ema = ema
        self.distributed = distributed
        self.mixed_precision = mixed_precision
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        sum_dtype = torch.float64 if distributed.device.type == "cpu" else torch.float32
        self.sums = torch.zeros(3, device=distributed.device, dtype=sum_dtype)
        # of one target in the gradient
        self.target_weight = torch.ones((), device=distributed.device, dtype=sum_dtype)

    def __call__(
        self,
        batches: list[Any],
        total_targets: float,
        lr: float,
        step: int,
        check_stats: Callable[[Tensor], None] = lambda stats: None,
    ) -> Tensor:
        """`total` targets in all processes; `look` sees what was found before anything changes."""
        self._set_lr(lr)
        self.sums.zero_()
        self.target_weight.fill_(self.distributed.world_size / total_targets)
        for n, batch in enumerate(batches):
            torch.manual_seed(
                fold_seed(self.recipe.seed, step, self.distributed.rank + n * self.distributed.world_size)
            )
            device_batch = batch.to(self.distributed.device) if hasattr(batch, "to") else batch
            with self.distributed.no_sync(self.loss_module, n == len(batches) - 1):
                self.accumulate(device_batch.inputs, device_batch.targets, n == 0)
        if self.ema is not None:
            self.ema.set_decay(step)
        return self.apply(check_stats)

    def accumulate(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        """Add the gradients of one micro-batch; there are none yet at the first of a step."""
        batch_sums = self.loss_module(inputs, targets)
        (batch_sums.loss * self.target_weight).backward()
        self.sums += torch.stack([part.detach().to(self.sums.dtype) for part in batch_sums])

    def apply(self, check_stats: Callable[[Tensor], None]) -> Tensor:
        stats = self.collect_stats(self.clip_gradients())
        check_stats(stats)
        self.update()
        return stats

    def collect_stats(self, grad_norm: Tensor) -> Tensor:
        """(4,) loss, plain and right for each target, and the norm"""
        return (
            torch.cat([self.sums * self.target_weight, grad_norm[None].to(self.sums)])
            / self.distributed.world_size
        )

    def clip_gradients(self) -> Tensor:
        """The norm of all gradients together, which are scaled down where it is too large."""
        grad_norm = torch.nn.utils.get_total_norm(
            [p.grad for p in self.parameters if p.grad is not None], foreach=True
        )
        if hasattr(grad_norm, "full_tensor"):
            grad_norm = grad_norm.full_tensor()
        if self.recipe.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters, self.recipe.max_grad_norm, grad_norm, foreach=True
            )
        return grad_norm.detach()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        if self.ema is not None:
            self.ema.update()

    def zero_grad(self) -> None:
        """The gradients of this step."""
        for p in self.parameters:
            p.grad = None

    def _set_lr(self, lr: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)
                else:
                    group["lr"] = lr


class CUDAGraphTrainStep(TrainStep):
    """The same on a GPU, for batches of one shape: after a few steps the kernels are recorded, and from then
    on replayed.

    A small model's kernels take less time than Python needs to ask for them; a recording asks once for all.
    The first micro-batch of a step writes the gradients and the others add to them, so there are two
    recordings. A batch of another shape goes the usual way.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps_done = 0
        self.last_shape: tuple[Any, ...] = ()
        self.captured_shape: tuple[Any, ...] = ()
        self.static_inputs: dict[str, Tensor] = {}
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        self.update_graph: torch.cuda.CUDAGraph | None = None
        self.grad_norm = torch.zeros((), device=self.distributed.device)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.distributed.device)

    def accumulate(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        tensors = {**inputs, "": targets}
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        # twice the same: no rest of an epoch
        use_graph = self.steps_done >= EAGER_STEPS and shape == (self.captured_shape or self.last_shape)
        self.last_shape = shape
        if use_graph and first not in self.graphs and (first or self.graphs):
            self._capture(inputs, targets, first)
            self.captured_shape = shape
        if not use_graph or first not in self.graphs:
            if first and self.graphs:  # gradients have their place by now
                torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            super().accumulate(inputs, targets, first)
            return
        for name, tensor in tensors.items():
            self.static_inputs[name].copy_(tensor, non_blocking=True)
        self.graphs[first].replay()

    def _capture(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        if first:
            self.static_inputs = {name: tensor.clone() for name, tensor in {**inputs, "": targets}.items()}
            for p in self.parameters:
                p.grad = None  # so that what is recorded writes and does not add
        static_inputs = {name: self.static_inputs[name] for name in inputs}
        accumulate = super().accumulate
        self.graphs[first], _ = capture_graph(
            lambda: accumulate(static_inputs, self.static_inputs[""], first)
        )

    def apply(self, check_stats: Callable[[Tensor], None]) -> Tensor:
        self.steps_done += 1
        if not self.graphs:
            return super().apply(check_stats)
        if self.update_graph is None:
            self.update_graph, _ = capture_graph(self._clip_and_update)
        self.update_graph.replay()
        return self.collect_stats(self.grad_norm)

    def _clip_and_update(self) -> None:
        self.grad_norm.copy_(self.clip_gradients())
        self.update()

    def zero_grad(self) -> None:
        if not self.graphs:
            super().zero_grad()


def make_step(
    model: nn.Module,
    recipe: Recipe,
    distributed: DistributedContext,
    *,
    tokens_per_step: int = 0,
    row_length: int | None = None,
) -> TrainStep:
    """Everything that a step needs, by the recipe and the devices.

    `tokens`: about how many a step has. `wide`: the tokens in a row of texts, where all batches have one
    shape, or 0 where rows are running text; None where shapes differ.
    """
    if distributed.strategy == "fsdp" and recipe.optimizer == "muon":
        raise ValueError(
            "muon needs whole matrices, and fsdp shards them: use adamw with fsdp, or muon with ddp"
        )
    on_gpu, single_process = distributed.device.type == "cuda", distributed.strategy == "alone"
    mixed_precision = recipe.precision == "bfloat16" or (
        recipe.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()
    )
    model.to(distributed.device).train()
    if recipe.activation_checkpointing:
        checkpoint_activations(model)
    module: nn.Module = LossModule(model, recipe.label_smoothing)
    loss_module: Any = distributed.wrap(
        MixedPrecision(module) if mixed_precision and distributed.strategy != "fsdp" else module,
        mixed_precision=mixed_precision,
    )
    estimated_seconds = (
        6.0 * sum(p.numel() for p in model.parameters()) * tokens_per_step * recipe.steps / ASSUMED_FLOPS
    )
    if recipe.compile or (
        recipe.compile is None and on_gpu and single_process and estimated_seconds > MIN_COMPILE_SECONDS
    ):
        # one for each shape
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        loss_module = torch.compile(loss_module, dynamic=False, options=COMPILE_OPTIONS if on_gpu else None)
    # texts in long rows are attended by kernels that ask the CPU for their borders, which cannot be recorded
    capture = (
        on_gpu
        and single_process
        and not recipe.activation_checkpointing
        and row_length is not None
        and row_length < MIN_QUERIES_WITHOUT_TABLE
    )
    if recipe.cuda_graph and not capture:
        raise ValueError(
            "a step can be recorded only on one GPU, for batches of one shape with rows of texts below "
            f"{MIN_QUERIES_WITHOUT_TABLE} tokens, without activation_checkpointing: leave cuda_graph out"
        )
    capture = capture and recipe.cuda_graph is not False
    optimizers = make_optimizers(model, recipe, capturable=capture)
    for optimizer in optimizers:
        init_state(optimizer)
    ema = EMA(model, recipe.ema_decay) if recipe.ema_decay else None
    return (CUDAGraphTrainStep if capture else TrainStep)(
        loss_module, model, optimizers, recipe, ema, distributed, mixed_precision
    )


def fold_seed(seed: int, step: int, micro_index: int) -> int:
    """One number from three: chance depends on the place in the run alone, not on what ran before or on how
    many devices.
    """
    out = seed
    for part in (step, micro_index):
        out = (out * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
        out ^= out >> 29
    return out
