"""What changes the scores before a token is chosen: penalties, bans and biases. Each is (scores, texts) → scores.

They look at the text so far, prompt included, as Hugging Face's processors do; unlike these they never take the padding of a
shorter prompt for text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from keepleft.decoding.hypotheses import Hypotheses, Transform, held

OUT = float("-inf")


def repetition(penalty: float) -> Transform:
    """Scores of tokens that were there already, divided by the penalty, or times it where they are negative."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        return torch.where(seen(scores, texts), punished(scores, penalty), scores)
    return apply


def punished(scores: Tensor, penalty: float) -> Tensor:
    return torch.where(scores < 0, scores * penalty, scores / penalty)


def seen(scores: Tensor, texts: Hypotheses) -> Tensor:
    """(N, V) which tokens are in the text."""
    return counted(scores, texts.tokens, texts.known()) > 0


def counted(scores: Tensor, tokens: Tensor, known: Tensor | None) -> Tensor:
    """(N, V) how often each token is among these, (N, T)."""
    ones = torch.ones_like(tokens, dtype=scores.dtype) if known is None else known.to(scores.dtype)
    return torch.zeros_like(scores).scatter_add_(1, tokens.clamp(max=scores.shape[-1] - 1), ones)


def presence(penalty: float) -> Transform:
    """Taken off once for a token that was written already (the prompt does not count), as in OpenAI's interface."""
    return lambda scores, texts: scores - penalty * (counted(scores, *texts.own()) > 0)


def frequency(penalty: float) -> Transform:
    """Taken off for each time that a token was written already."""
    return lambda scores, texts: scores - penalty * counted(scores, *texts.own())


def no_repeat(size: int) -> Transform:
    """No run of `size` tokens comes twice."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        return _unrepeated(scores, texts.tokens, texts.tokens, texts.known(), size)
    return apply


def no_repeat_of(source: Tensor, size: int, known: Tensor | None = None) -> Transform:
    """No run of `size` tokens of the source comes. (B, S), a row for each prompt."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        each = len(scores) // len(source)
        rows = source.repeat_interleave(each, 0)
        return _unrepeated(scores, texts.tokens, rows, None if known is None else known.repeat_interleave(each, 0), size)
    return apply


def _unrepeated(scores: Tensor, tokens: Tensor, there: Tensor, known: Tensor | None, size: int) -> Tensor:
    if there.shape[1] < size or tokens.shape[1] < size - 1:
        return scores
    runs = there.unfold(1, size, 1)  # (N, runs, size)
    same = (runs[..., :-1] == tokens[:, None, tokens.shape[1] - size + 1:]).all(-1)
    if known is not None:
        same = same & known.unfold(1, size, 1).all(-1)
    return scores.masked_fill(counted(scores, runs[..., -1], same) > 0, OUT)


def from_source(penalty: float, source: Tensor, known: Tensor | None = None) -> Transform:
    """Tokens of the source made likelier (above 1) or less likely: Hugging Face's encoder_repetition_penalty."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        each = len(scores) // len(source)
        rows = source.repeat_interleave(each, 0)
        there = counted(scores, rows, None if known is None else known.repeat_interleave(each, 0)) > 0
        return torch.where(there, punished(scores, 1.0 / penalty), scores)
    return apply


def bias(of: Mapping[tuple[int, ...], float]) -> Transform:
    """Something added to the last token of a run whose other tokens have just come; -∞ bans it."""
    singles = {run[0]: value for run, value in of.items() if len(run) == 1}
    longer = [(run, value) for run, value in of.items() if len(run) > 1]

    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        within(scores, [token for run in of for token in run])
        scores = scores.clone()
        if singles:
            scores[:, held(tuple(singles), scores.device)] += held(tuple(singles.values()), scores.device).to(scores.dtype)
        known = texts.known()
        for run, value in longer:
            size = len(run) - 1
            if size > texts.tokens.shape[1]:
                continue
            just = (texts.tokens[:, -size:] == held(run[:-1], scores.device)).all(1)
            if known is not None:
                just = just & known[:, -size:].all(1)
            scores[:, run[-1]] += torch.where(just, value, 0.0)
        return scores
    return apply


def within(scores: Tensor, tokens: Sequence[int]) -> None:
    if beyond := [token for token in tokens if not 0 <= token < scores.shape[-1]]:
        raise ValueError(f"token {beyond[0]} is not one of the {scores.shape[-1]} that the model knows: take it out")


def never(tokens: Sequence[int], *, until: int | None = None, only_at: int | None = None) -> Transform:
    """Tokens that do not come: at all, before so many tokens were written, or just at one of them."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        within(scores, tokens)
        now: bool | Tensor = True
        if until is not None:
            now = texts.added < until
        elif only_at is not None:
            now = texts.added == only_at
        return _when(now, lambda: scores.index_fill(1, held(tuple(tokens), scores.device), OUT), scores)
    return apply


def never_before(tokens: Sequence[int], length: int) -> Transform:
    """Tokens that do not come before the text, prompt included, has so many."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        within(scores, tokens)
        known = texts.known()
        short = (scores.new_full((len(scores),), texts.tokens.shape[1]) if known is None else known.sum(1)) < length
        return torch.where(short[:, None], scores.index_fill(1, held(tuple(tokens), scores.device), OUT), scores)
    return apply


def only(tokens: Sequence[int]) -> Transform:
    """A shortlist: no other token comes."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        within(scores, tokens)
        at = held(tuple(tokens), scores.device)
        return torch.full_like(scores, OUT).index_copy_(1, at, scores[:, at])
    return apply


def forced(tokens: Sequence[int], at: int) -> Transform:
    """One of these, and no other, when so many tokens were written."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        within(scores, tokens)
        return _when(texts.added == at, lambda: _just(tokens, scores), scores)
    return apply


def forced_last(tokens: Sequence[int]) -> Transform:
    """One of these, and no other, as the last token that a text may have."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        within(scores, tokens)
        return torch.where((texts.most == texts.added + 1)[:, None], _just(tokens, scores), scores)
    return apply


def ending_sooner(start: int, factor: float, end: Sequence[int]) -> Transform:
    """From `start` tokens on the end becomes likelier, more so with each: Hugging Face's exponential_decay_length_penalty."""
    def apply(scores: Tensor, texts: Hypotheses) -> Tensor:
        past, at = texts.added - start, held(tuple(end), scores.device)

        def sooner() -> Tensor:
            growth = factor ** past if isinstance(past, int) else (factor ** past.double()).to(scores.dtype).view(-1, 1)
            return scores.index_add(1, at, (scores[:, at].abs() * (growth - 1)).masked_fill(~scores[:, at].isfinite(), 0.0))
        return _when(past > 0, sooner, scores)
    return apply


def _just(tokens: Sequence[int], scores: Tensor) -> Tensor:
    """Nothing but these."""
    return torch.full_like(scores, OUT).index_fill_(1, held(tuple(tokens), scores.device), 0.0)


def _when(now: bool | Tensor, then: Callable[[], Tensor], scores: Tensor) -> Tensor:
    """One or the other; where only the device knows, both are worked out."""
    if isinstance(now, bool):
        return then() if now else scores
    return torch.where(now.view(-1, 1), then(), scores)


def finite(scores: Tensor, texts: Hypotheses) -> Tensor:
    """What is no number becomes 0, what is infinite the largest number there is."""
    return torch.nan_to_num(scores)


def normal(scores: Tensor, texts: Hypotheses) -> Tensor:
    """Log-probabilities again, after other transforms."""
    return scores.log_softmax(-1)
