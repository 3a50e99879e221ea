"""Logits processors: penalties, bans and biases, each (logits, hypotheses) → logits.

They look at the sequence so far, prompt included, as Hugging Face's processors do; unlike those they never
take the padding of a shorter prompt for tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from keepleft.decoding.filters import NEG_INF
from keepleft.decoding.hypotheses import Hypotheses, LogitsProcessor


def repetition_penalty(penalty: float) -> LogitsProcessor:
    """Divide the logits of tokens that occurred already by the penalty; multiply them where they are
    negative.
    """

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        return torch.where(seen_tokens(logits, hypotheses), apply_penalty(logits, penalty), logits)

    return apply


def apply_penalty(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits < 0, logits * penalty, logits / penalty)


def seen_tokens(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
    """(N, V) which tokens occur in the sequence."""
    return token_counts(logits, hypotheses.tokens, hypotheses.text_mask()) > 0


def token_counts(logits: Tensor, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """(N, V) how often each token occurs among these, (N, T)."""
    ones = torch.ones_like(tokens, dtype=logits.dtype) if mask is None else mask.to(logits.dtype)
    return torch.zeros_like(logits).scatter_add_(1, tokens.clamp(max=logits.shape[-1] - 1), ones)


def presence_penalty(penalty: float) -> LogitsProcessor:
    """Taken off once for a token that was written already (the prompt does not count), as in OpenAI's
    interface.
    """
    return lambda logits, hypotheses: logits - penalty * (token_counts(logits, *hypotheses.new_tokens()) > 0)


def frequency_penalty(penalty: float) -> LogitsProcessor:
    """Subtract the penalty for each time a token was generated already."""
    return lambda logits, hypotheses: logits - penalty * token_counts(logits, *hypotheses.new_tokens())


def no_repeat_ngram(ngram_size: int) -> LogitsProcessor:
    """No n-gram of `size` tokens occurs twice."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        return _ban_repeated_ngrams(
            logits, hypotheses.tokens, hypotheses.tokens, hypotheses.text_mask(), ngram_size
        )

    return apply


def encoder_no_repeat_ngram(
    source: Tensor, ngram_size: int, source_mask: Tensor | None = None
) -> LogitsProcessor:
    """No n-gram of `size` tokens of the source occurs; source (B, S), one row per prompt."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        rows_per_source = len(logits) // len(source)
        source_tokens = source.repeat_interleave(rows_per_source, 0)
        return _ban_repeated_ngrams(
            logits,
            hypotheses.tokens,
            source_tokens,
            None if source_mask is None else source_mask.repeat_interleave(rows_per_source, 0),
            ngram_size,
        )

    return apply


def _ban_repeated_ngrams(
    logits: Tensor, tokens: Tensor, history: Tensor, mask: Tensor | None, ngram_size: int
) -> Tensor:
    if history.shape[1] < ngram_size or tokens.shape[1] < ngram_size - 1:
        return logits
    ngrams = history.unfold(1, ngram_size, 1)  # (N, runs, size)
    matches = (ngrams[..., :-1] == tokens[:, None, tokens.shape[1] - ngram_size + 1 :]).all(-1)
    if mask is not None:
        matches = matches & mask.unfold(1, ngram_size, 1).all(-1)
    return logits.masked_fill(token_counts(logits, ngrams[..., -1], matches) > 0, NEG_INF)


def encoder_repetition_penalty(
    penalty: float, source: Tensor, source_mask: Tensor | None = None
) -> LogitsProcessor:
    """Make tokens of the source more likely (above 1) or less: Hugging Face's encoder_repetition_penalty."""

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        rows_per_source = len(logits) // len(source)
        source_tokens = source.repeat_interleave(rows_per_source, 0)
        in_source = (
            token_counts(
                logits,
                source_tokens,
                None if source_mask is None else source_mask.repeat_interleave(rows_per_source, 0),
            )
            > 0
        )
        return torch.where(in_source, apply_penalty(logits, 1.0 / penalty), logits)

    return apply


def sequence_bias(biases: Mapping[tuple[int, ...], float]) -> LogitsProcessor:
    """Add a bias to the last token of a sequence whose other tokens have just occurred; -∞ bans it."""
    ordered = sorted((item for item in biases.items() if item[0]), key=lambda item: len(item[0]))
    named_tokens = DeviceNumbers([token for sequence in biases for token in sequence])
    last_tokens = DeviceNumbers([sequence[-1] for sequence, _ in ordered])
    values = DeviceNumbers([value for _, value in ordered], torch.float32)
    prefixes = [sequence[:-1] for sequence, _ in ordered]
    prefix_counts = Counter(map(len, prefixes))  # in order of length
    # all prefixes, one after the other: the token, how far it stands from the end, and whose it is
    prefix_tokens = DeviceNumbers([token for prefix in prefixes for token in prefix])
    distances = DeviceNumbers([distance for prefix in prefixes for distance in range(len(prefix), 0, -1)])
    owners = DeviceNumbers([n for n, prefix in enumerate(prefixes) for _ in prefix])
    prefix_lengths = DeviceNumbers([len(prefix) for prefix in prefixes])

    def matches(hypotheses: Hypotheses) -> Tensor:
        """(N, sequences) whose prefixes have just occurred."""
        tokens, device = hypotheses.tokens, hypotheses.tokens.device
        columns = tokens.shape[1] - distances.to(device)
        is_equal = tokens[:, columns.clamp(min=0)] == prefix_tokens.to(device)
        is_equal &= columns >= 0
        if (text_mask := hypotheses.text_mask()) is not None:
            is_equal &= text_mask[:, columns.clamp(min=0)]
        num_equal = tokens.new_zeros(len(tokens), len(prefixes))
        num_equal.scatter_add_(1, owners.to(device).expand(len(tokens), -1), is_equal.to(tokens.dtype))
        return num_equal == prefix_lengths.to(device)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        check_in_vocabulary(logits, named_tokens)
        added = values.to(logits.device).to(logits.dtype).expand(len(logits), -1)
        if prefix_tokens.numbers:
            added = torch.where(matches(hypotheses), added, 0.0)
        indices = last_tokens.to(logits.device).expand(len(logits), -1)
        logits = logits.clone()
        # of the sequences of one length with the same last token one matches: their sum has no order
        start = 0
        for count in prefix_counts.values():
            part = slice(start, start + count)
            logits.scatter_add_(1, indices[:, part], added[:, part])
            start += count
        return logits

    return apply


class DeviceNumbers:
    """Numbers as a tensor on each device that asks for it: made once, however many steps there are."""

    def __init__(self, numbers: Sequence[int | float], dtype: torch.dtype = torch.long) -> None:
        self.numbers = tuple(numbers)
        self.dtype = dtype
        self.smallest = min(numbers, default=0)
        self.largest = max(numbers, default=0)
        self.by_device: dict[torch.device, Tensor] = {}

    def to(self, device: torch.device) -> Tensor:
        tensor = self.by_device.get(device)
        if tensor is None:
            tensor = self.by_device[device] = torch.tensor(self.numbers, dtype=self.dtype, device=device)
        return tensor


def check_in_vocabulary(logits: Tensor, tokens: DeviceNumbers) -> None:
    vocab = logits.shape[-1]
    if not 0 <= tokens.smallest <= tokens.largest < vocab:
        unknown = next(token for token in tokens.numbers if not 0 <= token < vocab)
        raise ValueError(f"token {unknown} is not one of the {vocab} that the model knows: take it out")


def suppress_tokens(
    tokens: Sequence[int], *, until: int | None = None, only_at: int | None = None
) -> LogitsProcessor:
    """Ban tokens: always, before so many new tokens, or at just one position."""
    banned = DeviceNumbers(tokens)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        check_in_vocabulary(logits, banned)
        active: bool | Tensor = True
        if until is not None:
            active = hypotheses.num_new < until
        elif only_at is not None:
            active = hypotheses.num_new == only_at
        return _apply_if(active, lambda: logits.index_fill(1, banned.to(logits.device), NEG_INF), logits)

    return apply


def min_length(tokens: Sequence[int], length: int) -> LogitsProcessor:
    """Ban tokens before the sequence, prompt included, has so many tokens."""
    banned = DeviceNumbers(tokens)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        check_in_vocabulary(logits, banned)
        text_mask = hypotheses.text_mask()
        too_short = (
            logits.new_full((len(logits),), hypotheses.tokens.shape[1])
            if text_mask is None
            else text_mask.sum(1)
        ) < length
        return torch.where(
            too_short[:, None], logits.index_fill(1, banned.to(logits.device), NEG_INF), logits
        )

    return apply


def allow_only(tokens: Sequence[int]) -> LogitsProcessor:
    """A shortlist: allow only these tokens."""
    allowed = DeviceNumbers(tokens)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        check_in_vocabulary(logits, allowed)
        indices = allowed.to(logits.device)
        return torch.full_like(logits, NEG_INF).index_copy_(1, indices, logits[:, indices])

    return apply


def force_tokens(tokens: Sequence[int], position: int) -> LogitsProcessor:
    """Force one of these tokens at the position of so many new tokens."""
    forced = DeviceNumbers(tokens)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        check_in_vocabulary(logits, forced)
        return _apply_if(hypotheses.num_new == position, lambda: _only_tokens(forced, logits), logits)

    return apply


def force_last(tokens: Sequence[int]) -> LogitsProcessor:
    """Force one of these tokens as the last one before the limit."""
    forced = DeviceNumbers(tokens)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        check_in_vocabulary(logits, forced)
        return torch.where(
            (hypotheses.max_new_tokens == hypotheses.num_new + 1)[:, None],
            _only_tokens(forced, logits),
            logits,
        )

    return apply


def exponential_decay_length_penalty(start: int, factor: float, eos_ids: Sequence[int]) -> LogitsProcessor:
    """From `start` tokens on the end becomes likelier, more so with each: Hugging Face's
    exponential_decay_length_penalty.
    """
    end_tokens = DeviceNumbers(eos_ids)

    def apply(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
        excess, indices = hypotheses.num_new - start, end_tokens.to(logits.device)

        def boost_eos() -> Tensor:
            growth = (
                factor**excess
                if isinstance(excess, int)
                else (factor ** excess.double()).to(logits.dtype).view(-1, 1)
            )
            return logits.index_add(
                1,
                indices,
                (logits[:, indices].abs() * (growth - 1)).masked_fill(~logits[:, indices].isfinite(), 0.0),
            )

        return _apply_if(excess > 0, boost_eos, logits)

    return apply


def _only_tokens(tokens: DeviceNumbers, logits: Tensor) -> Tensor:
    """Mask all tokens but these."""
    return torch.full_like(logits, NEG_INF).index_fill_(1, tokens.to(logits.device), 0.0)


def _apply_if(condition: bool | Tensor, make_logits: Callable[[], Tensor], logits: Tensor) -> Tensor:
    """One or the other; where only the device knows which, both are computed."""
    if isinstance(condition, bool):
        return make_logits() if condition else logits
    return torch.where(condition.view(-1, 1), make_logits(), logits)


def remove_invalid(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
    """Replace NaN by 0 and infinities by the largest finite numbers."""
    return torch.nan_to_num(logits)


def renormalize(logits: Tensor, hypotheses: Hypotheses) -> Tensor:
    """Normalise to log-probabilities again, after other processors."""
    return logits.log_softmax(-1)
