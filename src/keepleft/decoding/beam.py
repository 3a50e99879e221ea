"""Beam search: `width` hypotheses side by side; of those that finish, the best by log-probability normalised
by length. Diverse beam search by groups, and stochastic beams by Gumbel noise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from keepleft.decoding.hypotheses import FinishedSequence, Hypotheses, LogitsProcessor, apply_processors, isin
from keepleft.decoding.sampling import StoppingCriterion, splitmix64, uniform
from keepleft.kernels.topk import topk_logsumexp

EXCLUDED_SCORE = -1.0e9  # score of what is out of the race


@dataclass(frozen=True, kw_only=True)
class BeamHypotheses(Hypotheses):
    """Running beams, `width` for each prompt, and the best of those that have finished."""

    finished_tokens: Tensor  # (B, width, T) tokens
    finished_scores: Tensor  # (B, width) by which they are ranked
    finished_lengths: Tensor  # (B, width) tokens added
    has_finished: Tensor  # (B, width) is there a finished hypothesis at all
    can_improve: Tensor  # (B, groups) a running beam may still become better

    def pad_to_width(self, width: int) -> Self:
        return replace(
            super().pad_to_width(width),
            finished_tokens=F.pad(self.finished_tokens, (width - self.finished_tokens.shape[-1], 0)),
        )


class _GroupStep(NamedTuple):
    """The step of one group: (B, size) of running beams, and of finished ones."""

    parents: Tensor
    tokens: Tensor
    score: Tensor
    sequences: Tensor  # (B, 2 · size, T) finished hypotheses, then running beams
    finished_scores: Tensor
    finished_lengths: Tensor
    has_finished: Tensor
    can_improve: Tensor  # (B, 1)
    is_done: Tensor  # (B, 1) nothing more is to be done


@dataclass(frozen=True)
class Beam:
    """`width` texts for each prompt, in `groups` that avoid one another's tokens; drawn instead of ranked
    where there are `seeds`. Score: log-probability / length ** penalty.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = (
        False  # stop as soon as `width` texts have ended; by a guess; only when none can be better
    )
    eos_ids: tuple[int, ...] = ()
    processors: Sequence[LogitsProcessor] = ()
    stop: StoppingCriterion | None = None
    groups: int = 1
    diversity_penalty: float = (
        0.0  # taken off a token's score for each time that an earlier group chose it just now
    )
    seeds: Tensor | None = None  # (B,)
    num_sequences: int = 1  # results for each prompt

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"a beam of {self.width} is none: it must be at least 1 wide")
        if self.groups < 1 or self.width % self.groups:
            raise ValueError(
                f"{self.width} beams cannot be {self.groups} groups of one size: one must divide the other"
            )

    def begin(
        self, prompt: Tensor, prompt_mask: Tensor | None, max_new_tokens: Tensor
    ) -> tuple[Hypotheses, Tensor | None]:
        n, device = len(prompt), prompt.device
        rows = torch.arange(n, device=device).repeat_interleave(self.width)
        is_first = torch.arange(self.width, device=device) % (self.width // self.groups) == 0
        # all beams of a group are still the same: only one of them goes on
        score = torch.where(is_first, 0.0, EXCLUDED_SCORE).repeat(n)
        return BeamHypotheses(
            prompt[rows],
            score,
            torch.zeros_like(rows, dtype=torch.bool),
            torch.zeros_like(rows),
            max_new_tokens[rows],
            prompt.shape[1],
            None if prompt_mask is None else prompt_mask[rows],
            finished_tokens=prompt[rows].view(n, self.width, -1),
            finished_scores=score.new_full((n, self.width), EXCLUDED_SCORE),
            finished_lengths=rows.new_zeros(n, self.width),
            has_finished=rows.new_zeros(n, self.width, dtype=torch.bool),
            can_improve=rows.new_ones(n, self.groups, dtype=torch.bool),
        ), rows

    def choose(self, logits: Tensor, hypotheses: BeamHypotheses) -> tuple[Hypotheses, Tensor | None]:
        n = len(hypotheses.finished_tokens)
        size = self.width // self.groups
        vocab = logits.shape[-1]
        num_candidates = self.num_candidates(vocab)
        if self.groups == 1 and self.seeds is None:
            return self._merge_groups(
                hypotheses,
                [
                    self._advance(
                        *self._top_candidates(logits, hypotheses, num_candidates),
                        hypotheses,
                        slice(0, self.width),
                        0,
                    )
                ],
            )
        logprobs = self._logprobs(logits, hypotheses).view(n, self.width, -1)
        previous_scores = hypotheses.score.view(n, self.width)
        token_counts = torch.zeros_like(logprobs[:, 0])
        group_steps = []
        for group in range(self.groups):
            beams = slice(group * size, (group + 1) * size)
            totals = (
                previous_scores[:, beams, None]
                + logprobs[:, beams]
                - self.diversity_penalty * token_counts[:, None]
            ).flatten(1)
            if self.seeds is None:
                candidate_scores, index = totals.topk(num_candidates)
            else:  # sampling without replacement: the largest sums with Gumbel noise added
                num_new = self._num_new(hypotheses)
                seeds = splitmix64(
                    self.seeds.to(totals.device), num_new if isinstance(num_new, int) else num_new.flatten()
                )
                noise = uniform(
                    seeds[:, None],
                    torch.arange(totals.shape[1], device=totals.device) + group * totals.shape[1],
                )
                _, index = (totals.double() - (-noise.clamp(min=1e-300).log()).log()).topk(num_candidates)
                candidate_scores = totals.gather(1, index)
            group_step = self._advance(
                candidate_scores, index // vocab + beams.start, index % vocab, hypotheses, beams, group
            )
            group_steps.append(group_step)
            if self.groups > 1:
                token_counts.scatter_add_(1, group_step.tokens, torch.ones_like(group_step.score))
        return self._merge_groups(hypotheses, group_steps)

    def _num_new(self, hypotheses: BeamHypotheses) -> int | Tensor:
        """Number of new tokens; (B, 1) where prompts started at different times."""
        num_new = hypotheses.num_new
        return (
            num_new if isinstance(num_new, int) or not num_new.dim() else num_new.view(-1, self.width)[:, :1]
        )

    def num_candidates(self, vocab: int) -> int:
        """How many continuations of a group are looked at: as many as can end, and still enough to go on
        with.
        """
        size = self.width // self.groups
        return min(max(2, 1 + len(self.eos_ids)) * size, size * vocab)

    def _logprobs(self, logits: Tensor, hypotheses: BeamHypotheses) -> Tensor:
        logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        return apply_processors(logprobs, hypotheses, self.processors, self.width)

    def _top_candidates(
        self, logits: Tensor, hypotheses: BeamHypotheses, num_candidates: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, count) sums of log-probabilities, the beams that they continue, and their tokens."""
        n = len(hypotheses.finished_tokens)
        if self.processors:
            top = topk_logsumexp(self._logprobs(logits, hypotheses), num_candidates, with_logsumexp=False)
            logprobs = top.values
        else:
            top = topk_logsumexp(logits, num_candidates)
            logprobs = top.values - top.logsumexp[:, None]
        per_beam = logprobs.shape[1]
        candidate_scores, index, _ = topk_logsumexp(
            (hypotheses.score[:, None] + logprobs).view(n, -1), num_candidates, with_logsumexp=False
        )
        return candidate_scores, index // per_beam, top.tokens.view(n, -1).gather(1, index)

    def _advance(
        self,
        candidate_scores: Tensor,
        parents: Tensor,
        tokens: Tensor,
        hypotheses: BeamHypotheses,
        beams: slice,
        group: int,
    ) -> _GroupStep:
        """One step of a group, from candidates (B, count), best first."""
        (n, num_candidates) = candidate_scores.shape
        size = self.width // self.groups
        length = self._num_new(hypotheses) + 1
        sequences = hypotheses.tokens.view(n, self.width, -1)
        max_new_tokens = hypotheses.max_new_tokens.view(n, self.width)[:, :1]
        finishes = (length >= max_new_tokens).expand_as(tokens)
        if self.eos_ids:
            finishes = finishes | isin(tokens, self.eos_ids)
        if self.stop is not None:
            extended = hypotheses.append_column(_gather_sequences(sequences, parents), tokens[..., None])
            finishes = finishes | self.stop(extended.flatten(0, 1), hypotheses.prompt_width).view(
                n, num_candidates
            )
        running_scores, running_index, _ = topk_logsumexp(
            torch.add(candidate_scores, finishes, alpha=EXCLUDED_SCORE), size, with_logsumexp=False
        )
        # only finished candidates among the best count; none where no beam can improve, or enough have
        # finished
        newly_finished = finishes & (torch.arange(num_candidates, device=finishes.device) < size)
        has_finished = hypotheses.has_finished[:, beams]
        can_improve = hypotheses.can_improve[:, group : group + 1]
        enough_finished = has_finished.all(1, keepdim=True) if self.early_stopping is True else None
        finish_scores = torch.add(
            candidate_scores / _power(length, self.length_penalty, candidate_scores),
            ~newly_finished,
            alpha=EXCLUDED_SCORE,
        )
        finish_scores = torch.add(
            finish_scores,
            ~can_improve if enough_finished is None else ~can_improve | enough_finished,
            alpha=EXCLUDED_SCORE,
        )
        finished_scores, finished_index, _ = topk_logsumexp(
            torch.cat([hypotheses.finished_scores[:, beams], finish_scores], 1), size, with_logsumexp=False
        )
        # where both come from: an earlier finished hypothesis, or a candidate
        old_index = torch.arange(size, device=finished_index.device).expand(n, -1)
        origins = torch.cat(
            [
                torch.cat([old_index, parents + size], 1).gather(1, finished_index),
                parents.gather(1, running_index) + size,
            ],
            1,
        )
        last_tokens = torch.cat(
            [torch.cat([old_index, tokens], 1).gather(1, finished_index), tokens.gather(1, running_index)], 1
        )
        new_sequences = hypotheses.append_column(
            _gather_sequences(torch.cat([hypotheses.finished_tokens[:, beams], sequences], 1), origins),
            last_tokens[..., None],
        )
        finished_lengths = torch.cat(
            [hypotheses.finished_lengths[:, beams], torch.zeros_like(tokens) + length], 1
        ).gather(1, finished_index)
        has_finished = torch.cat([has_finished, newly_finished], 1).gather(1, finished_index)
        max_length = (
            max_new_tokens
            if self.early_stopping == "never" and self.length_penalty > 0
            else torch.zeros_like(max_new_tokens) + length
        ).double()
        worst_finished = torch.where(has_finished, finished_scores.amin(1, keepdim=True), EXCLUDED_SCORE)
        can_improve = can_improve & (
            running_scores[:, :1] / (max_length**self.length_penalty).to(running_scores.dtype)
            > worst_finished
        ).any(1, keepdim=True)
        is_done = ~can_improve | finishes.all(1, keepdim=True)
        if self.early_stopping is True:
            is_done = is_done | has_finished.all(1, keepdim=True)
        return _GroupStep(
            origins[:, size:] - size,
            last_tokens[:, size:],
            running_scores,
            new_sequences,
            finished_scores,
            finished_lengths,
            has_finished,
            can_improve,
            is_done,
        )

    def _merge_groups(
        self, hypotheses: BeamHypotheses, group_steps: list[_GroupStep]
    ) -> tuple[Hypotheses, Tensor]:
        join = lambda pieces: pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
        n, size = len(hypotheses.finished_tokens), self.width // self.groups
        parents, _, score, _, finished_scores, finished_lengths, has_finished, can_improve, is_done = map(
            join, zip(*group_steps, strict=True)
        )
        rows = (parents + torch.arange(n, device=parents.device)[:, None] * self.width).flatten()
        done = is_done.all(1, keepdim=True).expand(-1, self.width).flatten()
        finished_tokens, tokens = (
            join([group_step.sequences[:, span] for group_step in group_steps])
            for span in (slice(0, size), slice(size, None))
        )
        out = replace(
            hypotheses,
            tokens=tokens.flatten(0, 1),
            score=score.flatten(),
            done=done,
            lengths=hypotheses.lengths + 1,
            finished_tokens=finished_tokens,
            finished_scores=finished_scores,
            finished_lengths=finished_lengths,
            has_finished=has_finished,
            can_improve=can_improve,
            **hypotheses.mask_updates(rows),
        )
        return out, rows

    def results(self, hypotheses: BeamHypotheses) -> list[list[FinishedSequence]]:
        hypotheses = hypotheses.unpad()
        if not bool(
            hypotheses.has_finished.any(1).all()
        ):  # stopped before any has ended: those that were going on
            running_scores = (
                hypotheses.score.view_as(hypotheses.finished_scores)
                / max(1, hypotheses.new_width) ** self.length_penalty
            )
            none_finished = ~hypotheses.has_finished.any(1, keepdim=True)
            hypotheses = replace(
                hypotheses,
                finished_scores=torch.where(none_finished, running_scores, hypotheses.finished_scores),
                finished_tokens=torch.where(
                    none_finished[..., None],
                    hypotheses.tokens.view_as(hypotheses.finished_tokens),
                    hypotheses.finished_tokens,
                ),
                finished_lengths=torch.where(
                    none_finished, hypotheses.new_width, hypotheses.finished_lengths
                ),
            )
        scores, order = hypotheses.finished_scores.sort(dim=1, descending=True, stable=True)
        lengths = hypotheses.finished_lengths.tolist()
        finished_tokens = hypotheses.finished_tokens[..., hypotheses.prompt_width :].tolist()
        out = []
        for row, (values, indices) in enumerate(zip(scores.tolist(), order.tolist(), strict=True)):
            unique: dict[tuple[int, ...], float] = {}
            for value, index in zip(values, indices, strict=True):
                if value > EXCLUDED_SCORE / 2:
                    unique.setdefault(tuple(finished_tokens[row][index][: lengths[row][index]]), value)
            sequences = [FinishedSequence(list(tokens), value) for tokens, value in unique.items()][
                : self.num_sequences
            ]
            out.append(sequences or [FinishedSequence([], EXCLUDED_SCORE)])  # where every token was excluded
        return out


def beam(
    width: int,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    eos_ids: Collection[int] = (),
    processors: Sequence[LogitsProcessor] = (),
    groups: int = 1,
    diversity_penalty: float = 0.0,
    num_sequences: int = 1,
) -> Beam:
    """Beam search: the `width` best hypotheses go on; `num_sequences` of the finished ones are returned."""
    return Beam(
        width,
        length_penalty,
        early_stopping,
        tuple(eos_ids),
        tuple(processors),
        None,
        groups,
        diversity_penalty,
        None,
        num_sequences,
    )


def _power(length: int | Tensor, length_penalty: float, like: Tensor) -> float | Tensor:
    return (
        length**length_penalty
        if isinstance(length, int)
        else (length.double() ** length_penalty).to(like.dtype)
    )  # type: ignore[no-any-return]


def _gather_sequences(sequences: Tensor, index: Tensor) -> Tensor:
    """(B, n, T) and (B, k) indices → (B, k, T)"""
    return sequences.gather(1, index[..., None].expand(-1, -1, sequences.shape[-1]))
