"""What has been written so far, and what decoding asks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor


class StepModel(Protocol):
    """All that decoding asks of a model: start(prompt, …) → logits and state; step(tokens, state) → logits."""

    @property
    def start(self) -> Callable[..., tuple[Tensor, Any]]: ...
    @property
    def step(self) -> Callable[[Tensor, Any], Tensor]: ...


@dataclass(frozen=True)
class Hypotheses:
    """Texts that are being written, a row each; prompts of unequal length end in one column."""

    tokens: Tensor  # (N, T) everything so far, prompt included
    score: Tensor  # (N,)   log-probability of what was added
    done: Tensor  # (N,)   nothing more comes here
    lengths: Tensor  # (N,)   tokens added; what is in the row after them is no text
    max_new_tokens: Tensor  # (N,)   tokens that may be added
    prompt_width: int  # the column where writing began
    prompt_mask: Tensor | None = (
        None  # (N, begin) false where a shorter prompt was filled up; None: all are as long
    )
    new_count: Tensor | None = None  # () or (N,) tokens added, where texts keep their width; see `fixed`

    @property
    def new_width(self) -> int:
        """How many tokens were added."""
        return self.tokens.shape[1] - self.prompt_width

    @property
    def num_new(self) -> int | Tensor:
        """The same; a number on the device, or (N,) of them, where texts keep their width."""
        return self.new_width if self.new_count is None else self.new_count

    def text_mask(self) -> Tensor | None:
        """(N, T) which of the tokens are text; None: all."""
        if self.prompt_mask is None or self.new_count is not None:
            return self.prompt_mask
        return torch.cat(
            [self.prompt_mask, self.prompt_mask.new_ones(len(self.prompt_mask), self.new_width)], 1
        )

    def new_tokens(self) -> tuple[Tensor, Tensor | None]:
        """(N, t) tokens among which are all that were added, and which they are; None: all."""
        if self.new_count is None:
            return self.tokens[:, self.prompt_width :], None
        width = self.tokens.shape[1]
        start = width - self.new_count.view(-1, 1)
        return self.tokens, (torch.arange(width, device=start.device) >= start).expand_as(self.tokens)

    def append_column(self, tokens: Tensor, column: Tensor) -> Tensor:
        """(…, T) and (…, 1) → one column longer, or moved by one to the left."""
        return torch.cat([tokens if self.new_count is None else tokens[..., 1:], column], -1)

    def mask_updates(self, rows: Tensor | None = None) -> dict[str, Any]:
        """What says which tokens are text, after one more."""
        prompt_mask = self.prompt_mask if rows is None or self.prompt_mask is None else self.prompt_mask[rows]
        if self.new_count is None:
            return {"prompt_mask": prompt_mask}
        assert prompt_mask is not None
        return {
            "prompt_mask": self.append_column(prompt_mask, prompt_mask.new_ones(len(prompt_mask), 1)),
            "new_count": self.new_count + 1,
        }

    def pad_to_width(self, width: int) -> Self:
        """The same in so many columns, now and later: new tokens come in at the right, all else moves to the
        left.

        Shapes then stay as they are, so that a step can be recorded. What lies before the prompt is no text.
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
        """The same without `fixed`: what is left of the width lies before the prompts."""
        if self.new_count is None:
            return self
        assert self.prompt_mask is not None
        # the same for all, where they are to be told apart from it
        prompt_width = self.tokens.shape[1] - int(self.new_count.flatten()[0])
        return replace(
            self, prompt_width=prompt_width, prompt_mask=self.prompt_mask[:, :prompt_width], new_count=None
        )

    def select_rows(self, rows: Tensor) -> Self:
        """Some of the texts, in another order."""
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
    """A few numbers on a device, put there once."""
    return _device_constant(numbers, tuple(map(type, numbers)), device)


@lru_cache(maxsize=256)
def _device_constant(
    numbers: tuple[int | float, ...], types: tuple[type, ...], device: torch.device
) -> Tensor:
    # 2 and 2.0 are one to a cache, and two to a tensor: hence the kinds
    return torch.tensor(numbers, device=device)


def isin(tokens: Tensor, values: tuple[int, ...]) -> Tensor:
    """Which tokens are one of a few."""
    return (
        tokens == values[0]
        if len(values) == 1
        else (tokens[..., None] == device_constant(values, tokens.device)).any(-1)
    )


# (N, V) scores of what comes next → the same, changed
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
                "no token is left to choose from: what is forced, banned or constrained contradicts itself here"
            )
    return logits


@dataclass(frozen=True)
class FinishedSequence:
    """One finished text."""

    tokens: list[int]  # without the prompt; with its end, if it has one
    score: float  # its log-probability, or what a strategy ranks by


class Strategy(Protocol):
    """How to go on.

    Rows of prompts may become several rows of texts, always the same number, side by side.
    """

    def begin(
        self, prompt: Tensor, prompt_mask: Tensor | None, max_new_tokens: Tensor
    ) -> tuple[Hypotheses, Tensor | None]:
        """The texts to begin with, each of at most so many tokens, (B,), and which prompt each continues
        (None: one each).
        """
        ...

    def choose(self, logits: Tensor, hypotheses: Any) -> tuple[Hypotheses, Tensor | None]:
        """One more token for each text, and which text each continues (None: itself)."""
        ...

    def results(self, hypotheses: Any) -> list[list[FinishedSequence]]:
        """What there is to show for each prompt, the best first."""
        ...
