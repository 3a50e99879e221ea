"""One text for each prompt: always the likeliest token, or one drawn by its probability."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keepleft.decoding.chance import seeds as seeds_of
from keepleft.decoding.chance import uniform
from keepleft.decoding.hypotheses import Hypotheses, Transform, Written, among, changed
from keepleft.nn.best import best

Stop = Callable[[Tensor, int], Tensor]  # (N, T) texts and where writing began → (N,) which of them end here


@dataclass(frozen=True)
class Single:
    """Greedy where `seeds` is None; otherwise each row is drawn with its own seed."""

    transforms: Sequence[Transform] = ()
    end: tuple[int, ...] = ()
    stop: Stop | None = None
    seeds: Tensor | None = None  # (N,), or those of one prompt for all
    copies: int = 1              # texts from each prompt

    def begin(self, prompt: Tensor, real: Tensor | None, most: Tensor) -> tuple[Hypotheses, Tensor | None]:
        n, device = len(prompt), prompt.device
        texts = Hypotheses(prompt, torch.zeros(n, device=device), torch.zeros(n, dtype=torch.bool, device=device),
                           torch.zeros(n, dtype=torch.long, device=device), most, prompt.shape[1], real)
        if self.copies == 1:
            return texts, None
        rows = torch.arange(n, device=device).repeat_interleave(self.copies)
        return texts.rows(rows), rows

    def choose(self, scores: Tensor, texts: Hypotheses) -> tuple[Hypotheses, Tensor | None]:
        if self.transforms or self.seeds is not None:
            scores = changed(scores.float() if scores.dtype != torch.float64 else scores, texts, self.transforms)
        if self.seeds is None:
            found = best(scores, 1)
            tokens, gain = found.tokens[:, 0], found.scores[:, 0] - found.total
        else:
            seeds = self.seeds.to(scores.device).repeat(len(scores) // len(self.seeds))  # one seed may serve all prompts
            tokens = drawn(scores, uniform(seeds, texts.added))
            gain = scores.gather(1, tokens[:, None])[:, 0] - scores.logsumexp(-1)
        tokens = torch.where(texts.done, texts.tokens[:, -1], tokens)
        return grown(texts, tokens, texts.score + gain.masked_fill(texts.done, 0.0), self.end, self.stop), None

    def results(self, texts: Hypotheses) -> list[list[Written]]:
        texts = texts.free()
        rows = [Written(row[:size], score) for row, size, score in
                zip(texts.tokens[:, texts.begin:].tolist(), texts.size.tolist(), texts.score.tolist(), strict=True)]
        return [rows[n:n + self.copies] for n in range(0, len(rows), self.copies)]


def greedy(*, end: Collection[int] = (), transforms: Sequence[Transform] = ()) -> Single:
    """Always the likeliest token."""
    return Single(tuple(transforms), tuple(end))


def sample(seed: int | Sequence[int], *, end: Collection[int] = (), transforms: Sequence[Transform] = (),
           copies: int = 1) -> Single:
    """Tokens drawn by their probability, `copies` texts from each prompt. One seed for all prompts, or one for each."""
    given = [seed] if isinstance(seed, int) else list(seed)
    each = torch.cat([seeds_of(one, torch.arange(copies)) for one in given])
    return Single(tuple(transforms), tuple(end), None, each, copies)


def drawn(scores: Tensor, chances: Tensor) -> Tensor:
    """(N, V) scores and (N,) numbers in [0, 1) → (N,) tokens: where the running sum of probabilities passes the number."""
    sums = scores.double().softmax(-1).cumsum(-1)
    total = sums[:, -1:]
    at = torch.searchsorted(sums, (chances[:, None].to(sums) * total).contiguous(), right=True)
    return torch.minimum(at, (sums < total).sum(-1, keepdim=True))[:, 0]  # the last that can be drawn, should rounding pass it


def grown(texts: Hypotheses, tokens: Tensor, score: Tensor, end: tuple[int, ...], stop: Stop | None) -> Hypotheses:
    """One token longer."""
    longer = texts.appended(texts.tokens, tokens[:, None])
    size = texts.size + ~texts.done
    done = texts.done | (size >= texts.most)
    if end:
        done = done | among(tokens, end)
    if stop is not None:
        done = done | stop(longer, texts.begin)
    return replace(texts, tokens=longer, score=score, done=done, size=size, **texts.marks())
