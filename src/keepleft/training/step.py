"""One step: every micro-batch forward and back, then clipping and the change of the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from keepleft.attention.attend import LARGE
from keepleft.training.average import Average
from keepleft.training.optimizer import optimizers, ready
from keepleft.training.parallel import Team
from keepleft.training.precision import Half
from keepleft.training.pupil import Pupil, recompute
from keepleft.training.recipe import Recipe

EAGER = 3            # steps before the kernels of one are recorded
GOOD_RATE = 3e14     # operations a second of a good GPU
COMPILE: dict[str, Any] = {"triton.mix_order_reduction": False}  # one kernel for a norm's two gradients takes twice as long
COMPILE_PAYS = 120   # seconds of training, at that rate, from which compiling takes less time than it saves


class Step:
    """Called with the batches of a step it changes the weights, and says loss, plain, right and the norm of the gradients."""

    def __init__(self, pupil: Any, model: nn.Module, chosen: list[torch.optim.Optimizer], recipe: Recipe,
                 average: Average | None, team: Team, half: bool = False) -> None:
        self.pupil, self.chosen, self.recipe, self.average, self.team, self.half = pupil, chosen, recipe, average, team, half
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        precise = torch.float64 if team.device.type == "cpu" else torch.float32
        self.sums = torch.zeros(3, device=team.device, dtype=precise)
        self.share = torch.ones((), device=team.device, dtype=precise)  # of one target in the gradient

    def __call__(self, batches: list[Any], total: float, rate: float, number: int,
                 look: Callable[[Tensor], None] = lambda found: None) -> Tensor:
        """`total` targets in all processes; `look` sees what was found before anything changes."""
        self._set(rate)
        self.sums.zero_()
        self.share.fill_(self.team.world / total)
        for n, batch in enumerate(batches):
            torch.manual_seed(mixed(self.recipe.seed, number, self.team.rank + n * self.team.world))
            moved = batch.to(self.team.device) if hasattr(batch, "to") else batch
            with self.team.quiet(self.pupil, n == len(batches) - 1):
                self.learn(moved.inputs, moved.targets, n == 0)
        if self.average is not None:
            self.average.pace(number)
        return self.finish(look)

    def learn(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        """Add the gradients of one micro-batch; there are none yet at the first of a step."""
        found = self.pupil(inputs, targets)
        (found.loss * self.share).backward()
        self.sums += torch.stack([part.detach().to(self.sums.dtype) for part in found])

    def finish(self, look: Callable[[Tensor], None]) -> Tensor:
        found = self.found(self.clip())
        look(found)
        self.change()
        return found

    def found(self, norm: Tensor) -> Tensor:
        """(4,) loss, plain and right for each target, and the norm"""
        return torch.cat([self.sums * self.share, norm[None].to(self.sums)]) / self.team.world

    def clip(self) -> Tensor:
        """The norm of all gradients together, which are scaled down where it is too large."""
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None], foreach=True)
        if hasattr(norm, "full_tensor"):
            norm = norm.full_tensor()
        if self.recipe.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.recipe.clip, norm, foreach=True)
        return norm.detach()

    def change(self) -> None:
        for optimizer in self.chosen:
            optimizer.step()
        self.forget()
        if self.average is not None:
            self.average.add()

    def forget(self) -> None:
        """The gradients of this step."""
        for p in self.parameters:
            p.grad = None

    def _set(self, rate: float) -> None:
        for optimizer in self.chosen:
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


class Replayed(Step):
    """The same on a GPU, for batches of one shape: after a few steps the kernels are recorded, and from then on replayed.

    A small model's kernels take less time than Python needs to ask for them; a recording asks once for all. The first
    micro-batch of a step writes the gradients and the others add to them, so there are two recordings. A batch of another shape
    goes the usual way.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.done = 0
        self.before: tuple[Any, ...] = ()
        self.shape: tuple[Any, ...] = ()
        self.there: dict[str, Tensor] = {}
        self.lessons: dict[bool, torch.cuda.CUDAGraph] = {}
        self.update: torch.cuda.CUDAGraph | None = None
        self.norm = torch.zeros((), device=self.team.device)
        for optimizer in self.chosen:
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(float(group["lr"]), device=self.team.device)

    def learn(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        given = {**inputs, "": targets}
        shape = tuple((name, tuple(tensor.shape)) for name, tensor in given.items())
        settled = self.done >= EAGER and shape == (self.shape or self.before)  # twice the same: no rest of an epoch
        self.before = shape
        if settled and first not in self.lessons and (first or self.lessons):
            self._record(inputs, targets, first)
            self.shape = shape
        if not settled or first not in self.lessons:
            if first and self.lessons:  # gradients have their place by now
                torch._foreach_zero_([p.grad for p in self.parameters if p.grad is not None])
            super().learn(inputs, targets, first)
            return
        for name, tensor in given.items():
            self.there[name].copy_(tensor, non_blocking=True)
        self.lessons[first].replay()

    def _record(self, inputs: dict[str, Tensor], targets: Tensor, first: bool) -> None:
        if first:
            self.there = {name: tensor.clone() for name, tensor in {**inputs, "": targets}.items()}
            for p in self.parameters:
                p.grad = None  # so that what is recorded writes and does not add
        self.lessons[first] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.lessons[first]):
            super().learn({name: self.there[name] for name in inputs}, self.there[""], first)

    def finish(self, look: Callable[[Tensor], None]) -> Tensor:
        self.done += 1
        if not self.lessons:
            return super().finish(look)
        if self.update is None:
            self.update = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.update):
                self.norm.copy_(self.clip())
                self.change()
        self.update.replay()
        return self.found(self.norm)

    def forget(self) -> None:
        if not self.lessons:
            super().forget()


def set_up(model: nn.Module, recipe: Recipe, team: Team, *, tokens: int = 0, wide: int | None = None) -> Step:
    """Everything that a step needs, by the recipe and the devices.

    `tokens`: about how many a step has. `wide`: the tokens in a row of texts, where all batches have one shape, or 0 where
    rows are running text; None where shapes differ.
    """
    if team.way == "fsdp" and recipe.optimizer == "muon":
        raise ValueError("muon needs whole matrices, and fsdp shards them: use adamw with fsdp, or muon with ddp")
    on_gpu, alone = team.device.type == "cuda", team.way == "alone"
    half = recipe.precision == "bfloat16" or (recipe.precision == "auto" and on_gpu and torch.cuda.is_bf16_supported())
    model.to(team.device).train()
    if recipe.recompute:
        recompute(model)
    body: nn.Module = Pupil(model, recipe.smoothing)
    pupil: Any = team.wrap(Half(body) if half and team.way != "fsdp" else body, half=half)
    seconds = 6.0 * sum(p.numel() for p in model.parameters()) * tokens * recipe.steps / GOOD_RATE
    if recipe.compile or (recipe.compile is None and on_gpu and alone and seconds > COMPILE_PAYS):
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)  # one for each shape
        pupil = torch.compile(pupil, dynamic=False, options=COMPILE if on_gpu else None)
    # texts in long rows are attended by kernels that ask the CPU for their borders, which cannot be recorded
    record = on_gpu and alone and not recipe.recompute and wide is not None and wide < LARGE
    if recipe.replay and not record:
        raise ValueError("a step can be recorded only on one GPU, for batches of one shape with rows of texts below "
                         f"{LARGE} tokens, without recompute: leave replay out")
    record = record and recipe.replay is not False
    chosen = optimizers(model, recipe, recorded=record)
    for optimizer in chosen:
        ready(optimizer)
    average = Average(model, recipe.average) if recipe.average else None
    return (Replayed if record else Step)(pupil, model, chosen, recipe, average, team, half)


def mixed(seed: int, step: int, micro: int) -> int:
    """One number from three: chance depends on the place in the run alone, not on what ran before or on how many devices."""
    out = seed
    for part in (step, micro):
        out = (out * 6364136223846793005 + part + 1442695040888963407) % (1 << 63)
        out ^= out >> 29
    return out
