"""What has been written so far, and what decoding asks of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
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
    count: Tensor | None = None  # () or (N,) tokens added, where texts keep their width; see `fixed`

    @property
    def written(self) -> int:
        """How many tokens were added."""
        return self.tokens.shape[1] - self.begin

    @property
    def added(self) -> int | Tensor:
        """The same; a number on the device, or (N,) of them, where texts keep their width."""
        return self.written if self.count is None else self.count

    def known(self) -> Tensor | None:
        """(N, T) which of the tokens are text; None: all."""
        if self.real is None or self.count is not None:
            return self.real
        return torch.cat([self.real, self.real.new_ones(len(self.real), self.written)], 1)

    def own(self) -> tuple[Tensor, Tensor | None]:
        """(N, t) tokens among which are all that were added, and which they are; None: all."""
        if self.count is None:
            return self.tokens[:, self.begin:], None
        width = self.tokens.shape[1]
        begin = width - self.count.view(-1, 1)
        return self.tokens, (torch.arange(width, device=begin.device) >= begin).expand_as(self.tokens)

    def appended(self, texts: Tensor, column: Tensor) -> Tensor:
        """(…, T) and (…, 1) → one column longer, or moved by one to the left."""
        return torch.cat([texts if self.count is None else texts[..., 1:], column], -1)

    def marks(self, rows: Tensor | None = None) -> dict[str, Any]:
        """What says which tokens are text, after one more."""
        real = self.real if rows is None or self.real is None else self.real[rows]
        if self.count is None:
            return {"real": real}
        assert real is not None
        return {"real": self.appended(real, real.new_ones(len(real), 1)), "count": self.count + 1}

    def fixed(self, width: int) -> Self:
        """The same in so many columns, now and later: new tokens come in at the right, all else moves to the left.

        Shapes then stay as they are, so that a step can be recorded. What lies before the prompt is no text.
        """
        more = width - self.tokens.shape[1]
        known = torch.ones_like(self.tokens, dtype=torch.bool) if self.real is None else self.known()
        assert known is not None
        return replace(self, tokens=F.pad(self.tokens, (more, 0)), real=F.pad(known, (more, 0)), begin=self.begin + more,
                       count=torch.full((), self.written, device=self.tokens.device))

    def free(self) -> Self:
        """The same without `fixed`: what is left of the width lies before the prompts."""
        if self.count is None:
            return self
        assert self.real is not None
        begin = self.tokens.shape[1] - int(self.count.flatten()[0])  # the same for all, where they are to be told apart from it
        return replace(self, begin=begin, real=self.real[:, :begin], count=None)

    def rows(self, which: Tensor) -> Self:
        """Some of the texts, in another order."""
        return replace(self, tokens=self.tokens[which], score=self.score[which], done=self.done[which],
                       size=self.size[which],
                       most=self.most[which], real=None if self.real is None else self.real[which],
                       count=self.count if self.count is None or not self.count.dim() else self.count[which])


def held(numbers: tuple[int | float, ...], device: torch.device) -> Tensor:
    """A few numbers on a device, put there once."""
    return _held(numbers, tuple(map(type, numbers)), device)


@lru_cache(maxsize=256)
def _held(numbers: tuple[int | float, ...], kinds: tuple[type, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)  # 2 and 2.0 are one to a cache, and two to a tensor: hence the kinds


def among(tokens: Tensor, some: tuple[int, ...]) -> Tensor:
    """Which tokens are one of a few."""
    return tokens == some[0] if len(some) == 1 else (tokens[..., None] == held(some, tokens.device)).any(-1)


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
