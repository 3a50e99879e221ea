"""Teacher forcing: the one place where decoder inputs and targets are made from a sequence."""

from __future__ import annotations

import numpy as np

from keepleft.data.ragged import IntArray, Ragged


def shift_right(start: int | IntArray, sequences: Ragged) -> tuple[Ragged, Ragged]:
    """Inputs and targets of each sequence: the targets are its tokens, the inputs the same shifted right.

    `start` is the first input: one token for all sequences, or one for each.
    """
    flat = np.empty_like(sequences.flat)
    flat[1:] = sequences.flat[:-1]
    nonempty = sequences.lengths > 0
    flat[sequences.starts[nonempty]] = start if isinstance(start, int) else start[nonempty]
    return Ragged(flat, sequences.lengths), sequences
