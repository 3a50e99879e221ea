"""What has been written so far, and what decoding asks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Stepper(Protocol):
    """All that decoding asks of a model."""

    def start(self, prompt: Tensor, **given: Any) -> tuple[Tensor, Any]: ...
    def step(self, tokens: Tensor, state: Any) -> Tensor: ...


@dataclass(frozen=True)
class Hypotheses:
    """Texts that are being written, a row each; prompts of unequal length end in one column."""

    tokens: Tensor              # (N, T) everything so far, prompt included
    score: Tensor               # (N,)   log-probability of what was added
    done: Tensor                # (N,)   nothing more comes here
    size: Tensor                # (N,)   tokens added; what is in the row after them is no text
    most: Tensor                # (N,)   tokens that may be added
    begin: int                  # the column where writing began
    real: Tensor | None = None  # (N, begin) false where a shorter prompt was filled up; None: all are as long

    @property
    def written(self) -> int:
        """How many tokens were added."""
        return self.tokens.shape[1] - self.begin

    def known(self) -> Tensor | None:
        """(N, T) which of the tokens are text; None: all."""
        if self.real is None:
            return None
        return torch.cat([self.real, self.real.new_ones(len(self.real), self.written)], 1)

    def rows(self, which: Tensor) -> Self:
        """Some of the texts, in another order."""
        return replace(self, tokens=self.tokens[which], score=self.score[which], done=self.done[which],
                       size=self.size[which],
                       most=self.most[which], real=None if self.real is None else self.real[which])


Transform = Callable[[Tensor, Hypotheses], Tensor]  # (N, V) scores of what comes next → the same, changed


def changed(scores: Tensor, texts: Hypotheses, transforms: Sequence[Transform], together: int = 1) -> Tensor:
    """Scores after all transforms. Of so many neighbouring texts at least one must be able to go on."""
    for transform in transforms:
        scores = transform(scores, texts)
    if transforms and not scores.is_cuda and not bool((  # a GPU would have to be waited for
            scores.isfinite().any(-1) | texts.done).view(-1, together).any(1).all()):
        raise ValueError("no token is left to choose from: what is forced, banned or ruled contradicts itself here")
    return scores


@dataclass(frozen=True)
class Written:
    """One finished text."""

    tokens: list[int]  # without the prompt; with its end, if it has one
    score: float       # its log-probability, or what a strategy ranks by


class Strategy(Protocol):
    """How to go on. Rows of prompts may become several rows of texts, always the same number, side by side."""

    def begin(self, prompt: Tensor, real: Tensor | None, most: Tensor) -> tuple[Hypotheses, Tensor | None]:
        """The texts to begin with, each of at most so many tokens, (B,), and which prompt each continues (None: one each)."""
        ...

    def choose(self, scores: Tensor, texts: Any) -> tuple[Hypotheses, Tensor | None]:
        """One more token for each text, and which text each continues (None: itself)."""
        ...

    def results(self, texts: Any) -> list[list[Written]]:
        """What there is to show for each prompt, the best first."""
        ...
