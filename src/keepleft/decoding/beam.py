"""Beam search: several texts side by side; of those that end, the best by log-probability for their length.

The rules are those of Hugging Face's `generate`, so that texts agree token for token: as many candidates are looked at as there
can be ends and still enough to go on with; only an end among the best `width` counts; `early` says when to stop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.decoding.chance import mixed, uniform
from keepleft.decoding.hypotheses import Hypotheses, Transform, Written, among, changed
from keepleft.decoding.single import Stop
from keepleft.nn.best import best

NEVER = -1.0e9  # the score of what is out of the race


@dataclass(frozen=True, kw_only=True)
class Beams(Hypotheses):
    """Texts that go on, `width` for each prompt, and the best of those that have ended."""

    ended: Tensor        # (B, width, T) tokens
    ended_score: Tensor  # (B, width) by which they are ranked
    ended_size: Tensor   # (B, width) tokens added
    full: Tensor         # (B, width) is there a text at all
    hope: Tensor         # (B, groups) a text that goes on may still be better

    def fixed(self, width: int) -> Self:
        return replace(super().fixed(width), ended=F.pad(self.ended, (width - self.ended.shape[-1], 0)))


class _Part(NamedTuple):
    """What one group did: (B, size) of the texts that go on, and of those that have ended."""

    parents: Tensor
    tokens: Tensor
    score: Tensor
    histories: Tensor    # (B, 2 · size, T) of those that have ended, and of those that go on
    ended_score: Tensor
    ended_size: Tensor
    full: Tensor
    hope: Tensor         # (B, 1)
    over: Tensor         # (B, 1) nothing more is to be done


@dataclass(frozen=True)
class Beam:
    """`width` texts for each prompt, in `groups` that avoid one another's tokens; drawn instead of ranked where there
    are `seeds`. Score: log-probability / length ** penalty."""

    width: int
    penalty: float = 1.0
    early: bool | Literal["never"] = False  # stop as soon as `width` texts have ended; by a guess; only when none can be better
    end: tuple[int, ...] = ()
    transforms: Sequence[Transform] = ()
    stop: Stop | None = None
    groups: int = 1
    apart: float = 0.0                      # taken off a token's score for each time that an earlier group chose it just now
    seeds: Tensor | None = None             # (B,)
    keep: int = 1                           # texts to show for each prompt

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a beam of {self.width} is none: it must be at least 1 wide")
        if self.groups < 1 or self.width % self.groups:
            raise ValueError(f"{self.width} beams cannot be {self.groups} groups of one size: one must divide the other")

    def begin(self, prompt: Tensor, real: Tensor | None, most: Tensor) -> tuple[Hypotheses, Tensor | None]:
        n, device = len(prompt), prompt.device
        rows = torch.arange(n, device=device).repeat_interleave(self.width)
        first = torch.arange(self.width, device=device) % (self.width // self.groups) == 0
        score = torch.where(first, 0.0, NEVER).repeat(n)  # all texts of a group are the same yet: one of them goes on
        return Beams(prompt[rows], score, torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows), most[rows],
                     prompt.shape[1], None if real is None else real[rows],
                     ended=prompt[rows].view(n, self.width, -1), ended_score=score.new_full((n, self.width), NEVER),
                     ended_size=rows.new_zeros(n, self.width), full=rows.new_zeros(n, self.width, dtype=torch.bool),
                     hope=rows.new_ones(n, self.groups, dtype=torch.bool)), rows

    def choose(self, scores: Tensor, texts: Beams) -> tuple[Hypotheses, Tensor | None]:
        n, size, vocab = len(texts.ended), self.width // self.groups, scores.shape[-1]
        count = self.candidates(vocab)
        if self.groups == 1 and self.seeds is None:
            return self._joined(texts, [self._advance(*self._likeliest(scores, texts, count), texts, slice(0, self.width), 0)])
        chances = self._chances(scores, texts).view(n, self.width, -1)
        before = texts.score.view(n, self.width)
        used = torch.zeros_like(chances[:, 0])
        parts = []
        for group in range(self.groups):
            here = slice(group * size, (group + 1) * size)
            total = (before[:, here, None] + chances[:, here] - self.apart * used[:, None]).flatten(1)
            if self.seeds is None:
                likely, place = total.topk(count)
            else:  # without putting back: by the largest sums with a Gumbel number added
                added = self._added(texts)
                seeds = mixed(self.seeds.to(total.device), added if isinstance(added, int) else added.flatten())
                noise = uniform(seeds[:, None],
                                torch.arange(total.shape[1], device=total.device) + group * total.shape[1])
                _, place = (total.double() - (-noise.clamp(min=1e-300).log()).log()).topk(count)
                likely = total.gather(1, place)
            part = self._advance(likely, place // vocab + here.start, place % vocab, texts, here, group)
            parts.append(part)
            if self.groups > 1:
                used.scatter_add_(1, part.tokens, torch.ones_like(part.score))
        return self._joined(texts, parts)

    def _added(self, texts: Beams) -> int | Tensor:
        """How many tokens were added; (B, 1) where prompts began at different times."""
        added = texts.added
        return added if isinstance(added, int) or not added.dim() else added.view(-1, self.width)[:, :1]

    def candidates(self, vocab: int) -> int:
        """How many continuations of a group are looked at: as many as can end, and still enough to go on with."""
        size = self.width // self.groups
        return min(max(2, 1 + len(self.end)) * size, size * vocab)

    def _chances(self, scores: Tensor, texts: Beams) -> Tensor:
        chances = (scores if scores.dtype == torch.float64 else scores.float()).log_softmax(-1)
        return changed(chances, texts, self.transforms, self.width)

    def _likeliest(self, scores: Tensor, texts: Beams, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """(B, count) sums of log-probabilities, the texts that they continue, and their tokens."""
        n = len(texts.ended)
        if self.transforms:
            found = best(self._chances(scores, texts), count, total=False)
            chances = found.scores
        else:
            found = best(scores, count)
            chances = found.scores - found.total[:, None]
        each = chances.shape[1]
        likely, place, _ = best((texts.score[:, None] + chances).view(n, -1), count, total=False)
        return likely, place // each, found.tokens.view(n, -1).gather(1, place)

    def _advance(self, likely: Tensor, parents: Tensor, tokens: Tensor, texts: Beams, here: slice, group: int) -> _Part:
        """The next tokens of one group, from candidates (B, count), the likeliest first."""
        (n, count), size, length = likely.shape, self.width // self.groups, self._added(texts) + 1
        before = texts.tokens.view(n, self.width, -1)
        most = texts.most.view(n, self.width)[:, :1]
        ends = (length >= most).expand_as(tokens)
        if self.end:
            ends = ends | among(tokens, self.end)
        if self.stop is not None:
            longer = texts.appended(_taken(before, parents), tokens[..., None])
            ends = ends | self.stop(longer.flatten(0, 1), texts.begin).view(n, count)
        on, kept, _ = best(torch.add(likely, ends, alpha=NEVER), size, total=False)
        # of the ends only those among the best count; none where no text can be better, or there are enough
        just = ends & (torch.arange(count, device=ends.device) < size)
        full, hope = texts.full[:, here], texts.hope[:, group:group + 1]
        enough = full.all(1, keepdim=True) if self.early is True else None
        told = torch.add(likely / _power(length, self.penalty, likely), ~just, alpha=NEVER)
        told = torch.add(told, ~hope if enough is None else ~hope | enough, alpha=NEVER)
        scores, which, _ = best(torch.cat([texts.ended_score[:, here], told], 1), size, total=False)
        # of both, where they come from: what had ended before, or a candidate
        old = torch.arange(size, device=which.device).expand(n, -1)
        from_ = torch.cat([torch.cat([old, parents + size], 1).gather(1, which), parents.gather(1, kept) + size], 1)
        last = torch.cat([torch.cat([old, tokens], 1).gather(1, which), tokens.gather(1, kept)], 1)
        histories = texts.appended(_taken(torch.cat([texts.ended[:, here], before], 1), from_), last[..., None])
        sizes = torch.cat([texts.ended_size[:, here], torch.zeros_like(tokens) + length], 1).gather(1, which)
        full = torch.cat([full, just], 1).gather(1, which)
        farthest = (most if self.early == "never" and self.penalty > 0 else torch.zeros_like(most) + length).double()
        worst = torch.where(full, scores.amin(1, keepdim=True), NEVER)
        hope = hope & (on[:, :1] / (farthest ** self.penalty).to(on.dtype) > worst).any(1, keepdim=True)
        over = ~hope | ends.all(1, keepdim=True)
        if self.early is True:
            over = over | full.all(1, keepdim=True)
        return _Part(from_[:, size:] - size, last[:, size:], on, histories, scores, sizes, full, hope, over)

    def _joined(self, texts: Beams, parts: list[_Part]) -> tuple[Hypotheses, Tensor]:
        join = lambda pieces: pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        n, size = len(texts.ended), self.width // self.groups
        parents, _, score, _, ended_score, ended_size, full, hope, over = map(join, zip(*parts, strict=True))
        rows = (parents + torch.arange(n, device=parents.device)[:, None] * self.width).flatten()
        done = over.all(1, keepdim=True).expand(-1, self.width).flatten()
        ended, tokens = (join([part.histories[:, which] for part in parts]) for which in (slice(0, size), slice(size, None)))
        out = replace(texts, tokens=tokens.flatten(0, 1), score=score.flatten(), done=done, size=texts.size + 1,
                      ended=ended, ended_score=ended_score, ended_size=ended_size, full=full, hope=hope, **texts.marks(rows))
        return out, rows

    def results(self, texts: Beams) -> list[list[Written]]:
        texts = texts.free()
        if not bool(texts.full.any(1).all()):  # stopped before any has ended: those that were going on
            here = texts.score.view_as(texts.ended_score) / max(1, texts.written) ** self.penalty
            bare = ~texts.full.any(1, keepdim=True)
            texts = replace(texts, ended_score=torch.where(bare, here, texts.ended_score),
                            ended=torch.where(bare[..., None], texts.tokens.view_as(texts.ended), texts.ended),
                            ended_size=torch.where(bare, texts.written, texts.ended_size))
        scores, order = texts.ended_score.sort(dim=1, descending=True, stable=True)
        sizes, ended = texts.ended_size.tolist(), texts.ended[..., texts.begin:].tolist()
        out = []
        for row, (values, places) in enumerate(zip(scores.tolist(), order.tolist(), strict=True)):
            found: dict[tuple[int, ...], float] = {}
            for value, place in zip(values, places, strict=True):
                if value > NEVER / 2:
                    found.setdefault(tuple(ended[row][place][:sizes[row][place]]), value)
            texts_found = [Written(list(tokens), value) for tokens, value in found.items()][:self.keep]
            out.append(texts_found or [Written([], NEVER)])  # where everything was ruled out
        return out


def beam(width: int, *, penalty: float = 1.0, early: bool | Literal["never"] = False, end: Collection[int] = (),
         transforms: Sequence[Transform] = (), groups: int = 1, apart: float = 0.0, keep: int = 1) -> Beam:
    """The `width` likeliest texts so far go on; `keep` of those that ended are shown."""
    return Beam(width, penalty, early, tuple(end), tuple(transforms), None, groups, apart, None, keep)


def _power(length: int | Tensor, penalty: float, like: Tensor) -> float | Tensor:
    return length ** penalty if isinstance(length, int) else (length.double() ** penalty).to(like.dtype)  # type: ignore[no-any-return]


def _taken(texts: Tensor, which: Tensor) -> Tensor:
    """(B, n, T) and (B, k) numbers of texts → (B, k, T)"""
    return texts.gather(1, which[..., None].expand(-1, -1, texts.shape[-1]))
