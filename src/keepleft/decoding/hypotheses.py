"""Hypotheses, the sequences being decoded; and the protocols of models, strategies and logits processors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class StepModel(Protocol):
    """What decoding asks of a model: start(prompt, …) → logits, state; step(tokens, state) → logits."""

    @property
    def start(self) -> Callable[..., tuple[Tensor, Any]]: ...
    @property
    def step(self) -> Callable[[Tensor, Any], Tensor]: ...


@dataclass(frozen=True)
class Hypotheses:
    """Sequences being decoded, one per row; prompts of unequal length end in the same column."""

    tokens: Tensor  # (N, T) everything so far, prompt included
    score: Tensor  # (N,)   log-probability of the new tokens
    done: Tensor  # (N,)   finished
    lengths: Tensor  # (N,)   new tokens; what follows them in the row is padding
    max_new_tokens: Tensor  # (N,)   limit of new tokens
    prompt_width: int  # the column where generation started
    prompt_mask: Tensor | None = (
        None  # (N, begin) false where a shorter prompt was filled up; None: all are as long
    )
    new_count: Tensor | None = None  # () or (N,) tokens added, where texts keep their width; see `fixed`

    @property
    def new_width(self) -> int:
        """Number of columns generated."""
        return self.tokens.shape[1] - self.prompt_width

    @property
    def num_new(self) -> int | Tensor:
        """The same as a tensor on the device, () or (N,), where sequences have a fixed width."""
        return self.new_width if self.new_count is None else self.new_count

    def text_mask(self) -> Tensor | None:
        """(N, T) which tokens are no padding; None: all."""
        if self.prompt_mask is None or self.new_count is not None:
            return self.prompt_mask
        return torch.cat(
            [self.prompt_mask, self.prompt_mask.new_ones(len(self.prompt_mask), self.new_width)], 1
        )

    def new_tokens(self) -> tuple[Tensor, Tensor | None]:
        """(N, t) columns that hold all new tokens, and a mask of which they are; None: all."""
        if self.new_count is None:
            return self.tokens[:, self.prompt_width :], None
        width = self.tokens.shape[1]
        start = width - self.new_count.view(-1, 1)
        return self.tokens, (torch.arange(width, device=start.device) >= start).expand_as(self.tokens)

    def append_column(self, tokens: Tensor, column: Tensor) -> Tensor:
        """(…, T) and (…, 1) → one column longer, or shifted left by one at a fixed width."""
        return torch.cat([tokens if self.new_count is None else tokens[..., 1:], column], -1)

    def mask_updates(self, rows: Tensor | None = None) -> dict[str, Any]:
        """The mask fields after one more token."""
        prompt_mask = self.prompt_mask if rows is None or self.prompt_mask is None else self.prompt_mask[rows]
        if self.new_count is None:
            return {"prompt_mask": prompt_mask}
        assert prompt_mask is not None
        return {
            "prompt_mask": self.append_column(prompt_mask, prompt_mask.new_ones(len(prompt_mask), 1)),
            "new_count": self.new_count + 1,
        }

    def pad_to_width(self, width: int) -> Self:
        """The same at a fixed width: new tokens enter at the right and everything shifts left.

        Shapes then stay constant, so that a step can be captured as a CUDA graph. Padding lies before the
        prompt.
        """
        padding = width - self.tokens.shape[1]
        text_mask = (
            torch.ones_like(self.tokens, dtype=torch.bool) if self.prompt_mask is None else self.text_mask()
        )
        assert text_mask is not None
        return replace(
            self,
            tokens=F.pad(self.tokens, (padding, 0)),
            prompt_mask=F.pad(text_mask, (padding, 0)),
            prompt_width=self.prompt_width + padding,
            new_count=torch.full((), self.new_width, device=self.tokens.device),
        )

    def unpad(self) -> Self:
        """Undo `pad_to_width`: what is left of the padding lies before the prompts."""
        if self.new_count is None:
            return self
        assert self.prompt_mask is not None
        # the same for all rows wherever unpad is called
        prompt_width = self.tokens.shape[1] - int(self.new_count.flatten()[0])
        return replace(
            self, prompt_width=prompt_width, prompt_mask=self.prompt_mask[:, :prompt_width], new_count=None
        )

    def select_rows(self, rows: Tensor) -> Self:
        """Some of the rows, in another order."""
        return replace(
            self,
            tokens=self.tokens[rows],
            score=self.score[rows],
            done=self.done[rows],
            lengths=self.lengths[rows],
            max_new_tokens=self.max_new_tokens[rows],
            prompt_mask=None if self.prompt_mask is None else self.prompt_mask[rows],
            new_count=self.new_count
            if self.new_count is None or not self.new_count.dim()
            else self.new_count[rows],
        )


def device_constant(numbers: tuple[int | float, ...], device: torch.device) -> Tensor:
    """A few numbers as a tensor on a device, cached."""
    return _device_constant(numbers, tuple(map(type, numbers)), device)


@lru_cache(maxsize=256)
def _device_constant(
    numbers: tuple[int | float, ...], types: tuple[type, ...], device: torch.device
) -> Tensor:
    # 2 and 2.0 are the same cache key but make different tensors: hence the types
    return torch.tensor(numbers, device=device)


def isin(tokens: Tensor, values: tuple[int, ...]) -> Tensor:
    """Which tokens are among these few."""
    return (
        tokens == values[0]
        if len(values) == 1
        else (tokens[..., None] == device_constant(values, tokens.device)).any(-1)
    )


# (N, V) next-token logits → changed logits
LogitsProcessor = Callable[[Tensor, Hypotheses], Tensor]


def apply_processors(
    logits: Tensor, hypotheses: Hypotheses | None, processors: Sequence[LogitsProcessor], group_size: int = 1
) -> Tensor:
    """(N, V) logits after all processors.

    Of `group_size` neighbouring rows at least one must be able to go on.

    `hypotheses` is None only where every processor looks at logits alone; those always leave a token.
    """
    for processor in processors:
        logits = processor(logits, hypotheses)  # type: ignore[arg-type]
    if processors and hypotheses is not None and not logits.is_cuda:  # a GPU would have to be waited for
        can_go_on = logits.isfinite().any(-1) | hypotheses.done
        if not bool(can_go_on.view(-1, group_size).any(1).all()):
            raise ValueError(
                "no token is left to choose from: what is forced, banned or constrained contradicts itself "
                "here"
            )
    return logits


@dataclass(frozen=True)
class FinishedSequence:
    """One finished sequence."""

    tokens: list[int]  # without the prompt, with the end-of-sequence token if there is one
    score: float  # log-probability, or the score that the strategy ranks by


class Strategy(Protocol):
    """A decoding strategy: which tokens come next. Pure functions of logits and hypotheses."""

    def begin(
        self, prompt: Tensor, prompt_mask: Tensor | None, max_new_tokens: Tensor
    ) -> tuple[Hypotheses, Tensor | None]:
        """The initial hypotheses with limits (B,), and the prompt that each row continues (None: its own)."""
        ...

    def choose(self, logits: Tensor, hypotheses: Any) -> tuple[Hypotheses, Tensor | None]:
        """Append one token to each row, and say which row each continues (None: its own)."""
        ...

    def results(self, hypotheses: Any) -> list[list[FinishedSequence]]:
        """The finished sequences of each prompt, best first."""
        ...
