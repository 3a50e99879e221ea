"""Biases and bad words follow their plain definition, in as many operations for 512 rows as for 2."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from keepleft.decoding.hypotheses import Hypotheses
from keepleft.decoding.logits_processors import sequence_bias

VOCAB = 7
SEQUENCES = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5).map(tuple)
BIASES = st.dictionaries(SEQUENCES, st.sampled_from([-2.5, 0.75, 3.0, float("-inf")]), max_size=23)


def hypotheses(rows: list[list[int]], padding: int) -> Hypotheses:
    """Sequences of one width; the first `padding` tokens of the first row are none of its text."""
    tokens = torch.tensor(rows)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[0, :padding] = False
    zeros = torch.zeros(len(rows))
    lengths = torch.zeros(len(rows), dtype=torch.long)
    return Hypotheses(tokens, zeros, zeros.bool(), lengths, lengths + 5, tokens.shape[1], mask)


def biased_by_definition(
    logits: Tensor, texts: list[list[int]], biases: dict[tuple[int, ...], float]
) -> Tensor:
    logits = logits.clone()
    for n, text in enumerate(texts):
        for sequence, value in biases.items():
            prefix = list(sequence[:-1])
            if text[len(text) - len(prefix) :] == prefix:
                logits[n, sequence[-1]] += value
    return logits


@settings(deadline=None)
@given(
    BIASES,
    st.integers(1, 11).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, VOCAB - 1), min_size=width, max_size=width), min_size=1, max_size=3
        )
    ),
    st.data(),
)
def test_biases_are_added_as_defined(
    biases: dict[tuple[int, ...], float], rows: list[list[int]], data: st.DataObject
) -> None:
    padding = data.draw(st.integers(0, len(rows[0]) - 1))
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))
    texts = [rows[0][padding:], *rows[1:]]
    result = sequence_bias(biases)(logits, hypotheses(rows, padding))
    torch.testing.assert_close(result, biased_by_definition(logits, texts, biases))


def test_a_prefix_longer_than_the_text_does_not_match() -> None:
    logits = torch.zeros(1, VOCAB)
    assert torch.equal(sequence_bias({(3, 3, 5): 1.0})(logits, hypotheses([[3]], 0)), logits)


class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_many_sequences_take_as_many_operations_as_few() -> None:
    """The engine's step must not get longer with every bad word of somebody else's request."""
    state = hypotheses([[3, 4, 5], [4, 5, 6]], 0)
    counts = []
    for num_sequences in (2, 512):
        processor = sequence_bias({(n, n + 1): -1.0 for n in range(num_sequences)})
        logits = torch.zeros(2, 521)
        processor(logits, state)  # the first call makes the constants
        with CountOperations() as operations:
            processor(logits, state)
        counts.append(operations.count)
    assert counts[0] == counts[1]
