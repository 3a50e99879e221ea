"""One training step: gradient accumulation over micro-batches, gradient clipping, optimizer and EMA update.

TrainStep runs eagerly; CUDAGraphTrainStep captures the same kernels as CUDA graphs and replays them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from keepleft.attention.attend import MIN_QUERIES_WITHOUT_TABLE
from keepleft.cuda_graph import capture_graph
from keepleft.models.heads import LossModule
from keepleft.models.transformer import Model
from keepleft.nn.loss import LossSums
from keepleft.training.activation_checkpointing import checkpoint_activations
from keepleft.training.distributed import DistributedContext
from keepleft.training.ema import EMA
from keepleft.training.optimizer import init_state, make_optimizers
from keepleft.training.precision import MixedPrecision
from keepleft.training.recipe import Recipe

EAGER_STEPS = 3  # steps before the kernels are captured
ASSUMED_FLOPS = 3e14  # per second, of a good GPU: to estimate how long training takes
MIN_COMPILE_SECONDS = 120  # of training, at that rate: above this, compiling saves more time than it takes
# fusing the two gradients of a norm into one kernel makes them take twice as long
COMPILE_OPTIONS: dict[str, Any] = {"triton.mix_order_reduction": False}


class TrainBatch(Protocol):
    """A micro-batch, such as `keepleft.data.batch.Batch`. It may have a method `to(device)`."""

    @property
    def inputs(self) -> dict[str, Tensor]: ...  # the arguments of the model

    @property
    def targets(self) -> Tensor: ...  # (B, T) tokens or (B,) labels, IGNORE_INDEX where there is no target

    @property
    def tokens(self) -> int: ...  # how many targets there are

    @property
    def identity(self) -> str: ...  # where it comes from, for error messages


class TrainStep:
    """Called with the micro-batches of a step: updates the weights and returns the statistics of the step."""

    def __init__(
        self,
        loss_module: Callable[[dict[str, Tensor], Tensor], LossSums],
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
        device = distributed.device
        sum_dtype = torch.float64 if device.type == "cpu" else torch.float32
        self.sums = torch.zeros(3, device=device, dtype=sum_dtype)  # of loss, cross-entropy, correct targets
        self.target_weight = torch.ones((), device=device, dtype=sum_dtype)  # of one target in the gradient

    def __call__(
        self,
        batches: Sequence[TrainBatch],
        total_targets: float,
        lr: float,
        step: int,
        check_stats: Callable[[Tensor], None] = lambda stats: None,
    ) -> Tensor:
        """Do step number `step`, counted from 0, and return its statistics, as in `collect_stats`.

        `total_targets` is the number of targets in all micro-batches of all processes. `check_stats` is
        called with the statistics before the weights change, and may raise (not where a CUDA graph is
        replayed).
        """
        self._set_lr(lr)
        self.sums.zero_()
        self.target_weight.fill_(self.distributed.world_size / total_targets)
        for n, batch in enumerate(batches):
            micro_index = self.distributed.rank + n * self.distributed.world_size
            torch.manual_seed(fold_seed(self.recipe.seed, step, micro_index))
            device_batch = batch.to(self.distributed.device) if hasattr(batch, "to") else batch
            with self.distributed.no_sync(self.loss_module, n == len(batches) - 1):
                self.accumulate(device_batch.inputs, device_batch.targets, n == 0)
        if self.ema is not None:
            self.ema.set_decay(step)
        return self.apply(check_stats)

    def accumulate(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        """Gradient accumulation: the forward and backward pass of one micro-batch (`first` of its step?)."""
        batch_sums = self.loss_module(inputs, targets)
        (batch_sums.loss * self.target_weight).backward()
        self.sums += torch.stack([part.detach().to(self.sums.dtype) for part in batch_sums])

    def apply(self, check_stats: Callable[[Tensor], None]) -> Tensor:
        """Clip the accumulated gradients, check, and update the weights."""
        stats = self.collect_stats(self.clip_gradients())
        check_stats(stats)
        self.update()
        return stats

    def collect_stats(self, grad_norm: Tensor) -> Tensor:
        """(4,): loss, cross-entropy and accuracy per target, gradient norm; to be summed over processes."""
        stats = torch.cat([self.sums * self.target_weight, grad_norm[None].to(self.sums)])
        return stats / self.distributed.world_size

    def clip_gradients(self) -> Tensor:
        """Gradient clipping: scale all gradients so that their norm is at most `max_grad_norm`.

        Returns the norm from before.
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if hasattr(grad_norm, "full_tensor"):  # a DTensor, with FSDP
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
    """The same on a GPU, for batches of one shape: captured as CUDA graphs after a few steps, then replayed.

    The kernels of a small model take less time than Python needs to launch them; a graph launches all of them
    at once. The first micro-batch of a step writes the gradients and the others add to them, so there are two
    graphs. A batch of another shape runs eagerly.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps_done = 0
        self.last_shape: tuple[Any, ...] = ()
        self.captured_shape: tuple[Any, ...] = ()
        self.static_inputs: dict[str, Tensor] = {}  # the targets are under ""
        self.graphs: dict[bool, torch.cuda.CUDAGraph] = {}  # by: is it the first micro-batch of a step?
        self.update_graph: torch.cuda.CUDAGraph | None = None
        self.grad_norm = torch.zeros((), device=self.distributed.device)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.distributed.device)

    def accumulate(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        tensors = {**inputs, "": targets}
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        # captured is the first shape that comes twice in a row: not that of the last batch of an epoch
        usual_shape = self.captured_shape or self.last_shape
        use_graph = self.steps_done >= EAGER_STEPS and shape == usual_shape
        self.last_shape = shape
        if use_graph and first not in self.graphs and (first or self.graphs):
            self._capture(inputs, targets, first)
            self.captured_shape = shape
        if not use_graph or first not in self.graphs:
            if first and self.graphs:  # the graphs hold the addresses of the gradients: zero them in place
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
                p.grad = None  # so that the captured kernels write gradients, and do not add to them
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
    model: Model,
    recipe: Recipe,
    distributed: DistributedContext,
    *,
    tokens_per_step: int = 0,
    row_length: int | None = None,
) -> TrainStep:
    """Build the training step: move, wrap (DDP, FSDP) and compile the model, and choose eager or CUDA graph.

    `tokens_per_step` is about how many tokens a step has. `row_length` is the length of a row of packed
    sequences, or 0 where rows are windows of running text, if all batches have one shape; None if shapes
    differ. Raises ValueError if the recipe asks for what cannot be done here.
    """
    if distributed.strategy == "fsdp" and recipe.optimizer == "muon":
        raise ValueError(
            "muon needs whole matrices, and fsdp shards them: use adamw with fsdp, or muon with ddp"
        )
    on_gpu = distributed.device.type == "cuda"
    single_process = distributed.strategy == "alone"
    mixed_precision = recipe.precision == "bfloat16" or (
        recipe.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported()
    )
    model.to(distributed.device).train()
    if recipe.activation_checkpointing:
        checkpoint_activations(model)
    module: nn.Module = LossModule(model, recipe.label_smoothing, recipe.r_drop)
    if mixed_precision and distributed.strategy != "fsdp":
        module = MixedPrecision(module)
    loss_module: Any = distributed.wrap(module, mixed_precision=mixed_precision)
    num_parameters = sum(p.numel() for p in model.parameters())
    step_flops = 6.0 * num_parameters * tokens_per_step * recipe.passes
    estimated_seconds = step_flops * recipe.steps / ASSUMED_FLOPS
    if recipe.compile or (
        recipe.compile is None and on_gpu and single_process and estimated_seconds > MIN_COMPILE_SECONDS
    ):
        # each shape of a batch is compiled by itself
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        loss_module = torch.compile(loss_module, dynamic=False, options=COMPILE_OPTIONS if on_gpu else None)
    # attention over long packed rows reads the boundaries of the sequences on the CPU: it cannot be captured
    can_capture = (
        on_gpu
        and single_process
        and not recipe.activation_checkpointing
        and row_length is not None
        and row_length < MIN_QUERIES_WITHOUT_TABLE
    )
    if recipe.cuda_graph and not can_capture:
        raise ValueError(
            "a step can be captured as a CUDA graph only on one GPU, for batches of one shape with packed "
            f"rows below {MIN_QUERIES_WITHOUT_TABLE} tokens, without activation_checkpointing: leave "
            "cuda_graph out"
        )
    use_cuda_graph = can_capture and recipe.cuda_graph is not False
    optimizers = make_optimizers(model, recipe, capturable=use_cuda_graph)
    for optimizer in optimizers:
        init_state(optimizer)
    ema = EMA(model, recipe.ema_decay) if recipe.ema_decay else None
    step_class = CUDAGraphTrainStep if use_cuda_graph else TrainStep
    return step_class(loss_module, model, optimizers, recipe, ema, distributed, mixed_precision)


def fold_seed(seed: int, step: int, micro_index: int) -> int:
    """One seed from three numbers: dropout depends on the position in the run alone, not on the devices."""
    out = seed
    for part in (step, micro_index):
        out = (out * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
        out ^= out >> 29
    return out
